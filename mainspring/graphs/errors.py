"""What can go wrong with a recording, as exceptions that name the value, the limit and the way out."""

from __future__ import annotations

__all__ = ["CaptureError", "GraphError", "LadderError", "LoopError", "LoopStuckError", "StaleAddressError"]


class GraphError(RuntimeError):
    """Base of every error that `mainspring.graphs` raises."""


class LadderError(GraphError, ValueError):
    """A ladder of batch sizes is malformed, or was asked for a batch that it does not hold."""


class CaptureError(GraphError):
    """A callable could not be recorded; the error that stopped it, if any, is the `__cause__`."""


class StaleAddressError(GraphError):
    """A named buffer is no longer what was recorded, so a replay would read or write other memory.

    Attributes:
        buffer: name of the buffer.
        recorded: address in bytes, shape, stride and dtype at the time of recording, as text.
        current: the same as it is now.
    """

    def __init__(self, buffer: str, recorded: str, current: str) -> None:
        super().__init__(
            f"buffer {buffer!r} was recorded at {recorded} but is now at {current}; copy new contents "
            f"into the recorded tensor, or accept the new one (FixedBuffers.accept) and record the graphs "
            f"again"
        )
        self.buffer = buffer
        self.recorded = recorded
        self.current = current

    def __reduce__(self) -> tuple[type[StaleAddressError], tuple[str, str, str]]:
        """Made again from its parts, not from its message, where it crosses to another process."""
        return type(self), (self.buffer, self.recorded, self.current)


class LoopError(GraphError):
    """A launch of a loop failed on the device; the error that stopped it, if any, is the `__cause__`.

    Attributes:
        launch: number of the launch within its mailbox.
        fatal: the device cannot be used again in this process, so that every later launch fails too.
    """

    def __init__(self, message: str, launch: int, fatal: bool = False) -> None:
        super().__init__(message)
        self.launch = launch
        self.fatal = fatal

    def __reduce__(self) -> tuple[type[LoopError], tuple[str, int, bool]]:
        """Made again from its parts where it crosses to another process."""
        return type(self), (str(self), self.launch, self.fatal)


class LoopStuckError(LoopError):
    """A loop finished no iteration for the time that its caller allowed. It may still be running."""
