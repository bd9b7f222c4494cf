"""The options that commands share, and what the engine gets from them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

if TYPE_CHECKING:
    from mainspring import LLM, SamplingParams

DEFAULT_MODEL = "smollm2"
#: What an answer is made with where neither the command line nor the model says otherwise.
COMMAND_DEFAULTS = {"max_tokens": 256, "temperature": 0.0}

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}

_MODEL = "Model"
_MEMORY = "Memory and batches"
_PREFIXES = "Prompts that begin alike"
_RECORDING = "Recording"
_SAMPLING = "Choosing tokens"
_ENDING = "Ending the answer"


def parse_bytes(text: str) -> int:
    """A number of bytes from ``1048576``, ``512MiB``, ``1.5G`` and the like.

    ``k``, ``M``, ``G``, ``T`` are powers of 1000, with an ``i`` powers of 1024; a ``B`` may follow.

    Raises:
        ValueError: the text is no such number, or is less than one byte.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", text.lower())
    size = float(match[1]) * _UNITS[match[2] or ""] if match else 0.0
    if not 1 <= size < math.inf:
        raise ValueError(f"{text!r} is not a number of bytes; write 1073741824, 512MiB or 1.5GB")
    return int(size)


def parse_sizes(text: str) -> list[int]:
    """Batch sizes from ``1,2,4``; that they make a ladder is the engine's to check.

    Raises:
        ValueError: a part of the text is not a whole number.
    """
    try:
        return [int(part) for part in re.split(r"\s*,\s*|\s+", text.strip())]
    except ValueError:
        raise ValueError(f"{text!r} is not a list of batch sizes; write 1,2,4") from None


