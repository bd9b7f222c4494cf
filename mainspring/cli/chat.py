"""``mainspring chat``: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Annotated

from typer import Option

from mainspring.cli.command import say_error
from mainspring.cli.options import EngineOptions, SamplingOptions
from mainspring.cli.terminal import note, note_if_cut, write_stats, write_stream
from mainspring.engine.options import nearest

if TYPE_CHECKING:
    from mainspring import LLM, SamplingParams

HELP = """\
/reset  forget the conversation so far
/stats  show what the engine did
/help   show this
/exit   leave (so does Ctrl-D)
Ctrl-C stops the answer that is being written."""
COMMANDS = ("/exit", "/help", "/quit", "/reset", "/stats")


def chat(
    engine: EngineOptions,
    sampling: SamplingOptions,
    system: Annotated[str | None, Option(help="What the model is told before the conversation.")] = None,
    stats: Annotated[bool, Option("--stats", help="Close with a table of what the engine did.")] = False,
) -> None:
    """Talk with a model. Ctrl-C stops an answer and keeps the session; Ctrl-D or /exit leaves."""
    if sys.stdin is None:
        raise ValueError("there is no input to chat with: the standard input is closed")
    sampling.check(engine.seed)
    with engine.open() as llm:
        params = sampling.params(engine.seed, defaults=llm.sampling_defaults)
        session = Session(llm, params, system)
        if sys.stdin.isatty():
            _enable_line_editing()
            note(f"{engine.model} is ready. Ctrl-C stops an answer, /help lists commands, Ctrl-D leaves.")
        while session.go_on():
            pass
        if stats:
            write_stats(llm)


class Session:
    """A conversation: its messages so far, and the engine that answers."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None = None) -> None:
        self._llm = llm
        self._params = params
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self.messages: list[dict[str, str]] = list(self._opening)

    def go_on(self) -> bool:
        """One turn; a Ctrl-C that comes at a moment when nothing can be stopped changes nothing."""
        try:
            return self.turn()
        except KeyboardInterrupt:
            note("(stopped)")
            return True

    def turn(self) -> bool:
        """Read a line and do what it says; False where the session is over."""
        try:
            line = input("\n>>> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            note("")
            return False
        except KeyboardInterrupt:
            note("\n(Ctrl-D or /exit leaves)")
            return True
        if line.startswith("/"):
            return self.command(line)
        if line:
            self.answer(line)
        return True

    def command(self, line: str) -> bool:
        """Do what a line that begins with a slash says; False where it says to leave."""
        if line in ("/exit", "/quit"):
            return False
        if line == "/reset":
            self.messages = list(self._opening)
            note("(forgotten)")
        elif line == "/stats":
            write_stats(self._llm)
        elif line == "/help":
            note(HELP)
        else:
            near = nearest(line, COMMANDS)
            note(f"no command {line!r}" + (f"; did you mean {near}?" if near else "; /help lists them"))
        return True

    def answer(self, question: str) -> None:
        """Put a question and write the answer as it comes.

        An answer that Ctrl-C stops stays in the conversation as far as it was written. A question that
        cannot be answered does not stay; its error is told, and the session goes on.
        """
        asked = {"role": "user", "content": question}
        try:
            written = write_stream(self._llm.stream_chat([*self.messages, asked], self._params))
        except OSError:
            raise  # there is nobody to write to
        except Exception as error:
            say_error(error)
            if len(self.messages) > len(self._opening):
                note("(that question was dropped; /reset forgets the conversation and makes room)")
            return
        self.messages += [asked, {"role": "assistant", "content": written.text}]
        if written.interrupted:
            note("(stopped)")
        note_if_cut(written)


def _enable_line_editing() -> None:
    """Let the arrow keys edit the line and bring back earlier ones, where Python can."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401
