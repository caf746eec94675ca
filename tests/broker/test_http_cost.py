"""What the dashboard costs the broker."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator

import psutil
import pytest

from tensorplay.protocol.messages import Heartbeat
from tests.broker.helpers import Dial, RawPeer

#: Peers that are registered, and seconds over which the processor time is taken.
PEERS, SECONDS = 64, 5.0
#: Share of a core that the dashboard may take.
LIMIT = 0.02
#: What a peer tells in its heartbeats.
STATS = {f"figure_{number}": number * 1.5 for number in range(40)}


@pytest.fixture
def broker(free_port: int) -> Iterator[tuple[psutil.Process, str]]:
    address = f"127.0.0.1:{free_port}"
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "tensorplay.broker"),
            *("--bind", "tcp://127.0.0.1:0", "--http", address),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        endpoint = process.stdout.readline().split()[-1]
        assert address in process.stdout.readline()
        yield psutil.Process(process.pid), endpoint
    finally:
        process.terminate()
        process.communicate(timeout=20)


def test_a_reader_costs_little(
    broker: tuple[psutil.Process, str], dial: Dial, free_port: int
) -> None:
    process, endpoint = broker
    peers: list[RawPeer] = []
    for number in range(1, PEERS + 1):
        peers.append(dial(endpoint))
        peers[-1].register(f"worker{number}", number)
        peers[-1].send(Heartbeat(1.0, STATS))

    def spent(read: bool) -> float:
        """Returns the share of a core that the broker takes."""
        before, began = sum(process.cpu_times()[:2]), time.monotonic()
        while time.monotonic() - began < SECONDS:
            if read:
                url = f"http://127.0.0.1:{free_port}/api/status"
                with urllib.request.urlopen(url, timeout=10) as answer:
                    assert len(answer.read()) > PEERS * len(STATS)
            time.sleep(1.0)
        return float(sum(process.cpu_times()[:2]) - before) / (time.monotonic() - began)

    without, reading = spent(False), spent(True)
    print(f"{PEERS} peers: {without:.2%} of a core, {reading:.2%} with a reader")
    assert reading - without < LIMIT
