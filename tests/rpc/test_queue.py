"""Calls that are given up while they wait for a thread of the callee's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tensorplay.cluster import LocalCluster
from tensorplay.distributed import rpc
from tensorplay.errors import RpcTimeoutError
from tests.rpc import helpers


@pytest.mark.timeout(60)
def test_calls_that_time_out_in_the_queue_do_not_run(
    own_cluster: Callable[..., LocalCluster],
) -> None:
    """One thread computes; what waits behind it is given up, and leaves nothing behind."""
    own_cluster(workers=1, threads=1)
    busy = rpc.rpc_async("worker0", helpers.spin, (2.0,))
    payload = torch.ones(1 << 18)
    late = [
        rpc.rpc_async("worker0", helpers.set_and_return, (f"late {n}", payload), timeout=0.5)
        for n in range(40)
    ]
    for future in late:
        with pytest.raises(RpcTimeoutError):
            future.wait()
    assert not busy.done()
    busy.wait()
    seen = rpc.rpc_sync("worker0", helpers.counts)
    assert not any(rpc.rpc_sync("worker0", helpers.is_set, (f"late {n}",)) for n in range(40))
    assert seen["requests_dropped"] == 40
    assert seen["requests_queued"] == 0
    assert seen["requests_in_progress"] == 1  # the one that asks
