"""``python -m tests.fuzz --frames 1000000``: damaged messages for the broker and an agent."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import click
import psutil

from tests.fuzz.agent_target import AgentTarget
from tests.fuzz.broker_target import BrokerTarget

#: Bytes that a target may have grown by in the end.
LIMIT = 64 << 20


def run(frames: int, seed: int, say: Callable[[str], None] = lambda line: None) -> None:
    """Sends damaged messages, half of them to a broker's state and half to an agent.

    Raises:
        Exception: Whatever a target did not take well.
        AssertionError: If another peer noticed something, or memory grew.
    """
    half = frames // 2
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # each refusal would be a line
    try:
        broker = BrokerTarget(seed)
        _measure("broker", broker.run, half, broker.sent, say)
        with AgentTarget(seed) as agent:
            _measure("agent", agent.run, frames - half, agent.sent, say)
    finally:
        logging.disable(level)


def _measure(
    name: str,
    send: Callable[[int], None],
    frames: int,
    sent: dict[str, int],
    say: Callable[[str], None],
) -> None:
    send(min(frames, 2000))  # caches fill
    process = psutil.Process()
    before, start = process.memory_info().rss, time.monotonic()
    send(frames)
    grown, seconds = process.memory_info().rss - before, time.monotonic() - start
    say(f"{name}: {frames:,} frames in {seconds:.0f} s, {grown / 2**20:+.1f} MiB, {dict(sent)}")
    assert grown < LIMIT, f"{name} grew by {grown / 2**20:.0f} MiB"


@click.command(context_settings={"show_default": True})
@click.option("--frames", default=1_000_000, help="How many messages.")
@click.option("--seed", default=1, help="Decides what is sent.")
def main(frames: int, seed: int) -> None:
    """Send damaged messages to the broker's state and to an agent."""
    run(frames, seed, click.echo)


if __name__ == "__main__":
    main()
