"""What all commands have in common: groups of options, ``--debug``, and errors of one line."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import sys
import traceback
from collections.abc import Callable
from typing import Annotated, Any, NoReturn, get_type_hints

import typer

from mainspring.engine.options import UnknownOptionError

Debug = Annotated[bool, typer.Option("--debug", envvar="MAINSPRING_DEBUG", help="Show where an error comes from.")]

# What the user gave was wrong; everything else is exit status 1.
_BAD_INPUT = (ValueError, UnknownOptionError, FileNotFoundError, NotADirectoryError, IsADirectoryError)


def command(app: typer.Typer) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a function a command of ``app``.

    A parameter whose type is a dataclass stands for a group of options, one for each of its fields, so that
    commands share them. An exception becomes one line on the standard error: exit status 2 where the input
    was bad, 1 otherwise, 130 after Ctrl-C. ``--debug`` or ``MAINSPRING_DEBUG=1`` shows the traceback too.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        groups, parameters = _expand(function)

        @functools.wraps(function)
        def run(debug: bool, **given: Any) -> None:
            with_groups = {
                name: group(**{field.name: given.pop(field.name) for field in dataclasses.fields(group)})
                for name, group in groups.items()
            }
            try:
                function(**given, **with_groups)
            except (typer.Exit, typer.Abort, BrokenPipeError):
                raise
            except KeyboardInterrupt:
                raise typer.Exit(130) from None
            except Exception as error:
                _leave(error, debug)

        # typer reads the annotations as well as the signature.
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        del run.__wrapped__  # type: ignore[attr-defined]
        app.command(help=help_text(function))(run)
        return function

    return register


def help_text(function: Callable[..., None]) -> str:
    """A function's docstring for ``--help``: each paragraph one line, for the terminal to wrap; no markup."""
    paragraphs = inspect.cleandoc(function.__doc__ or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs).replace("``", "")


def one_line(error: BaseException) -> str:
    """An exception as one line, with its type where the text alone would not be understood."""
    text = " ".join(str(error).split())
    if text and (isinstance(error, _BAD_INPUT) or type(error).__module__.startswith("mainspring")):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def say_error(error: BaseException) -> None:
    """Tell an exception on the standard error, as one line."""
    with contextlib.suppress(OSError):  # which may be what is being told
        sys.stdout.flush()
    print(f"mainspring: error: {one_line(error)}", file=sys.stderr, flush=True)


def _leave(error: Exception, debug: bool) -> NoReturn:
    if debug:
        sys.stdout.flush()
        traceback.print_exception(error)
    say_error(error)
    raise typer.Exit(2 if isinstance(error, _BAD_INPUT) else 1)


def _expand(function: Callable[..., None]) -> tuple[dict[str, type[Any]], list[inspect.Parameter]]:
    """The option groups among a function's parameters, and its parameters with each group's fields
    instead."""
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, type[Any]] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(function).parameters.values():
        hint = hints[parameter.name]
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            groups[parameter.name] = hint
            parameters += _fields_as_parameters(hint)
        else:
            parameters.append(parameter.replace(annotation=hint, kind=inspect.Parameter.KEYWORD_ONLY))
    parameters.append(inspect.Parameter("debug", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Debug))
    return groups, parameters


def _fields_as_parameters(group: type[Any]) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )
        for field in dataclasses.fields(group)
    ]
