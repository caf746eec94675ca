"""Connections through boxes that forget those on which nothing is said."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tensorplay.broker import Broker, BrokerConfig
from tensorplay.distributed import rpc
from tests.network.middlebox import MiddleBox

INTERVAL, TIMEOUT = 0.5, 2.0


@pytest.fixture
def port() -> Iterator[int]:
    """That of a broker with a worker, which is called through the box."""
    config = BrokerConfig(
        bind=("tcp://127.0.0.1:0",), heartbeat_interval=INTERVAL, heartbeat_timeout=TIMEOUT
    )
    with Broker(config) as broker:
        worker = subprocess.Popen(
            [sys.executable, "-m", "tensorplay.worker", "--broker", broker.address, "--name", "w"]
        )
        try:
            yield int(broker.address.rpartition(":")[2])
        finally:
            worker.terminate()
            worker.wait(30)


def join(box: MiddleBox) -> None:
    rpc.init_rpc("client", broker=f"tcp://127.0.0.1:{box.port}")
    rpc.wait_for_workers(["w"], timeout=60)


def test_heartbeats_keep_an_idle_connection_known(port: int) -> None:
    with MiddleBox(port, idle_limit=3 * INTERVAL) as box:
        join(box)
        try:
            time.sleep(10 * INTERVAL)
            assert rpc.rpc_sync("w", pow, (2, 5)) == 32
            assert box.forgotten == 0
        finally:
            rpc.shutdown(graceful=False)


def test_a_connection_that_was_forgotten_is_made_anew(port: int) -> None:
    """A box that is stricter than the heartbeats: calls are answered all the same."""
    with MiddleBox(port, idle_limit=INTERVAL / 2) as box:
        join(box)
        try:
            for _ in range(3):
                time.sleep(3 * INTERVAL)
                assert rpc.rpc_sync("w", pow, (2, 5), timeout=50) == 32
            assert box.forgotten > 0
            assert box.made > 1
        finally:
            rpc.shutdown(graceful=False)
