"""The routes."""

from __future__ import annotations

import logging
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import lru_cache
from importlib import resources
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from mainspring import __version__
from mainspring.engine.async_llm import AsyncLLM
from mainspring.engine.errors import EngineError, RequestError
from mainspring.server.answers import ChatWriter, CompletionWriter
from mainspring.server.errors import ApiError, bad_request, dumps, from_validation
from mainspring.server.metrics import CONTENT_TYPE
from mainspring.server.middleware import Guard
from mainspring.server.params import chat_params, completion_params
from mainspring.server.prompts import encode_text, render_chat, tokenizer_or_400
from mainspring.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from mainspring.server.responses import AnswerResponse, told
from mainspring.server.service import Prompt, Service
from mainspring.server.settings import ServerSettings
from mainspring.server.token_text import TokenText
from mainspring.server.tool_use import ToolUse, tool_use

logger = logging.getLogger("mainspring.server")


class ErrorDetail(BaseModel):
    """What was wrong, and with which field."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Every error's body."""

    error: ErrorDetail


_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": text}
    for status, text in {
        400: "A field is wrong, or not supported.",
        401: "The API key is missing or wrong.",
        404: "The model is not served here.",
        408: "The body came too slowly.",
        413: "The body is too large.",
        415: "The body is not JSON.",
        429: "The queue is full.",
        500: "The engine failed.",
        503: "The model is being loaded, or the server is shutting down.",
        504: "The answer took longer than the server allows.",
    }.items()
}


class Json(Response):
    """JSON, whatever text it holds."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The body."""
        return dumps(content)


def create_app(engine: AsyncLLM, settings: ServerSettings) -> FastAPI:
    """The service over an engine, which may still be loading. The app closes the engine when it ends."""
    service = Service(engine, settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        if engine.is_ready:
            await engine.aclose()

    app = FastAPI(
        title="mainspring",
        version=__version__,
        lifespan=lifespan,
        redoc_url=None,
        docs_url=None,
        default_response_class=Json,
    )
    app.state.service = service
    app.add_middleware(
        Guard,
        api_keys=settings.api_key,
        refuse=service.refusal,
        max_body_bytes=settings.max_body_bytes,
        body_timeout=settings.body_timeout,
        responded=service.metrics.responded,
    )
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(settings.allowed_origins), allow_methods=["*"], allow_headers=["*"]
        )
    _add_error_handlers(app)
    _add_state_routes(app, service)
    _add_text_routes(app, service)
    _add_answer_routes(app, service)
    if settings.page:
        _add_page(app)
    return app


