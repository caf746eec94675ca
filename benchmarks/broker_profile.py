"""Where the broker's time goes: ``python -m benchmarks.broker_profile``.

Clients keep calls under way, and py-spy looks at the broker's stack meanwhile.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from shutil import which

import click

from benchmarks.processes import Group
from benchmarks.report import table
from benchmarks.systems.base import Shape
from benchmarks.tasks import Numbers

#: Seconds that the clients have to get going before the first look.
_AHEAD = 0.5
_LOOKS_A_SECOND = 500
#: The broker's loop, and the functions of the C library in which it waits for messages.
_LOOP = "Broker._run"
_WAITING = ("poll ", "ppoll ", "epoll_wait ")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--clients", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--workers", type=click.IntRange(min=1), default=2, show_default=True)
@click.option(
    "--in-flight",
    type=click.IntRange(min=1),
    default=1000,
    show_default=True,
    help="Calls that each client keeps under way; 1 shows what a single call costs.",
)
@click.option("--seconds", type=click.FloatRange(min=0.1), default=5.0, show_default=True)
@click.option("--top", type=click.IntRange(min=1), default=15, show_default=True)
def main(clients: int, workers: int, in_flight: int, seconds: float, top: int) -> None:
    """Prints the functions in which the broker spends its time."""
    spy = which("py-spy") or which("py-spy", path=str(Path(sys.executable).parent))
    if spy is None:
        raise click.ClickException("py-spy is not installed: pip install '.[benchmark]'")
    with Group("tensorplay", Shape(clients, workers)) as group:
        arguments = {"in_flight": in_flight, "spread": True}
        broker, start = group.broker_seconds(), time.perf_counter()
        for client in range(clients):
            group.start(client, "rate", seconds + 2 * _AHEAD, arguments)
        time.sleep(_AHEAD)
        stacks = at_work(_record(spy, group.broker_pid, seconds))
        answers = [group.finish(client) for client in range(clients)]
        busy = (group.broker_seconds() - broker) / (time.perf_counter() - start)
    click.echo(_summary(answers, busy))
    click.echo(table(("in the function itself", "share"), shares(stacks, top, inclusive=False)))
    click.echo("")
    click.echo(table(("in it and what it calls", "share"), shares(stacks, top, inclusive=True)))


def _record(spy: str, pid: int, seconds: float) -> Counter[tuple[str, ...]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "stacks")
        command = [spy, "record", "--format", "raw", "--output", str(path), "--pid", str(pid)]
        command += ["--duration", str(max(round(seconds), 1)), "--rate", str(_LOOKS_A_SECOND)]
        # With C code: without it, waiting and working within ZeroMQ cannot be told apart.
        command += ["--native", "--function"]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode:
            raise click.ClickException(f"py-spy failed: {ended.stderr.strip()}")
        return parse(path.read_text(encoding="utf-8"))


def parse(raw: str) -> Counter[tuple[str, ...]]:
    """Returns how often each stack was seen, from py-spy's raw format."""
    stacks: Counter[tuple[str, ...]] = Counter()
    for line in raw.splitlines():
        frames, _, count = line.rpartition(" ")
        stacks[tuple(frames.split(";"))] += int(count)
    return stacks


def at_work(stacks: Counter[tuple[str, ...]]) -> Counter[tuple[str, ...]]:
    """Returns the stacks of the thread that routes, without those in which it waits."""
    kept: Counter[tuple[str, ...]] = Counter()
    for stack, count in stacks.items():
        routes = any(name.startswith(_LOOP) for name in stack)
        if routes and not stack[-1].startswith(_WAITING):
            kept[_below_loop(stack)] = count
    return kept


def _below_loop(stack: tuple[str, ...]) -> tuple[str, ...]:
    loop = next(i for i, name in enumerate(stack) if name.startswith(_LOOP))
    return stack[loop:]


def shares(stacks: Counter[tuple[str, ...]], top: int, *, inclusive: bool) -> list[tuple[str, str]]:
    """Returns the functions that were seen most often, with their share of all looks.

    Args:
        stacks: How often each stack was seen, outermost function first.
        top: How many functions; those without a name are left out.
        inclusive: Whether a function counts while it waits for what it has called.
    """
    seen: Counter[str] = Counter()
    for stack, count in stacks.items():
        for name in dict.fromkeys(stack) if inclusive else stack[-1:]:
            seen[name] += count
    for name in [name for name in seen if name.startswith("0x")]:
        del seen[name]  # of a library without names
    whole = sum(stacks.values()) or 1
    return [(f"`{name}`", f"{count / whole:.1%}") for name, count in seen.most_common(top)]


def _summary(answers: list[Numbers], busy: float) -> str:
    rate = sum(each["rate"] for each in answers)
    return f"{rate:,.0f} calls a second, the broker busy for {busy:.0%} of a core\n"


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.broker_profile")
