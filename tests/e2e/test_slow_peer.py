"""A peer that does not read: bounded memory everywhere, and nobody else notices."""

from __future__ import annotations

import os
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil
import pytest
import torch

from tensorplay.cluster import LocalCluster
from tensorplay.distributed import rpc
from tensorplay.distributed.rpc.constants import DEFAULT_WINDOW_BYTES
from tensorplay.errors import RpcTimeoutError, WorkerLostError
from tests.rpc import helpers

Start = Callable[..., LocalCluster]

GIB = 1 << 30
PIECE = 4 << 20
#: A stopped worker is not given up meanwhile.
PATIENT = ("--heartbeat-interval", "1", "--heartbeat-timeout", "300")


@contextmanager
def stopped(cluster: LocalCluster, name: str) -> Iterator[None]:
    cluster.kill(name, signal.SIGSTOP)
    try:
        yield
    finally:
        cluster.kill(name, signal.SIGCONT)


def p99(name: str, count: int) -> float:
    """Returns the 99th percentile of the seconds that a small call to a worker takes."""
    seconds = []
    for number in range(count):
        start = time.perf_counter()
        assert rpc.rpc_sync(name, helpers.add, (number, 1)) == number + 1
        seconds.append(time.perf_counter() - start)
    return statistics.quantiles(seconds, n=100)[98]


class Flood:
    """Pushes tensors at a worker in a thread, as fast as it can."""

    def __init__(self, name: str, nbytes: int) -> None:
        self.futures: list[torch.futures.Future[float]] = []
        self._name = name
        self._count = nbytes // PIECE
        self._tensor = torch.ones(PIECE // 4)
        self.thread = threading.Thread(target=self._push)
        self.thread.start()

    def _push(self) -> None:
        for _ in range(self._count):
            arguments = (self._tensor,)
            self.futures.append(
                rpc.rpc_async(self._name, helpers.fill_and_sum, arguments, timeout=0)
            )

    def finish(self) -> None:
        """Waits until everything has been pushed, and checks that all of it was answered."""
        self.thread.join(600)
        assert not self.thread.is_alive()
        assert len(self.futures) == self._count
        assert {future.wait() for future in self.futures} == {PIECE / 4}


@pytest.mark.parametrize(
    "nbytes", [GIB, pytest.param(8 * GIB, marks=[pytest.mark.long, pytest.mark.timeout(900)])]
)
def test_a_flood_at_a_worker_that_sleeps(own_cluster: Start, nbytes: int) -> None:
    cluster = own_cluster(workers=3, broker_options=PATIENT)
    rpc.rpc_sync("worker0", helpers.fill_and_sum, (torch.ones(PIECE // 4),))
    rpc.rpc_sync("worker1", p99, ("worker2", 200))
    before = rpc.rpc_sync("worker1", p99, ("worker2", 1000))
    client, broker = psutil.Process(), psutil.Process(cluster.broker_pid)
    start = client.memory_info().rss
    with stopped(cluster, "worker0"):
        flood = Flood("worker0", nbytes)
        during = rpc.rpc_sync("worker1", p99, ("worker2", 1000))
        flood.thread.join(2.0)
        assert flood.thread.is_alive(), "nobody held it up"
        assert len(flood.futures) * PIECE <= DEFAULT_WINDOW_BYTES + 2 * PIECE
        assert client.memory_info().rss - start < DEFAULT_WINDOW_BYTES + (32 << 20)
        assert broker.memory_info().rss < 256 << 20
    flood.finish()  # nothing is lost
    assert broker.memory_info().rss < 256 << 20
    # A loaded machine has outliers of its own.
    assert during < 2 * before + 0.005, (before, during)


def test_who_waits_for_a_slow_peer_ends_by_the_deadline(own_cluster: Start) -> None:
    cluster = own_cluster(workers=2, broker_options=PATIENT)
    tensor = torch.ones(PIECE // 4)
    with stopped(cluster, "worker0"):
        futures = []
        start = time.monotonic()
        while time.monotonic() < start + 1.0:
            futures.append(rpc.rpc_async("worker0", helpers.fill_and_sum, (tensor,), timeout=1.5))
        with pytest.raises(RpcTimeoutError, match="worker0"):
            futures[-1].wait()
        assert time.monotonic() - start < 5.0
        assert rpc.rpc_sync("worker1", helpers.who, timeout=5) == "worker1"
    for future in futures:
        with pytest.raises(RpcTimeoutError):
            future.wait()
    assert rpc.rpc_sync("worker0", helpers.fill_and_sum, (tensor,)) == PIECE / 4


def test_a_stopped_worker_is_kept_for_as_long_as_the_broker_is_told(own_cluster: Start) -> None:
    cluster = own_cluster(workers=1, broker_options=PATIENT)
    with stopped(cluster, "worker0"):
        future = rpc.rpc_async("worker0", helpers.who)
        with pytest.raises(TimeoutError):
            future.wait(6.5)  # more than the default
    assert future.wait(20) == "worker0"


def test_who_waits_for_a_slow_peer_is_told_of_its_death(own_cluster: Start) -> None:
    cluster = own_cluster(workers=1, broker_options=PATIENT)
    cluster.kill("worker0", signal.SIGSTOP)
    flood = Flood("worker0", GIB)
    flood.thread.join(1.0)
    assert flood.thread.is_alive()
    os.kill(cluster.pids["worker0"], signal.SIGKILL)
    flood.thread.join(20.0)
    assert not flood.thread.is_alive()
    for future in flood.futures:
        with pytest.raises(WorkerLostError):
            future.wait()
