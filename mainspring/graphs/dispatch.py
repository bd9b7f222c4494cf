"""What everything here that watches torch's operations has in common."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["DispatchMode"]


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that sees operations and never torch.compile."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Not to be wrapped for torch.compile, which would import all of it (a second) at the first operation."""
        return False
