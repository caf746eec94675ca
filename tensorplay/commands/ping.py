"""``tensorplay ping``: how long a message to a peer and back takes."""

from __future__ import annotations

import statistics
import time

import click

from tensorplay.commands import asking, figures
from tensorplay.version import __version__


@click.command(
    name="ping", context_settings={"max_content_width": 100, "help_option_names": ["-h", "--help"]}
)
@click.argument("name", required=False)
@click.option(
    "--count",
    "-c",
    type=click.IntRange(min=1),
    default=5,
    metavar="NUMBER",
    show_default=True,
    help="How many times.",
)
@click.option(
    "--interval",
    "-i",
    type=click.FloatRange(min=0),
    default=0.2,
    metavar="SECONDS",
    show_default=True,
    help="Time between two.",
)
@asking.options
@click.version_option(__version__, prog_name="tensorplay ping")
def main(operator: asking.Operator, name: str | None, count: int, interval: float) -> None:
    """Measure round-trip times to the broker and, through it, to the peer NAME.

    The peer answers in its communication thread: a long time means that its process is busy
    with Python's lock held, or that the network is slow.

    Exit codes: 0 all answered, 1 not, 2 wrong usage.
    """
    broker: list[float] = []
    peer: list[float] = []
    for number in range(count):
        if number:
            time.sleep(interval)
        broker.append(_measure(operator, "time", ""))
        line = f"broker {figures.seconds(broker[-1])}"
        if name is not None:
            peer.append(_measure(operator, "ping", name))
            line += f", {name} {figures.seconds(peer[-1])}"
        click.echo(line)
    for who, times in (("broker", broker), (name, peer)):
        if times:
            click.echo(
                f"{who}: min {figures.seconds(min(times))}, median "
                f"{figures.seconds(statistics.median(times))}, max {figures.seconds(max(times))}"
            )


def _measure(operator: asking.Operator, what: str, name: str) -> float:
    began = time.perf_counter()
    operator.ask(what, name)
    return time.perf_counter() - began
