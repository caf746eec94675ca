"""``tensorplay status``: the broker, its peers, and what is wrong."""

from __future__ import annotations

import json
import sys
import time
from datetime import datetime

import click
from rich.console import Console

from tensorplay.commands import asking, tables
from tensorplay.errors import BrokerError
from tensorplay.version import __version__

#: Width of the table where no terminal says one.
_WIDTH = 160


@click.command(
    name="status",
    context_settings={"max_content_width": 100, "help_option_names": ["-h", "--help"]},
)
@click.option("--watch", is_flag=True, help="Show it again and again, until Ctrl-C.")
@click.option(
    "--interval",
    type=click.FloatRange(min=0.1),
    default=1.0,
    metavar="SECONDS",
    show_default=True,
    help="Time between two looks with --watch.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print the status as JSON; with --watch one a line."
)
@asking.options
@click.version_option(__version__, prog_name="tensorplay status")
def main(operator: asking.Operator, watch: bool, interval: float, as_json: bool) -> None:
    """Show the broker and its peers: who is there, what they hold and do, and what is wrong.

    RREFS are owned + used. BYTES/s and QUEUED are what goes through the broker. p50 and p99 are
    over the last ten seconds: of the calls that a peer made, or of those that it served if it
    made none.

    Exit codes: 0 shown, 1 no broker answered, 2 wrong usage.
    """
    if as_json:
        _print_json(operator, watch, interval)
    elif watch:
        _watch(operator, interval)
    else:
        _console().print(tables.overview(operator.status(), datetime.now()))


def _print_json(operator: asking.Operator, watch: bool, interval: float) -> None:
    while True:
        click.echo(json.dumps(operator.status(), indent=None if watch else 2))
        if not watch:
            return
        time.sleep(interval)


def _watch(operator: asking.Operator, interval: float) -> None:
    from rich.live import Live
    from rich.text import Text

    console = _console()
    with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
        while True:
            try:
                live.update(tables.overview(operator.status(), datetime.now()), refresh=True)
            except BrokerError as error:  # it may come back
                live.update(Text(f"! {error}", style="red"), refresh=True)
            time.sleep(interval)


def _console() -> Console:
    console = Console()
    if not sys.stdout.isatty():
        console.width = max(console.width, _WIDTH)
    return console
