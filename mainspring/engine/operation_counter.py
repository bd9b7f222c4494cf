"""How many operations an eager step asks of the device, counted once by watching the dispatcher."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mainspring.graphs.dispatch import DispatchMode


class OperationCounter(DispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations other than views, each of which is at least one kernel launch on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Count one operation and run it."""
        if not getattr(func, "is_view", False):
            self.operations += 1
        return func(*args, **(kwargs or {}))
