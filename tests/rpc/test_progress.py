"""How far large payloads are."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from tensorplay.cluster import LocalCluster
from tensorplay.distributed import rpc
from tensorplay.distributed.rpc import api


def test_how_far_a_large_payload_is_can_be_seen(own_cluster: Callable[..., LocalCluster]) -> None:
    own_cluster(workers=1, options=rpc.BrokerRpcBackendOptions(shm=False))
    payload = torch.zeros(256 << 20, dtype=torch.uint8)
    future = rpc.rpc_async("worker0", torch.clone, (payload,))
    seen = set()
    deadline = time.monotonic() + 60
    while not future.done():
        assert time.monotonic() < deadline
        passed, size = api._progress(future)
        assert passed <= size
        seen.add((passed, size))
    sizes = {size for _, size in seen} - {0}
    assert sizes  # the request's, the reply's or both; each a little more than the tensor
    assert all(payload.nbytes <= size < payload.nbytes + 10_000 for size in sizes)
    assert any(0 < passed < size for passed, size in seen)
    future.wait()
    assert api._progress(future) == (0, 0)
