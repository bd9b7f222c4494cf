"""What is asked of an engine that is measured, and the figures that every engine can give."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mainspring.models.config import ModelConfig

#: How answers are sampled where they are not greedy.
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "seed": 0}
#: Longest context that an engine is prepared for unless more is needed, as a server would be.
USUAL_MODEL_LEN = 4096


@dataclass(frozen=True)
class Workload:
    """Batches of random prompts of ``input_len`` tokens, each answered with ``output_len`` tokens after its first.

    Every measurement is repeated ``repeats`` times. Raises ``ValueError`` for a size below 1.
    """

    batches: tuple[int, ...]
    input_len: int
    output_len: int
    repeats: int = 3
    sampled: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        sizes = {"input_len": self.input_len, "output_len": self.output_len, "repeats": self.repeats}
        for name, value in {**sizes, "batch": min(self.batches, default=0)}.items():
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")

    @property
    def context(self) -> int:
        """Tokens before the one that is decoded, on average over the answer."""
        return self.input_len + self.output_len // 2

    @property
    def total_len(self) -> int:
        """Tokens of one sequence at its end."""
        return self.input_len + self.output_len + 1

    def max_model_len(self, config: ModelConfig) -> int:
        """The context to prepare an engine for. Raises ``ValueError`` where the model has too few positions."""
        if self.total_len > config.max_position_embeddings:
            raise ValueError(
                f"input_len {self.input_len} + output_len {self.output_len} + 1 > {config.max_position_embeddings}, "
                f"the positions that the model was made for; give shorter ones"
            )
        return min(config.max_position_embeddings, max(USUAL_MODEL_LEN, self.total_len))

    def prompts(self, batch: int, vocab_size: int) -> list[list[int]]:
        """``batch`` prompts of random ids, the same for every engine."""
        draw = random.Random(f"{self.seed} {batch}")
        return [[draw.randrange(vocab_size) for _ in range(self.input_len)] for _ in range(batch)]


def time_per_token(generate: Callable[[int], float], output_len: int, repeats: int) -> tuple[float, float]:
    """``(seconds per decode step, seconds to the first token)`` of an engine that can only be timed as a whole.

    ``generate(n)`` makes ``n`` tokens for every prompt and returns the seconds that this took; the time per step is
    (generate(output_len + 1) - generate(1)) / output_len. Medians of ``repeats``.
    """
    first, steps = [], []
    for _ in range(repeats):
        first.append(generate(1))
        steps.append((generate(output_len + 1) - first[-1]) / output_len)
    return statistics.median(steps), statistics.median(first)


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least ``percent`` of the values do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(math.ceil(len(ordered) * percent / 100) - 1, 0)]
