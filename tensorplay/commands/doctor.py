"""``tensorplay doctor``: what could keep this host from working, and what to do about it."""

from __future__ import annotations

import sys

import click
from rich.console import Console
from rich.text import Text

from tensorplay.commands import asking, checks
from tensorplay.version import __version__

_MARKS = {"ok": ("✓", "green"), "warning": ("!", "yellow"), "bad": ("✗", "red")}


@click.command(
    name="doctor",
    context_settings={"max_content_width": 100, "help_option_names": ["-h", "--help"]},
)
@asking.options
@click.version_option(__version__, prog_name="tensorplay doctor")
def main(operator: asking.Operator) -> None:
    """Look at this host, the way to the broker, the broker and its peers.

    Checks versions on both sides, reachability, keys, shared memory, limits and clocks, and says
    what to do about what it finds.

    Exit codes: 0 nothing is wrong (warnings aside), 1 something is, 2 wrong usage.
    """
    console = Console(highlight=False)
    wrong = False
    for finding in checks.run(operator):
        wrong |= finding.level == "bad"
        mark, style = _MARKS[finding.level]
        line = Text(f"{mark} ", style=style)
        line.append(f"{finding.what}: ", style="bold")
        line.append(finding.text, style="default")
        console.print(line, soft_wrap=True)
        if finding.remedy:
            console.print(Text(f"    {finding.remedy}", style="dim"), soft_wrap=True)
    sys.exit(1 if wrong else 0)
