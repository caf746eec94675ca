"""A worker that is told to end while others keep calling it."""

from __future__ import annotations

import signal
import threading
from collections import Counter
from collections.abc import Callable

import pytest

from tensorplay.cluster import LocalCluster
from tensorplay.distributed import rpc
from tests.rpc import helpers

Start = Callable[..., LocalCluster]


def test_a_worker_that_is_never_idle_leaves_all_the_same(own_cluster: Start) -> None:
    """Its callers are told that it has left, and of nothing that is amiss within it."""
    cluster = own_cluster(workers=1)
    cluster.start_worker("busy", drain_timeout=1.0)
    outcomes: Counter[str] = Counter()
    called = threading.Event()

    def call() -> None:
        while "WorkerLostError" not in outcomes:
            try:  # each call makes a further one, to itself and to the other
                rpc.rpc_sync("busy", helpers.nest, (["busy", "worker0"], 2), timeout=30)
                outcomes["done"] += 1
                called.set()
            except Exception as error:
                outcomes[type(error).__name__] += 1

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert called.wait(30)
    cluster.kill("busy", signal.SIGTERM)
    assert cluster.wait_ended("busy", 20) == 0
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert outcomes.keys() == {"done", "WorkerLostError"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_calls_under_way_end_before_the_worker_does(own_cluster: Start, number: int) -> None:
    cluster = own_cluster(workers=1)
    future = rpc.rpc_async("worker0", helpers.spin, (1.0,))
    rpc.rpc_sync("worker0", helpers.who)
    cluster.kill("worker0", number)
    assert future.wait() is None
    assert cluster.wait_ended("worker0") == 0
