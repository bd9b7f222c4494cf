"""Models that the engine's tests run: the embedded one, and tiny ones with random weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.pre_tokenizers import ByteLevel

from mainspring import LLM

MakeLLM = Callable[..., LLM]

#: Launch mode of the engines whose test does not name one.
LAUNCH_MODE_VARIABLE = "MAINSPRING_TEST_LAUNCH_MODE"


@pytest.fixture(scope="session")
def tiny_weights(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    """A folder with a tiny Llama and its weights, which no engine's seed changes."""
    folder = tmp_path_factory.mktemp("tiny-llama-weights")
    config = transformers.LlamaConfig.from_pretrained(tiny_folder, initializer_range=0.2)
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_speaking(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    """A folder with the tiny Llama and a tokenizer that has an id for each byte."""
    folder = tmp_path_factory.mktemp("tiny-speaking")
    (folder / "config.json").write_bytes((tiny_folder / "config.json").read_bytes())
    tokens = sorted(ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    inner.pre_tokenizer = ByteLevel(add_prefix_space=False)
    inner.decoder = ByteLevelDecoder()
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner).save_pretrained(folder)
    return folder


@pytest.fixture
def make_tiny(tiny_folder: Path) -> Iterator[MakeLLM]:
    """Makes engines over the tiny model, with options of the test's choice, and closes them after it."""
    made: list[LLM] = []

    def make(**options: Any) -> LLM:
        defaults: dict[str, Any] = {
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "device": "cpu",
            "kv_cache_memory": 8 << 20,
        }
        if "enforce_eager" not in options:
            defaults["launch_mode"] = os.environ.get(LAUNCH_MODE_VARIABLE)
        made.append(LLM(**{"model": str(tiny_folder), **defaults, **options}))
        return made[-1]

    yield make
    for llm in made:
        llm.close()


@pytest.fixture(scope="session")
def smollm2() -> Iterator[LLM]:
    """One engine over the embedded model in fp32 on the CPU, shared by the tests that do not change it."""
    with LLM("smollm2", device="cpu", dtype="float32", max_model_len=2048) as llm:
        yield llm
