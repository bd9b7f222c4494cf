"""What commands write: answers as they come, to the standard output; all else to the standard error."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mainspring import LLM, CompletionOutput, RequestOutput


@dataclass(frozen=True)
class Written:
    """An answer that was written as it came: its last state, and whether Ctrl-C stopped it."""

    answer: CompletionOutput | None
    interrupted: bool

    @property
    def text(self) -> str:
        """What was written."""
        return self.answer.text if self.answer else ""


def prepare_streams() -> None:
    """Make the standard output and error fit for answers.

    One that was closed leads nowhere from here on. A character that the output's encoding lacks becomes a question
    mark, rather than the end of the answer.
    """
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def write(text: str) -> None:
    """Write a piece of an answer, as it is, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def note(text: str) -> None:
    """Say something about the session, beside the answers."""
    print(text, file=sys.stderr, flush=True)


def write_stream(outputs: Iterator[RequestOutput]) -> Written:
    """Write an answer as it grows, and a newline. Ctrl-C ends the request and keeps what was written."""
    last: CompletionOutput | None = None
    interrupted = False
    try:
        for output in outputs:
            answer = output.outputs[0]
            write(answer.text[len(last.text) if last else 0 :])
            last = answer
    except KeyboardInterrupt:
        interrupted = True
    finally:
        outputs.close()  # type: ignore[attr-defined]
    write("\n")
    return Written(last, interrupted)


def note_if_cut(written: Written) -> None:
    """Say so where an answer has ended because it got no more tokens."""
    if written.answer is not None and written.answer.finish_reason == "length":
        note(f"[cut at {len(written.answer.token_ids)} tokens; --max-tokens may allow more]")


def write_stats(llm: LLM) -> None:
    """Write the table of what the engine did."""
    from rich.console import Console

    from mainspring.cli.report import stats_table

    Console(stderr=True).print(stats_table(llm.stats()))
