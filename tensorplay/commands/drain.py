"""``tensorplay drain``: have a worker finish its calls and leave."""

from __future__ import annotations

import time

import click

from tensorplay.commands import asking
from tensorplay.errors import BrokerError
from tensorplay.version import __version__

#: Seconds between two looks for a worker that leaves.
_LOOK = 0.1


@click.command(
    name="drain", context_settings={"max_content_width": 100, "help_option_names": ["-h", "--help"]}
)
@click.argument("name")
@click.option(
    "--wait",
    type=click.FloatRange(min=0),
    default=30.0,
    metavar="SECONDS",
    show_default=True,
    help="Time to wait until it has left; 0 does not wait.",
)
@asking.options
@click.version_option(__version__, prog_name="tensorplay drain")
def main(operator: asking.Operator, name: str, wait: float) -> None:
    """Have the worker NAME finish the calls under way and leave, as on SIGTERM.

    How long its calls may take is the worker's own --drain-timeout.

    Exit codes: 0 it has left (or was told to, with --wait 0), 1 not, 2 wrong usage.
    """
    before = _incarnation(operator, name)
    operator.ask("drain", name)
    if not wait:
        click.echo(f"{name} was told to leave")
        return
    deadline = time.monotonic() + wait
    while _incarnation(operator, name) == before:
        if time.monotonic() > deadline:
            raise BrokerError(f"{name!r} is still there after {wait:g} s: calls are under way")
        time.sleep(_LOOK)
    click.echo(f"{name} has left")


def _incarnation(operator: asking.Operator, name: str) -> int | None:
    """Returns which process has a name now."""
    told = operator.status()["namespaces"].get(operator.address.namespace, {"peers": []})
    return next((peer["incarnation"] for peer in told["peers"] if peer["name"] == name), None)
