"""What an engine is made with: one flat, frozen dataclass, checked once when it is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mainspring.engine.errors import SettingsError

DTYPES = ("auto", "float32", "bfloat16", "float16")
LOAD_FORMATS = ("auto", "dummy")
GENERATION_CONFIGS = ("auto", "vllm")
LAUNCH_MODES = ("eager", "graph", "loop")

COUNTS = (
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "kv_cache_memory",
    "num_gpu_blocks_override",
    "block_size",
    "loop_steps",
)

IN_BYTES = ("kv_cache_memory",)
SWITCHES = ("enforce_eager", "enable_prefix_caching", "skip_tokenizer_init")
#: Seats, positions and block ids are int32 on the device.
LARGEST_COUNT = (1 << 31) - 1

#: Bytes of KV cache on a CPU when nothing else is asked for.
DEFAULT_CPU_KV_BYTES = 1 << 30
#: Stop ids that one request may have (EOS ids included); the width of a fixed buffer.
STOP_IDS_WIDTH = 16
#: Stop strings that one request may have, and their characters together: the engine looks for them in every token.
STOP_TEXTS = 64
STOP_CHARACTERS = 4096


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Settings of one engine. Names and meanings follow vLLM's where vLLM has them.

    Sizes are in tokens or requests; ``kv_cache_memory`` is in bytes, ``num_gpu_blocks_override`` in KV blocks (the null
    block comes on top). ``None`` means: decide from the model and the device. ``max_logprobs`` is the most that a
    request's ``logprobs`` or ``prompt_logprobs`` may ask for; -1 is the whole vocabulary. ``verify_graphs`` compares
    each recording with an eager run, bit for bit, when it is made; ``None`` leaves that to MAINSPRING_VERIFY=1.

    ``launch_mode`` is ``eager``, ``graph`` or ``loop``; ``None`` is ``loop`` on a GPU that can and ``graph`` elsewhere.
    In ``loop`` mode KV blocks are reserved for ``loop_steps`` decode steps ahead, as far as the pool has them, and a
    loop that makes no step for ``loop_timeout`` seconds counts as stuck.

    ``cudagraph_capture_sizes`` are the batch sizes for which the decode step is recorded, ``prefill_graph_sizes`` the
    numbers of prompt tokens for which the prefill step is; an empty list records no prefill step. ``None`` is 16 to 512
    tokens on a GPU, and none on a CPU.
    """

    model: str
    dtype: str = "auto"
    device: str | None = None
    load_format: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    gpu_memory_utilization: float = 0.9
    kv_cache_memory: int | None = None
    num_gpu_blocks_override: int | None = None
    block_size: int = 16
    enforce_eager: bool = False
    launch_mode: str | None = None
    loop_steps: int = 256
    loop_timeout: float = 30.0
    cudagraph_capture_sizes: Sequence[int] | None = None
    prefill_graph_sizes: Sequence[int] | None = None
    enable_prefix_caching: bool = True
    seed: int = 0
    max_logprobs: int = 20
    skip_tokenizer_init: bool = False
    generation_config: str = "auto"
    progress: bool | None = None
    verify_graphs: bool | None = None

    def __post_init__(self) -> None:
        """Check each value alone; what depends on the model is checked where the model is known."""
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("load_format", self.load_format, LOAD_FORMATS)
        _one_of("generation_config", self.generation_config, GENERATION_CONFIGS)
        if self.launch_mode is not None:
            _one_of("launch_mode", self.launch_mode, LAUNCH_MODES)
            if self.enforce_eager and self.launch_mode != "eager":
                raise SettingsError(
                    f"launch_mode is {self.launch_mode!r}, but enforce_eager runs every step eager; give one of the two"
                )
        timeout = self.loop_timeout
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout < float("inf"):
            raise SettingsError(f"loop_timeout is {timeout!r}; it must be a number of seconds above 0")
        for name in COUNTS:
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise SettingsError(f"{name} is {value!r}; it must be a whole number of at least 1")
            if value is not None and name not in IN_BYTES and value > LARGEST_COUNT:
                raise SettingsError(f"{name} is {value}; the device counts up to {LARGEST_COUNT}")
        for name in SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise SettingsError(f"{name} is {getattr(self, name)!r}; it must be True or False")
        if self.verify_graphs is not None and not isinstance(self.verify_graphs, bool):
            raise SettingsError(f"verify_graphs is {self.verify_graphs!r}; it must be True, False or None")
        utilization = self.gpu_memory_utilization
        if isinstance(utilization, bool) or not isinstance(utilization, (int, float)) or not 0.0 < utilization <= 1.0:
            raise SettingsError(
                f"gpu_memory_utilization is {self.gpu_memory_utilization!r}; it is a share of the GPU's memory, "
                "above 0 and at most 1"
            )
        if isinstance(self.max_logprobs, bool) or not isinstance(self.max_logprobs, int) or self.max_logprobs < -1:
            raise SettingsError(
                f"max_logprobs is {self.max_logprobs!r}; it must be a whole number of at least 0, or -1 for the whole "
                "vocabulary"
            )
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not -(1 << 63) <= self.seed < 1 << 63:
            raise SettingsError(f"seed is {self.seed!r}; it must be a whole number of 64 bits")


def _one_of(name: str, value: object, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise SettingsError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}")
