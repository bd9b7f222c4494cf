"""``mainspring inspect``: what was recorded, as tables, JSON, a page or a trace."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Exit, Option

from mainspring.cli.options import DEFAULT_MODEL, EngineOptions, parse_sizes
from mainspring.cli.terminal import note

if TYPE_CHECKING:
    from mainspring.graphs import RungRecording
    from mainspring.inspect import Inspection, RungDiff

#: Columns where the standard output is no terminal.
WIDTH = 120
STDOUT = "-"
#: Above all levels at which torch's profiler, in some builds, talks about itself.
QUIET = "6"
_REPORT = "Report"
_WATCHED = "Watched steps"


def inspect(
    engine: EngineOptions,
    sources: Annotated[
        list[str] | None,
        Argument(
            metavar="MODEL",
            help="As --model takes it, or the name of a shape with random weights (qwen3-0.6b, llama-3.2-1b, "
            "llama-3.1-8b, tiny), or a .json file that --json wrote; with --diff two such files.",
        ),
    ] = None,
    rung: Annotated[
        str | None,
        Option(
            metavar="N[,N]",
            help="Rung whose operations are listed, the smallest if not given; with --diff the two to compare.",
            rich_help_panel=_REPORT,
        ),
    ] = None,
    unfold: Annotated[
        bool, Option("--unfold", help="List every layer, every owner and every change.", rich_help_panel=_REPORT)
    ] = False,
    diff: Annotated[
        bool,
        Option("--diff", help="Show what differs between two files, or two rungs of one.", rich_help_panel=_REPORT),
    ] = False,
    json: Annotated[
        str | None, Option(metavar="FILE", help="Write everything as JSON; - is the output.", rich_help_panel=_REPORT)
    ] = None,
    html: Annotated[
        Path | None, Option(metavar="FILE", help="Write one page that needs no network.", rich_help_panel=_REPORT)
    ] = None,
    trace: Annotated[
        Path | None,
        Option(metavar="FILE", help="Write the timeline as a Chrome/Perfetto trace.", rich_help_panel=_REPORT),
    ] = None,
    sampled: Annotated[
        bool,
        Option("--sampled", help="Record the step that samples on every rung, too.", rich_help_panel=_WATCHED),
    ] = False,
    batch: Annotated[int, Option(help="Rows of the batch in the timeline.", rich_help_panel=_WATCHED)] = 1,
    steps: Annotated[
        int, Option(help="Steps in the timeline, for each launch mode; 0 for none.", rich_help_panel=_WATCHED)
    ] = 3,
) -> None:
    """Show what was recorded: the ladder with its padding, every operation, every address with its owner, the memory
    that it takes, a timeline of a few steps, and what an audit finds.

    Records the model as generate does. Ends with exit status 1 if the audit finds something.
    """
    given = list(sources or [])
    rungs = parse_sizes(rung) if rung is not None else []
    if trace is not None and (steps == 0 or diff):
        raise ValueError("--trace writes the timeline; leave out " + ("--diff" if diff else "--steps 0"))
    if len(rungs) > (2 if diff else 1):
        raise ValueError(f"--rung is {rung!r}; give " + ("two rungs at most" if diff else "one, or --diff for two"))
    if len(given) > (2 if diff else 1):
        raise ValueError(f"{len(given)} models; give one" + (", or two .json files" if diff else ", or use --diff"))
    if len(given) == 2:
        _refuse_options(engine, given)
        files = [_load(name) for name in given]
    else:
        files = [_one(engine, given, batch, 0 if diff else steps, sampled)]
    if diff:
        _show_diff(files, given, rungs, unfold, json, html)
        return
    [found] = files
    listed = _choose(found, rungs[0] if rungs else None)
    if trace is not None:
        from mainspring.inspect import write_trace

        write_trace(found, trace)
        note(f"wrote {trace}")
    _write(json, found.as_dict())
    _write_page(html, [found])
    if json != STDOUT:
        from mainspring.inspect.terminal import report

        _print(report(found, listed, unfold=unfold))
    if found.findings:
        raise Exit(1)


def _one(engine: EngineOptions, given: Sequence[str], batch: int, steps: int, sampled: bool) -> Inspection:
    if given and given[0].endswith(".json"):
        _refuse_options(engine, given)
        return _load(given[0])
    if given and engine.model not in (DEFAULT_MODEL, given[0]):
        raise ValueError(f"two models, {given[0]!r} and --model {engine.model!r}; give one")
    if engine.enforce_eager:  # told before seconds of loading
        raise ValueError("an eager engine records nothing that could be inspected; leave --enforce-eager out")
    os.environ.setdefault("KINETO_LOG_LEVEL", QUIET)  # before torch is imported
    with _named(given[0] if given else engine.model) as (title, model, load_format):
        from mainspring import LLM
        from mainspring.inspect import inspect_engine

        options = dataclasses.replace(engine, model=model, load_format=load_format or engine.load_format)
        with LLM(**options.keywords(), skip_tokenizer_init=True) as llm:
            found = inspect_engine(llm, rows=batch, steps=steps, sampled=sampled)
    return dataclasses.replace(found, about={**found.about, "model": title})


@contextmanager
def _named(name: str) -> Iterator[tuple[str, str, str | None]]:
    """Title, model and load format of what a user typed: a shape of ``mainspring bench``, or what an engine takes."""
    from mainspring.bench.shapes import SHAPES, open_model

    if name.lower() in SHAPES and not Path(name).exists():
        with open_model(name) as shape:
            yield shape.title, shape.path, shape.load_format
    else:
        yield name, name, None


def _load(name: str) -> Inspection:
    from mainspring.inspect import Inspection

    if not name.endswith(".json"):
        raise ValueError(f"{name!r} is no .json file; write one with `mainspring inspect MODEL --json FILE`")
    return Inspection.load(name)


def _refuse_options(engine: EngineOptions, given: Sequence[str]) -> None:
    changed = [field.name for field in dataclasses.fields(engine) if getattr(engine, field.name) != field.default]
    if changed:
        name = "--" + changed[0].replace("_", "-")
        raise ValueError(f"{name} is for a model that is recorded now; {' and '.join(given)} was recorded before")


def _choose(found: Inspection, size: int | None) -> RungRecording | None:
    """The rung to list: of that size, or the smallest."""
    if size is not None:
        return found.recording.rung(size)
    return min(found.recording.rungs, key=lambda each: each.size, default=None)


def _show_diff(
    files: Sequence[Inspection],
    given: Sequence[str],
    rungs: Sequence[int],
    unfold: bool,
    json: str | None,
    html: Path | None,
) -> None:
    from mainspring.inspect import compare_recordings, compare_rungs
    from mainspring.inspect.terminal import diff_report

    only_before: list[str] = []
    only_after: list[str] = []
    diffs: list[RungDiff]
    first, last = files[0].recording, files[-1].recording
    if len(files) == 2 and not rungs:
        diffs, only_before, only_after = compare_recordings(first, last)
    else:
        sizes = sorted(each.size for each in first.rungs)
        if len(files) == 1 and len(rungs) < 2 and len(sizes) < 2:
            count = "is one rung, so nothing to compare it with" if sizes else "are no rungs"
            raise ValueError(f"there {count}; give two files")
        a = rungs[0] if rungs else sizes[0]
        b = rungs[1] if len(rungs) > 1 else a if len(files) == 2 else sizes[-1]
        diffs = [compare_rungs(first.rung(a), last.rung(b))]
    names = dict(zip(("before", "after"), given if len(given) == 2 else [files[0].title] * 2, strict=True))
    plain = {"diffs": [each.as_dict() for each in diffs], "only_before": only_before, "only_after": only_after}
    _write(json, {**names, **plain})
    _write_page(html, files)
    if json == STDOUT:
        return
    from rich.text import Text

    from mainspring.inspect.text import plain as printable

    for each in diffs:
        _print(diff_report(each, everything=unfold))
    for name, missing in zip(names.values(), (only_before, only_after), strict=True):
        if missing:
            _print([Text(f"only in {printable(name)}: {printable(', '.join(missing))}", style="yellow")])


def _write(file: str | None, data: dict[str, Any]) -> None:
    if file is None:
        return
    from json import dumps

    if file == STDOUT:
        sys.stdout.write(dumps(data) + "\n")
        return
    Path(file).write_text(dumps(data), encoding="utf-8")
    note(f"wrote {file}")


def _write_page(file: Path | None, files: Sequence[Inspection]) -> None:
    if file is None:
        return
    from mainspring.inspect import render_page

    file.write_text(render_page(files), encoding="utf-8")
    note(f"wrote {file}")


def _print(parts: Iterable[Any]) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDTH)
    with contextlib.suppress(BrokenPipeError):
        for part in parts:
            console.print(part)
