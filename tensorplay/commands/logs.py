"""``tensorplay logs``: what a worker prints."""

from __future__ import annotations

import time
from typing import Any

import click

from tensorplay.commands import asking
from tensorplay.version import __version__

#: Seconds between two looks with --follow.
_LOOK = 0.3


@click.command(
    name="logs", context_settings={"max_content_width": 100, "help_option_names": ["-h", "--help"]}
)
@click.argument("name")
@click.option("--follow", "-f", is_flag=True, help="Go on until Ctrl-C, or until it is gone.")
@click.option(
    "--lines",
    "-n",
    type=click.IntRange(min=0),
    metavar="NUMBER",
    help="Begin with the last so many lines; by default with all that the worker has kept.",
)
@asking.options
@click.version_option(__version__, prog_name="tensorplay logs")
def main(operator: asking.Operator, name: str, follow: bool, lines: int | None) -> None:
    """Show what the worker NAME has written to its standard output and error.

    A worker started with "tensorplay worker" keeps the end of it (--keep-output).

    Exit codes: 0 shown, 1 nobody answered, or the worker keeps nothing, 2 wrong usage.
    """
    told: dict[str, Any] = {"next": 0, "process": ""}
    text = ""
    while True:
        told = operator.ask("logs", name, since=told["next"], process=told["process"])
        text += told["text"]
        if told["more"]:
            continue
        if lines is not None:
            text, lines = "".join(text.splitlines(keepends=True)[-lines:] if lines else ""), None
        click.echo(text, nl=False)
        text = ""
        if not follow:
            return
        time.sleep(_LOOK)