@dataclass(frozen=True)
class EngineOptions:
    """What an engine is made of. What is not given is left to the engine's own defaults."""

    model: Annotated[
        str,
        Option(
            help="A Hugging Face folder, a GGUF file, a name on the hub, or smollm2, the embedded model.",
            rich_help_panel=_MODEL,
        ),
    ] = DEFAULT_MODEL
    dtype: Annotated[str | None, Option(help="auto, float32, bfloat16 or float16.", rich_help_panel=_MODEL)] = None
    device: Annotated[str | None, Option(help="cuda, cuda:1, cpu ...", rich_help_panel=_MODEL)] = None
    load_format: Annotated[str | None, Option(help="auto, or dummy for random weights.", rich_help_panel=_MODEL)] = None
    max_model_len: Annotated[
        int | None, Option(help="Longest context in tokens, answer included.", rich_help_panel=_MEMORY)
    ] = None
    max_num_seqs: Annotated[
        int | None, Option(help="Most answers that are decoded at a time.", rich_help_panel=_MEMORY)
    ] = None
    max_num_batched_tokens: Annotated[
        int | None, Option(help="Most prompt tokens in one prefill step.", rich_help_panel=_MEMORY)
    ] = None
    gpu_memory_utilization: Annotated[
        float | None, Option(help="Share of the GPU's memory that may be used.", rich_help_panel=_MEMORY)
    ] = None
    kv_cache_memory: Annotated[
        str | None,
        Option(metavar="BYTES", help="Size of the KV cache, such as 2GiB.", rich_help_panel=_MEMORY),
    ] = None
    block_size: Annotated[int | None, Option(help="Tokens in a KV block.", rich_help_panel=_MEMORY)] = None
    enable_prefix_caching: Annotated[
        bool | None,
        Option(
            "--enable-prefix-caching/--no-enable-prefix-caching",
            help="Keep prompts' KV blocks for later prompts; --no-enable-prefix-caching turns it off.",
            rich_help_panel=_PREFIXES,
        ),
    ] = None
    launch_mode: Annotated[
        str | None,
        Option(
            metavar="eager|graph|loop",
            help="Who starts a step: the CPU operation by operation (eager) or step by step (graph), or the GPU itself "
            "(loop, the default on a GPU that can).",
            rich_help_panel=_RECORDING,
        ),
    ] = None
    enforce_eager: Annotated[
        bool,
        Option(
            "--enforce-eager",
            help="Run every step without recording; the same as --launch-mode eager.",
            rich_help_panel=_RECORDING,
        ),
    ] = False
    cudagraph_capture_sizes: Annotated[
        str | None,
        Option(metavar="1,2,4", help="Batch sizes to record, the rungs.", rich_help_panel=_RECORDING),
    ] = None
    prefill_graph_sizes: Annotated[
        str | None,
        Option(
            metavar="16,32|off",
            help="Numbers of prompt tokens to record the prefill step for; off records none.",
            rich_help_panel=_RECORDING,
        ),
    ] = None
    verify_graphs: Annotated[
        bool,
        Option(
            "--verify-graphs",
            help="Compare each recording with an eager run, bit for bit, when it is made.",
            rich_help_panel=_RECORDING,
        ),
    ] = False
    generation_config: Annotated[
        str | None,
        Option(
            metavar="auto|vllm",
            help="auto takes sampling defaults from the model's generation_config.json, vllm does not.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    seed: Annotated[
        int | None,
        Option(help="Seed of the sampling, and of dummy weights.", rich_help_panel=_SAMPLING),
    ] = None

    def keywords(self) -> dict[str, Any]:
        """The keyword arguments for ``LLM``, without those that were not given."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        given = {name: value for name, value in given.items() if value is not None}
        if not self.verify_graphs:
            del given["verify_graphs"]  # left to the environment
        if self.kv_cache_memory is not None:
            given["kv_cache_memory"] = parse_bytes(self.kv_cache_memory)
        if self.cudagraph_capture_sizes is not None:
            given["cudagraph_capture_sizes"] = parse_sizes(self.cudagraph_capture_sizes)
        if self.prefill_graph_sizes is not None:
            off = self.prefill_graph_sizes.strip() in ("", "off")
            given["prefill_graph_sizes"] = [] if off else parse_sizes(self.prefill_graph_sizes)
        return given

    def open(self) -> LLM:
        """Make the engine."""
        keywords = self.keywords()  # before the import, which takes seconds: a slip is told at once
        from mainspring import LLM

        return LLM(**keywords)


@dataclass(frozen=True)
class SamplingOptions:
    """How an answer's tokens are chosen, and when it ends."""

    max_tokens: Annotated[
        int | None, Option(help="Most tokens in an answer; the model's default, or 256.", rich_help_panel=_ENDING)
    ] = None
    temperature: Annotated[
        float | None,
        Option(
            help="0 takes the most likely token, always; the model's default, or 0.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    top_k: Annotated[int | None, Option(help="Only the k most likely tokens; 0 is all.", rich_help_panel=_SAMPLING)] = (
        None
    )
    top_p: Annotated[
        float | None, Option(help="Only the likeliest tokens that make up this share.", rich_help_panel=_SAMPLING)
    ] = None
    min_p: Annotated[
        float | None,
        Option(help="Only tokens this likely beside the likeliest.", rich_help_panel=_SAMPLING),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        Option(help="Above 1: tokens that were there already become less likely.", rich_help_panel=_SAMPLING),
    ] = None
    stop: Annotated[
        list[str] | None,
        Option(help="A text that ends the answer; may be given several times.", rich_help_panel=_ENDING),
    ] = None
    ignore_eos: Annotated[
        bool,
        Option("--ignore-eos", help="Go on after the model's end token.", rich_help_panel=_ENDING),
    ] = False

    def check(self, seed: int | None = None, n: int = 1) -> None:
        """Tell a slip at once, before the engine is made, which takes seconds.

        Whether several answers differ depends on the temperature, which may be the model's.
        """
        self.params(seed, n, defaults={"temperature": 1.0} if n > 1 else None)

    def params(self, seed: int | None = None, n: int = 1, defaults: Mapping[str, Any] | None = None) -> SamplingParams:
        """The checked sampling parameters: what was given, then the model's ``defaults``, then the command's own."""
        from mainspring import SamplingParams

        given = {field.name: getattr(self, field.name) for field in fields(self)}
        given = {name: value for name, value in given.items() if value is not None}
        return SamplingParams(**{**COMMAND_DEFAULTS, **(defaults or {}), **given}, seed=seed, n=n)
