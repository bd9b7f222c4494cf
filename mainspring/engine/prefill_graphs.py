"""Recorded prefill steps: one for each of a few numbers of prompt tokens, so that a short prompt is one launch.

A recording's shapes are fixed, so a step of ``T`` tokens in ``n`` chunks is padded: to the tokens of its rung, and to
the most chunks that a recorded step may have. Padding belongs to the null seat. Its tokens have no KV slot and lie in
no sequence, so nothing is written for them and attention does not see them; chunks without a token have no query; rows
that complete no prompt emit -1. What does not fit runs as it is, operation by operation, and is counted under its
reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from mainspring.engine import limits as engine_limits
from mainspring.engine.admission import ROW_WIDTH, Admission, admit
from mainspring.engine.plan import PrefillPlan, TableWrite
from mainspring.engine.prefill_batch import PrefillBatch
from mainspring.engine.samplers import PLAIN
from mainspring.engine.seats import SeatState
from mainspring.engine.step import Sampler
from mainspring.engine.step_trial import PrefillTrial
from mainspring.graphs import GraphRunner, Input

if TYPE_CHECKING:
    from mainspring.engine.model_runner import ModelRunner

#: Why a prefill step ran eager.
OFF, TOKENS, SEQUENCES, PROMPT_LOGPROBS = "off", "too_many_tokens", "too_many_sequences", "prompt_logprobs"


class PrefillGraphs:
    """The recordings of a runner's prefill step, a ladder for each variant; none where ``ladder`` is None."""

    def __init__(self, runner: ModelRunner, *, progress: bool, verify_graphs: bool | None) -> None:
        self.ladder = runner.limits.prefill_ladder
        self._runner = runner
        self._eager_steps: Counter[str] = Counter()
        self.runners: dict[str, GraphRunner] = {}
        if self.ladder is None:
            return
        for name, sampler in runner.samplers.items():
            self.runners[name] = GraphRunner(
                partial(self._step, sampler=sampler),
                inputs={"tokens": Input((ROW_WIDTH,), torch.int64, pad=-1)},
                ladder=self.ladder,
                device=runner.limits.device,
                buffers=runner.buffers,
                pool=runner.pool,
                enforce_eager=runner.enforce_eager,
                name=f"prefill.{name}",
                progress=progress,
                verify=verify_graphs,
                trial=PrefillTrial(runner),
                warm_up=engine_limits.WARM_UP,
            )

    def record(self, sizes: list[int] | None = None) -> None:
        """Record the plain step on the ladder, or on some of its rungs, unverified; the full one when first needed."""
        if self.runners:
            self.runners[PLAIN].capture(sizes, verify=False)

    def why_eager(self, plan: PrefillPlan) -> str | None:
        """Why no recorded step can serve this plan; None where one can."""
        if self.ladder is None:
            return OFF
        if plan.num_tokens > self.ladder.top:
            return TOKENS
        if len(plan.chunks) > self._runner.limits.prefill_sequences:
            return SEQUENCES
        if any(chunk.request.prompt_logprobs_due for chunk in plan.chunks):
            return PROMPT_LOGPROBS
        return None

    def run(
        self,
        batch: PrefillBatch[np.ndarray],
        variant: str,
        writes: Sequence[TableWrite] = (),
        states: Sequence[SeatState] = (),
    ) -> None:
        """The step of this batch, with the block-table entries that it needs and the states of the seats whose prompts
        it completes: one copy and one replay. Entries are written apart where there are more than the rung has rows, as
        where much of a prompt was in the prefix cache."""
        runner, table = self.runners[variant], self._runner.seats
        rung = runner.ladder.rung_for(len(batch.token_ids))
        admission = Admission.of(writes, states, table.max_blocks)
        if not admission.fits(rung, self._sequences(rung)):
            table.write_tables(writes, self._runner.upload)
            admission = Admission.of((), states, table.max_blocks)
        runner(tokens=torch.from_numpy(admission.beside(batch.rows())))

    def count_eager(self, reason: str) -> None:
        """A prefill step ran as it is, for this reason."""
        self._eager_steps[reason] += 1

    @property
    def recorded_steps(self) -> int:
        """Prefill steps that were replays."""
        return sum(runner.counters.replays.total() for runner in self.runners.values())

    @property
    def eager_steps(self) -> Mapping[str, int]:
        """Prefill steps that were not, by reason."""
        return sum((runner.counters.eager_steps for runner in self.runners.values()), Counter(self._eager_steps))

    def _sequences(self, rung: int) -> int:
        """Most chunks that a step of so many tokens has."""
        return min(self._runner.limits.prefill_sequences, rung)

    def _step(self, tokens: torch.Tensor, *, sampler: Sampler) -> None:
        step, limits, table = self._runner.step, self._runner.limits, self._runner.seats
        sequences = self._sequences(tokens.shape[0])
        admit(tokens, sequences, table)
        batch = PrefillBatch.of_rows(tokens, sequences, table.null_seat)
        hidden = step.forward(batch.inputs(table, limits.block_size))
        step.begin(hidden, batch.last, batch.completed_seats, sampler)
