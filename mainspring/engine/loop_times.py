"""How long steps take on each rung, as measured, and what follows from it: when to look, when a lower rung pays."""

from __future__ import annotations

from collections.abc import Mapping

#: A variant of the step and the rung that it runs on.
Rung = tuple[str, int]

#: Weight of the newest measurement in a running mean.
NEWEST = 0.2
#: Seconds that going over to another rung takes where none has been measured: one launch.
FIRST_GUESS_SWITCH = 100e-6
#: Steps that a rung is expected to serve at least, when the seconds of going over to it are spread over them.
HORIZON = 64
#: Seconds between two looks at a running loop with one row. A look costs the CPU some 30 us: with so few, it stays
#: below 10 us for each token of the fastest steps. More rows pay for more looks.
LOOK, MOST_LOOKS = 2e-3, 8
#: Seconds after which the tokens of slow steps are looked for at the latest.
LONGEST_LOOK = 5e-3
#: Seconds between looks while the end is due.
LOOK_AT_END = 50e-6
#: Looks during the step with which a loop ends, where nobody waits for its tokens.
LOOKS_IN_LAST_STEP = 8
#: Steps, and seconds, for which a loop may go unseen where nobody reads tokens before their answer has ended.
UNSEEN_STEPS, UNSEEN_SECONDS = 64, 40e-3


class StepTimes:
    """Running means of the seconds of a step on each rung, and of going over from one rung to another."""

    def __init__(self) -> None:
        self._seconds: dict[Rung, float] = {}
        self.switch_seconds = FIRST_GUESS_SWITCH

    @property
    def seconds(self) -> Mapping[Rung, float]:
        """Mean seconds of a step, by rung."""
        return self._seconds

    def add(self, rung: Rung, seconds: float, steps: int) -> None:
        """``steps`` steps on ``rung`` took ``seconds`` together."""
        each = seconds / steps
        known = self._seconds.get(rung)
        weight = 1 - (1 - NEWEST) ** steps
        self._seconds[rung] = each if known is None else known + weight * (each - known)

    def add_switch(self, seconds: float) -> None:
        """The device stood still for ``seconds`` between two loops."""
        self.switch_seconds += NEWEST * (seconds - self.switch_seconds)

    def lower_pays(self, now: Rung, lower: int, rows: int, steps_left: int) -> bool:
        """Whether ``rows`` rows should go over from the rung ``now`` to ``lower`` for ``steps_left`` steps at most.

        They should where the seconds that the lower rung saves, as measured, are more than going over takes. A rung
        that has not been measured is tried as soon as half of the rows are padding.
        """
        variant, size = now
        if lower >= size:
            return False
        here, there = self._seconds.get(now), self._seconds.get((variant, lower))
        if here is None or there is None:
            return 2 * rows <= size
        return (here - there) * min(steps_left, HORIZON) > self.switch_seconds

    def unseen_steps(self, rung: Rung) -> int:
        """Steps for which a loop may go unseen where nobody waits for its tokens; 1 where they are slow, or unknown."""
        step = self._seconds.get(rung)
        return 1 if step is None else max(1, min(UNSEEN_STEPS, int(UNSEEN_SECONDS / max(step, 1e-9))))

    def sleep_through(self, rung: Rung, steps: int, is_end: bool, may_stop: bool) -> float:
        """Seconds to sleep until ``steps`` steps more will have come; where the loop ends with the last of them,
        ``is_end``, until before it, and then in short pieces. ``may_stop`` says that it may end at any moment.

        The rung has been measured.
        """
        step = self._seconds[rung]
        short = max(LOOK_AT_END, step / LOOKS_IN_LAST_STEP)
        seconds = (steps - 1 if is_end else steps) * step
        return max(short, min(seconds, LOOK) if may_stop else seconds)

    def look_again(self, rung: Rung, rows: int, steps_to_end: int, ending: bool) -> float:
        """Seconds until a running loop of ``rows`` rows is worth looking at again.

        ``steps_to_end`` is after how many steps it is sure to end; ``ending`` says that it was asked to.
        """
        if ending:
            return LOOK_AT_END
        usual = LOOK / min(rows, MOST_LOOKS)
        step = self._seconds.get(rung)
        if step is None:
            return usual
        return max(LOOK_AT_END, min(max(step, usual), LONGEST_LOOK, steps_to_end * step))
