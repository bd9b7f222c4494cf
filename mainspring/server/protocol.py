"""What clients may send. A field that is not here is refused by name; nothing is accepted and ignored.

Names are OpenAI's; those that OpenAI does not have are vLLM's. ``null`` stands for a field that is left out.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from mainspring.engine.logits_state import BIAS_WIDTH

Item = TypeVar("Item")
#: A list of which only the first wrong item is told: being told of each costs a kilobyte for two bytes of a body.
Items = Annotated[list[Item], Field(fail_fast=True)]
#: Most messages or texts of one request, and most tools.
MAX_ITEMS = 1 << 16
MAX_TOOLS = 1024
Few = Annotated[list[Item], Field(fail_fast=True, max_length=MAX_ITEMS)]

#: How deep a schema may be nested, and of how many values it may be made.
MAX_DEPTH = 100
MAX_VALUES = 100_000
#: Most ids that the vocabulary of a model may have.
MAX_VOCABULARY = 1 << 20


def _sound(value: dict[str, Any]) -> dict[str, Any]:
    """Refuse what is too much to work on: nesting that would overflow what is recursive, and half surrogate pairs,
    which are no text."""
    level: list[Any] = [value]
    seen = 0
    for _ in range(MAX_DEPTH):
        children: list[Any] = []
        for each in level:
            children += each if isinstance(each, list) else [*each, *each.values()]
        seen += len(children)
        if seen > MAX_VALUES:
            raise ValueError(f"it is made of more than {MAX_VALUES} keys and values; give less")
        if any(isinstance(child, str) and not _is_text(child) for child in children):
            raise ValueError("it holds half of a surrogate pair, which is no text")
        level = [child for child in children if isinstance(child, (dict, list))]
        if not level:
            return value
    raise ValueError(f"it is nested more than {MAX_DEPTH} deep; flatten it")


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _few_enough(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > BIAS_WIDTH:
        raise ValueError(f"logit_bias has {len(value)} entries > {BIAS_WIDTH}; give fewer")
    return value


JsonObject = Annotated[dict[str, Any], AfterValidator(_sound)]

TokenId = Annotated[int, Field(ge=0, le=(1 << 31) - 1)]
TokenIds = Annotated[Items[TokenId], Field(min_length=1)]
Bias = Annotated[dict[str, float], BeforeValidator(_few_enough)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


class Strict(BaseModel):
    """No unknown fields, and no values of a wrong type made to fit."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_left_out(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        known = {field.alias or name for name, field in cls.model_fields.items()}
        kept = {name: value for name, value in given.items() if value is not None}
        unknown = [name for name in kept if name not in known]
        for name in unknown[1:]:  # one is told
            del kept[name]
        return kept


class StreamOptions(Strict):
    """``include_usage``: a last chunk has the usage alone; ``continuous_usage_stats``: each chunk has it."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class StructuredOutputs(Strict):
    """vLLM's ``structured_outputs``; see ``StructuredOutputsParams``."""

    json_: JsonObject | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Few[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    whitespace_pattern: str | None = None


class JsonSchema(Strict):
    """The schema of a ``response_format``. It is kept to whether ``strict`` is set or not."""

    name: Name
    schema_: JsonObject = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextFormat(Strict):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(Strict):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchemaFormat(Strict):
    """JSON that keeps to a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class Sampling(Strict):
    """What both kinds of request may say about their answers."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    best_of: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: str | Few[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Bias | None = None
    user: Annotated[str, Field(max_length=256)] | None = None

    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    stop_token_ids: Few[TokenId] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    bad_words: Few[str] | None = None
    allowed_token_ids: Annotated[Items[TokenId], Field(max_length=MAX_VOCABULARY)] | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputs | None = None
    response_format: ResponseFormat | None = None
    add_special_tokens: bool | None = None
    priority: Annotated[int, Field(ge=-(1 << 31), le=(1 << 31) - 1)] | None = None
    request_id: Annotated[str, Field(max_length=256)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None


class CompletionRequest(Sampling):
    """The body of ``/v1/completions``."""

    prompt: str | TokenIds | Items[str] | Items[TokenIds]
    echo: bool | None = None
    logprobs: int | None = None


class TextPart(Strict):
    """A piece of a message's text."""

    type: Literal["text"]
    text: str


class FunctionCall(Strict):
    """A function's name and its arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(Strict):
    """A call that the model made earlier in the conversation."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Strict):
    """One message of a conversation. ``developer`` counts as ``system``."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Few[TextPart] | None = None
    name: str | None = None
    tool_calls: Few[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None


class Function(Strict):
    """A function that the model may call. ``strict`` keeps its arguments to the schema."""

    name: Name
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Tool(Strict):
    """A tool that the model may use."""

    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    """A function by its name."""

    name: str


class NamedTool(Strict):
    """The tool that has to be called."""

    type: Literal["function"]
    function: NamedFunction


class ChatRequest(Sampling):
    """The body of ``/v1/chat/completions``."""

    messages: Annotated[Few[Message], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Annotated[Items[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: JsonObject | None = None
    # Where only one value means what this server does, that value is taken and every other refused.
    store: Literal[False] | None = None
    modalities: Few[Literal["text"]] | None = None
    service_tier: Literal["auto", "default"] | None = None


class TokenizeRequest(Strict):
    """The body of ``/tokenize``: a ``prompt``, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[Few[Message], Field(min_length=1)] | None = None
    tools: Annotated[Items[Tool], Field(max_length=MAX_TOOLS)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: JsonObject | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Strict):
    """The body of ``/detokenize``."""

    model: str | None = None
    tokens: Items[TokenId]
