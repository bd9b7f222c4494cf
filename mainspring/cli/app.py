"""The ``mainspring`` command and its sub-commands."""

from __future__ import annotations

from typing import Annotated

import typer

from mainspring import __version__
from mainspring.cli.bench import bench
from mainspring.cli.chat import chat
from mainspring.cli.command import command
from mainspring.cli.generate import generate
from mainspring.cli.inspect import inspect
from mainspring.cli.serve import serve
from mainspring.cli.terminal import prepare_streams

app = typer.Typer(name="mainspring", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mainspring {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """A language-model decoding engine built around CUDA graphs."""


command(app)(generate)
command(app)(chat)
command(app)(serve)
command(app)(inspect)
app.add_typer(bench, name="bench")


def main() -> None:
    """Run the command line with the arguments of this process."""
    prepare_streams()
    app(prog_name="mainspring")
