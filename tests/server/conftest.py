"""Servers in this process, on free ports: over the embedded model, and over tiny ones without a tokenizer."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from mainspring import SamplingParams, StructuredOutputsParams

NEEDED = ("fastapi", "uvicorn", "prometheus_client")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]

if TYPE_CHECKING or not MISSING:
    from live_server import Live

    from mainspring.server.settings import ServerSettings

ServeTiny = Callable[..., "Live"]


class WithoutServer(pytest.Module):
    """A file of tests for which something is missing: it is named, and not imported."""

    def collect(self) -> Iterator[pytest.Item]:
        pytest.skip(f"not installed: {', '.join(MISSING)}; pip install 'mainspring[server]'")


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Skip this folder on a machine on which nothing can be installed, such as one lent for its GPU."""
    return WithoutServer.from_parent(parent, path=module_path) if MISSING else None


@pytest.fixture(scope="session")
def smol(smollm2_path: Path) -> Iterator[Live]:
    """The embedded model in fp32."""
    settings = ServerSettings(served_model_name=["smollm2", "also"], tool_call_parser="hermes")
    live = Live("smollm2", {"device": "cpu", "dtype": "float32", "max_model_len": 1024}, settings)
    yield live
    live.wait_for(lambda: live.is_idle)
    live.stop()


@pytest.fixture
def serve_tiny(tiny_folder: Path) -> Iterator[ServeTiny]:
    """Serves the tiny model, without a tokenizer, with settings and engine options of the test's choice."""
    made: list[Live] = []
    of_server = {field.name for field in fields(ServerSettings)}

    def serve(wait: bool = True, **options: Any) -> Live:
        settings = {name: options.pop(name) for name in list(options) if name in of_server}
        defaults: dict[str, Any] = {
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "device": "cpu",
            "kv_cache_memory": 8 << 20,
        }
        made.append(
            Live(
                str(tiny_folder),
                {**defaults, **options},
                ServerSettings(**{"served_model_name": ["tiny"], "shutdown_grace": 5.0, **settings}),
                wait,
            )
        )
        return made[-1]

    yield serve
    for live in made:
        live.stop()


@pytest.fixture(scope="session")
def tiny(tiny_folder: Path) -> Iterator[Live]:
    """The tiny model, for tests that leave it as it is."""
    options = {"load_format": "dummy", "skip_tokenizer_init": True, "device": "cpu", "kv_cache_memory": 8 << 20}
    live = Live(str(tiny_folder), options, ServerSettings(served_model_name=["tiny"], max_body_bytes=1 << 20))
    yield live
    live.wait_for(lambda: live.is_idle)
    live.stop()


TEMPLATE = (
    "{% if tools %}tools: {{ tools | tojson }} call with <tool_call>{...}</tool_call>{{ '\\n' }}{% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}assistant:{% if think %} hm{% endif %}{% endif %}"
)


@pytest.fixture(scope="session")
def tiny_chat(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A tiny model with a tokenizer of single bytes and a chat template that knows tools in Hermes' format."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny-chat")
    config = json.loads((tiny_folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 300}))
    ids = {name: number for number, name in enumerate(["<pad>", "<s>", "</s>"])}
    ids |= {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()), start=3)}
    raw = Tokenizer(models.BPE(vocab=ids, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<s>", eos_token="</s>", pad_token="<pad>", chat_template=TEMPLATE
    )
    tokenizer.save_pretrained(folder)
    options = {"load_format": "dummy", "device": "cpu", "kv_cache_memory": 16 << 20, "max_num_seqs": 16}
    live = Live(str(folder), options, ServerSettings(served_model_name=["tiny-chat"]))
    yield live
    live.wait_for(lambda: live.is_idle)
    live.stop()


@pytest.fixture
def says(tiny_chat: Live, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes the model, whose weights are random, say one text."""
    add = tiny_chat.engine.add

    def say(text: str) -> None:
        def add_with(token_ids: Any, params: SamplingParams, **fields: Any) -> Any:
            wanted = StructuredOutputsParams(choice=[text])
            return add(token_ids, dataclasses.replace(params, structured_outputs=wanted), **fields)

        monkeypatch.setattr(tiny_chat.engine, "add", add_with)

    return say
