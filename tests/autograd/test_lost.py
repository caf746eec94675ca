"""Processes that die with graphs at stake."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tensorplay.cluster import LocalCluster
from tensorplay.distributed import autograd, rpc
from tensorplay.errors import WorkerLostError
from tests.autograd import modules
from tests.autograd.modules import numbers
from tests.autograd.waiting import until

pytestmark = pytest.mark.timeout(90)


def test_a_worker_that_dies_between_forward_and_backward(
    own_cluster: Callable[..., LocalCluster],
) -> None:
    cluster = own_cluster(workers=2)
    x = numbers(3, requires_grad=True)
    lost = rpc.rpc_sync("worker0", modules.scaled, (x,))
    other = rpc.rpc_sync("worker1", modules.scaled, (x,))
    cluster.kill("worker0")
    with pytest.raises(WorkerLostError, match="worker0"):
        lost.sum().backward()
    x.grad = None
    other.sum().backward()
    assert x.grad is not None


def test_a_lost_worker_is_told_as_such_in_a_context(
    own_cluster: Callable[..., LocalCluster],
) -> None:
    cluster = own_cluster(workers=1)
    with autograd.context() as context:
        lost = rpc.rpc_sync("worker0", modules.scaled, (numbers(3, requires_grad=True),))
        cluster.kill("worker0")
        with pytest.raises(WorkerLostError, match=r"Error on Node -2: .*worker0"):
            autograd.backward(context, [lost.sum()])


def test_a_caller_that_dies_leaves_no_graph(own_cluster: Callable[..., LocalCluster]) -> None:
    cluster = own_cluster(workers=2)
    rpc.rpc_sync("worker1", modules.keep_a_result_of, ("worker0",))
    mine = rpc.rpc_sync("worker0", modules.scaled, (numbers(3, requires_grad=True),))
    assert rpc.rpc_sync("worker0", modules.live_graphs) == 2
    cluster.kill("worker1")
    assert until(lambda: rpc.rpc_sync("worker0", modules.live_graphs) == 1)
    mine.sum().backward()