def _add_error_handlers(app: FastAPI) -> None:
    def respond(error: ApiError) -> Response:
        return Json(error.body(), status_code=error.status, headers=error.headers)

    async def api_error(request: Request, error: Exception) -> Response:
        return respond(told(error))

    async def invalid(request: Request, error: Exception) -> Response:
        if not isinstance(error, RequestValidationError):
            return respond(told(error))
        return respond(from_validation(error.errors(), error.body))

    async def http_error(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        detail = error.detail if isinstance(error, HTTPException) else str(error)
        if status == 404:
            detail = f"{request.method} {request.url.path} is not a route of this server"
        headers = dict((error.headers if isinstance(error, HTTPException) else None) or {})
        if status == 400:
            detail = "the body is not JSON"
        return respond(ApiError(status, detail, headers=headers))

    for kind in (ApiError, EngineError, RequestError):
        app.add_exception_handler(kind, api_error)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(Exception, api_error)


def _add_state_routes(app: FastAPI, service: Service) -> None:
    @app.get("/health", responses={503: {"description": "The model is being loaded, or the engine has stopped."}})
    async def health() -> Response:
        """Whether the engine is alive: 200 from when the model is loaded, also while shutting down."""
        state = service.state
        return Json({"status": state}, status_code=200 if state in ("ready", "draining") else 503)

    @app.get("/ready", responses={503: {"description": "Not now."}})
    async def ready() -> Response:
        """Whether requests are served now: 200 once the step is recorded, until the shutdown begins."""
        state = service.state
        return Json({"status": state}, status_code=200 if state == "ready" else 503)

    @app.get("/version")
    async def version() -> Response:
        """The server's version."""
        return Json({"version": __version__})

    @app.get("/metrics")
    async def metrics() -> Response:
        """Counts and times for Prometheus."""
        return Response(service.metrics.render(), headers={"content-type": CONTENT_TYPE})

    @app.get("/v1/models", responses={401: _ERRORS[401], 503: _ERRORS[503]})
    async def models() -> Response:
        """The one model that is served, under each of its names."""
        return Json({"object": "list", "data": [_model(service, name) for name in service.settings.served_model_name]})

    @app.get("/v1/models/{name:path}", responses={401: _ERRORS[401], 404: _ERRORS[404], 503: _ERRORS[503]})
    async def model(name: str) -> Response:
        """One name of the model."""
        service.check_model(name)
        return Json(_model(service, name))


def _model(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.started,
        "owned_by": "mainspring",
        "root": service.model_name,
        "max_model_len": service.engine.llm.core.limits.max_model_len,
    }


def _add_text_routes(app: FastAPI, service: Service) -> None:
    engine = service.engine

    @app.post("/tokenize", responses=_ERRORS)
    async def tokenize(body: TokenizeRequest) -> Response:
        """Token ids of a text or of a conversation."""
        service.check_model(body.model)
        tokenizer = tokenizer_or_400(engine.llm.core.tokenizer)
        if (body.prompt is None) == (body.messages is None):
            raise bad_request("give either prompt or messages", "prompt")
        if body.prompt is not None:
            for name in ("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"):
                if getattr(body, name) is not None:
                    raise bad_request(f"{name} goes with messages, not with prompt", name)

        def work() -> list[int]:
            if body.prompt is not None:
                return encode_text(tokenizer, body.prompt, body.add_special_tokens is not False, "prompt", limit)
            text = render_chat(tokenizer, body, body.tools or (), service.settings.tool_call_parser == "hermes", limit)
            return encode_text(tokenizer, text, bool(body.add_special_tokens), "messages", limit)

        limit = engine.llm.core.limits.max_model_len
        ids = await engine.in_text_thread(work)
        answer: dict[str, Any] = {
            "count": len(ids),
            "max_model_len": limit,
            "tokens": ids,
            "token_strs": tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None,
        }
        return Json(answer)

    @app.post("/detokenize", responses=_ERRORS)
    async def detokenize(body: DetokenizeRequest) -> Response:
        """The text of token ids."""
        service.check_model(body.model)
        tokenizer = tokenizer_or_400(engine.llm.core.tokenizer)
        _check_ids(service, body.tokens, "tokens")
        text = await engine.in_text_thread(lambda: tokenizer.decode(body.tokens, skip_special_tokens=False))
        return Json({"prompt": text})


def _check_ids(service: Service, ids: Sequence[int], field: str) -> None:
    vocab = service.engine.llm.core.config.vocab_size
    wrong = next((token for token in ids if token >= vocab), None)
    if wrong is not None:
        raise bad_request(f"token id {wrong} in {field} is outside the vocabulary of {vocab} (0 to {vocab - 1})", field)


def _check_length(service: Service, ids: Sequence[int], field: str) -> None:
    try:
        service.engine.llm.core.scheduler.check_length(len(ids))
    except RequestError as error:
        raise bad_request(str(error), field, "invalid_value") from error


def _add_answer_routes(app: FastAPI, service: Service) -> None:
    engine = service.engine

    @app.post("/v1/completions", responses=_ERRORS)
    async def completions(body: CompletionRequest) -> Response:
        """Go on from a text or from token ids."""
        service.check_model(body.model)
        core = engine.llm.core
        params = completion_params(body, core.sampling_defaults, detokenize=core.tokenizer is not None)
        given = _given_prompts(body)
        service.make_room(len(given) * params.n)
        prompts = await engine.in_text_thread(lambda: _encoded(service, body, given))
        request_id = body.request_id or f"cmpl-{uuid.uuid4().hex}"
        tokens = TokenText(core.tokenizer, bool(body.return_tokens_as_token_ids))
        writer = CompletionWriter(body, request_id, service.model_name, prompts, params.n, tokens, core.token_decoder)
        generation = await service.start(
            prompts, params, request_id=request_id, priority=body.priority or 0, user=body.user
        )
        return _answer(generation, writer, body)

    @app.post("/v1/chat/completions", responses=_ERRORS)
    async def chat_completions(body: ChatRequest) -> Response:
        """Answer a conversation."""
        service.check_model(body.model)
        core = engine.llm.core
        tokenizer = tokenizer_or_400(core.tokenizer)
        parser = service.settings.tool_call_parser
        tools: ToolUse = tool_use(body, tokenizer, parser)
        if tools.stop is not None:
            stop = [body.stop] if isinstance(body.stop, str) else list(body.stop or ())
            if stop and not body.include_stop_str_in_output:
                raise bad_request("parallel_tool_calls false ends answers by a stop text; leave stop out", "stop")
            body = body.model_copy(update={"stop": [*stop, tools.stop], "include_stop_str_in_output": True})
        params = chat_params(body, core.sampling_defaults, tools.forced)

        def work() -> Prompt:
            limit = core.limits.max_model_len
            text = render_chat(tokenizer, body, tools.shown, parser == "hermes", limit)
            ids = encode_text(tokenizer, text, bool(body.add_special_tokens), "messages", limit)
            _check_length(service, ids, "messages")
            return Prompt(ids, text)

        service.make_room(params.n)
        prompts = [await engine.in_text_thread(work)]
        request_id = body.request_id or f"chatcmpl-{uuid.uuid4().hex}"
        as_text = TokenText(tokenizer, bool(body.return_tokens_as_token_ids))
        writer = ChatWriter(body, request_id, service.model_name, prompts, params.n, as_text, tools)
        generation = await service.start(
            prompts, params, request_id=request_id, priority=body.priority or 0, user=body.user
        )
        return _answer(generation, writer, body)


def _answer(generation: Any, writer: Any, body: CompletionRequest | ChatRequest) -> AnswerResponse:
    include_usage = bool(body.stream_options and body.stream_options.include_usage)
    return AnswerResponse(generation, writer, stream=bool(body.stream), include_usage=include_usage)


def _given_prompts(body: CompletionRequest) -> list[Any]:
    """The prompts of a completion, in order; one where it is a text or a list of token ids."""
    if isinstance(body.prompt, str) or (body.prompt and isinstance(body.prompt[0], int)):
        return [body.prompt]
    if not body.prompt:
        raise bad_request("prompt is an empty list; give at least one prompt", "prompt")
    return list(body.prompt)


def _encoded(service: Service, body: CompletionRequest, given: Sequence[Any]) -> list[Prompt]:
    core = service.engine.llm.core
    tokenizer, limit = core.tokenizer, core.limits.max_model_len
    prompts = []
    for each in given:
        if isinstance(each, str):
            ids = encode_text(tokenizer_or_400(tokenizer), each, body.add_special_tokens is not False, "prompt", limit)
            _check_length(service, ids, "prompt")
            prompts.append(Prompt(ids, each))
        else:
            _check_length(service, each, "prompt")
            _check_ids(service, each, "prompt")
            text = tokenizer.decode(each, skip_special_tokens=False) if body.echo and tokenizer is not None else None
            prompts.append(Prompt(each, text))
    return prompts


@lru_cache(maxsize=1)
def _page() -> bytes:
    return resources.files("mainspring.server").joinpath("page.html").read_bytes()


def _add_page(app: FastAPI) -> None:
    # Nothing from elsewhere, and no script but the page's own.
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'"
    )
    headers = {"content-security-policy": policy, "x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        """A chat box for a person."""
        return Response(_page(), headers={"content-type": "text/html; charset=utf-8", **headers})

    @app.get("/favicon.ico", include_in_schema=False)
    async def icon() -> Response:
        """None."""
        return Response(status_code=204)
