"""``tensorplay ps``: the peers, one a line."""

from __future__ import annotations

import sys

import click
from rich.console import Console

from tensorplay.commands import asking, tables
from tensorplay.version import __version__


@click.command(
    name="ps", context_settings={"max_content_width": 100, "help_option_names": ["-h", "--help"]}
)
@asking.options
@click.version_option(__version__, prog_name="tensorplay ps")
def main(operator: asking.Operator) -> None:
    """List the peers of all namespaces: name, rank, role, host, process, device, state.

    Exit codes: 0 listed, 1 no broker answered, 2 wrong usage.
    """
    console = Console()
    if not sys.stdout.isatty():
        console.width = max(console.width, 120)
    console.print(tables.processes(operator.status()))
