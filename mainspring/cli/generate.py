"""``mainspring generate``: prompts in, answers out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from mainspring.cli.options import EngineOptions, SamplingOptions
from mainspring.cli.terminal import note_if_cut, write, write_stats, write_stream

if TYPE_CHECKING:
    from mainspring import LLM, SamplingParams


def generate(
    engine: EngineOptions,
    sampling: SamplingOptions,
    prompts: Annotated[list[str] | None, Argument(metavar="PROMPT", help="Texts to go on from; quote each.")] = None,
    prompt_file: Annotated[
        list[str] | None,
        Option(metavar="FILE", help="A file that is one prompt (less its last newline); - is the input."),
    ] = None,
    chat: Annotated[
        bool, Option("--chat/--raw", help="Put each prompt as a question, through the chat template.")
    ] = False,
    system: Annotated[str | None, Option(help="With --chat: what the model is told before the question.")] = None,
    n: Annotated[int, Option("--n", "-n", help="Answers to each prompt.")] = 1,
    stats: Annotated[bool, Option("--stats", help="Close with a table of what the engine did.")] = False,
) -> None:
    """Answer prompts. One prompt with one answer is written as it comes; more run as a batch.

    Without a prompt, the standard input is one. Answers go to the standard output, all else to the
    standard error.
    """
    if system is not None and not chat:
        raise ValueError("--system needs --chat: a raw prompt has no place for it")
    texts = _collect(prompts or [], prompt_file or [])
    sampling.check(engine.seed, n)
    with engine.open() as llm:
        params = sampling.params(engine.seed, n, llm.sampling_defaults)
        if len(texts) == 1 and n == 1:
            finished = _write_one(llm, texts[0], params, chat, system)
        else:
            finished = _write_batch(llm, texts, params, chat, system)
        if stats:
            write_stats(llm)
    if not finished:
        raise KeyboardInterrupt


def conversation(question: str, system: str | None) -> list[dict[str, str]]:
    """The messages of a conversation that begins with ``question``."""
    before = [] if system is None else [{"role": "system", "content": system}]
    return [*before, {"role": "user", "content": question}]


def _collect(prompts: list[str], files: list[str]) -> list[str]:
    if not prompts and not files:
        if sys.stdin is None or sys.stdin.isatty():
            raise ValueError("there is no prompt; give one, or --prompt-file FILE, or pipe one in")
        files = ["-"]
    texts = [_utf8(prompt) for prompt in prompts] + [_read(file) for file in files]
    for number, text in enumerate(texts, start=1):
        if not text:
            raise ValueError(f"prompt {number} of {len(texts)} is empty; give it at least one character")
    return texts


def _read(file: str) -> str:
    try:
        text = _utf8(sys.stdin.read()) if file == "-" else Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"the prompt in {file} is not UTF-8 text: {error}") from error
    return text.removesuffix("\n")


def _utf8(text: str) -> str:
    """A text whose bytes Python could not decode, in a C locale for one, read as UTF-8."""
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"the prompt {text[:40]!r} is not UTF-8 text: {error}") from error


def _write_one(llm: LLM, text: str, params: SamplingParams, chat: bool, system: str | None) -> bool:
    """Answer one prompt; False where Ctrl-C stopped it."""
    if chat:
        written = write_stream(llm.stream_chat(conversation(text, system), params))
    else:
        written = write_stream(llm.stream(text, params))
    note_if_cut(written)
    return not written.interrupted


def _write_batch(llm: LLM, texts: list[str], params: SamplingParams, chat: bool, system: str | None) -> bool:
    """Answer several prompts, or one several times; False where Ctrl-C stopped it."""
    progress = sys.stderr.isatty()
    try:
        if chat:
            outputs = llm.chat([conversation(text, system) for text in texts], params, use_tqdm=progress)
        else:
            outputs = llm.generate(texts, params, use_tqdm=progress)
    except KeyboardInterrupt:
        return False
    for number, output in enumerate(outputs, start=1):
        for answer in output.outputs:
            which = f"prompt {number}" if params.n == 1 else f"prompt {number}, answer {answer.index + 1}"
            write(f"--- {which} ---\n{answer.text}\n")
    return True
