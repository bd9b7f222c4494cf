"""From what was asked for and what the model is, to the sizes that an engine is built with."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mainspring.engine.errors import SettingsError
from mainspring.engine.settings import EngineSettings
from mainspring.graphs import Ladder, LadderError, Loop
from mainspring.models.config import ModelConfig
from mainspring.models.loader import resolve_dtype

logger = logging.getLogger("mainspring")

#: Defaults by device type: rows a step may have, and tokens a prefill step may have.
DEFAULT_NUM_SEQS = {"cpu": 8, "cuda": 256}
DEFAULT_BATCHED_TOKENS = {"cpu": 512, "cuda": 8192}
#: Default sizes of recorded prefill steps, in tokens. On a CPU the padding costs more than the recording saves.
DEFAULT_PREFILL_SIZES: dict[str, tuple[int, ...]] = {"cpu": (), "cuda": (16, 32, 64, 128, 256, 512)}
#: Which rungs are run before they are captured; see `GraphRunner`. "first" halves a start's recording, but has not been
#: seen on a GPU yet: tests/engine/test_ladder_of_an_engine.py tries it there.
WARM_UP = "each"
#: Most prompts that a recorded prefill step holds chunks of.
PREFILL_SEQUENCES = 8


@dataclass(frozen=True)
class EngineLimits:
    """The sizes of one engine; all in tokens, requests or blocks, never ``None``."""

    device: torch.device
    dtype: torch.dtype
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    ladder: Ladder
    max_logprobs: int = 20
    prefill_ladder: Ladder | None = None

    @property
    def prefill_sequences(self) -> int:
        """Most prompts that a recorded prefill step holds chunks of."""
        return most_prefill_sequences(self.max_num_seqs)

    @property
    def max_blocks(self) -> int:
        """Blocks that one request of ``max_model_len`` tokens takes; the width of the block tables."""
        return -(-self.max_model_len // self.block_size)

    @property
    def max_rows(self) -> int:
        """Rows of the largest step."""
        return max(self.max_num_seqs, self.ladder.top)


def choose_device(name: str | None) -> torch.device:
    """The device asked for, or the current GPU, or the CPU. Raises ``SettingsError`` for one that is not there."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise SettingsError(f"device {name!r} is not a device that torch knows; use 'cpu' or 'cuda'") from error
    if device.type not in ("cpu", "cuda"):
        raise SettingsError(f"device {name!r} is not supported; use 'cpu' or 'cuda'")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise SettingsError(f"device {name!r} was asked for, but torch sees no GPU here; use device='cpu'")
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        elif device.index >= torch.cuda.device_count():
            raise SettingsError(f"device {name!r} is not there: torch sees {torch.cuda.device_count()} GPU(s)")
    return device


def choose_launch_mode(settings: EngineSettings, device: torch.device) -> str:
    """``eager``, ``graph`` or ``loop``: what was asked for, or ``loop`` on a GPU and ``graph`` on a CPU.

    Where loops cannot be had it is ``graph``, and the log says why.
    """
    if settings.enforce_eager:
        return "eager"
    mode = settings.launch_mode or ("loop" if device.type == "cuda" else "graph")
    if mode == "loop":
        why_not = Loop.available(device)
        if why_not is not None:
            level = logging.INFO if settings.launch_mode is None else logging.WARNING
            logger.log(level, "launch mode is graph, as loop cannot be had on %s: %s", device, why_not)
            return "graph"
    return mode


def derive_limits(settings: EngineSettings, config: ModelConfig, device: torch.device) -> EngineLimits:
    """Fill in what ``settings`` left open and check the rest against the model.

    Raises ``SettingsError`` when ``max_model_len`` is above the model's own limit or the ladder's sizes are unusable.
    """
    max_model_len = settings.max_model_len or config.max_position_embeddings
    if max_model_len > config.max_position_embeddings:
        raise SettingsError(
            f"max_model_len {max_model_len} > {config.max_position_embeddings}, the positions that the model was made "
            f"for (max_position_embeddings); lower max_model_len"
        )
    max_num_seqs = settings.max_num_seqs or DEFAULT_NUM_SEQS[device.type]
    max_num_batched_tokens = settings.max_num_batched_tokens or DEFAULT_BATCHED_TOKENS[device.type]
    try:
        sizes = settings.cudagraph_capture_sizes
        ladder = Ladder.default(max_num_seqs) if sizes is None else Ladder(sizes).cut_to(max_num_seqs)
    except TypeError as error:
        raise SettingsError(f"cudagraph_capture_sizes is {sizes!r}; give a list of batch sizes") from error
    except LadderError as error:
        raise SettingsError(f"cudagraph_capture_sizes: {error}") from error
    most = min(max_num_batched_tokens, most_prefill_sequences(max_num_seqs) * max_model_len)
    return EngineLimits(
        device=device,
        dtype=resolve_dtype(settings.dtype, config, device),
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        block_size=settings.block_size,
        ladder=ladder,
        max_logprobs=config.vocab_size
        if settings.max_logprobs == -1
        else min(settings.max_logprobs, config.vocab_size),
        prefill_ladder=_prefill_ladder(settings.prefill_graph_sizes, most, device),
    )


def most_prefill_sequences(max_num_seqs: int) -> int:
    """Most prompts that a recorded prefill step holds chunks of, where a batch has at most ``max_num_seqs`` rows."""
    return min(PREFILL_SEQUENCES, max_num_seqs)


def _prefill_ladder(sizes: Sequence[int] | None, most: int, device: torch.device) -> Ladder | None:
    """The sizes of recorded prefill steps, up to the ``most`` tokens that one can have; None where there are none."""
    chosen = DEFAULT_PREFILL_SIZES[device.type] if sizes is None else sizes
    try:
        return Ladder(chosen).cut_to(most) if len(chosen) or isinstance(chosen, (str, bytes)) else None
    except TypeError as error:
        raise SettingsError(f"prefill_graph_sizes is {sizes!r}; give a list of numbers of tokens") from error
    except LadderError as error:
        raise SettingsError(f"prefill_graph_sizes: {error}") from error
