"""The workers' parts go when their user does."""

from __future__ import annotations

import time

import pytest
import torch

from tensorplay.distributed import rpc
from tensorplay.distributed.optim import DistributedOptimizer
from tests.optim.helpers import Twins, live_shards

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("cluster")]


def test_the_parts_are_dropped_with_it() -> None:
    before = rpc.rpc_sync("worker0", live_shards)
    twins = Twins()
    _, spread = twins.optimizers(torch.optim.Adam)
    scheduler = torch.optim.lr_scheduler.StepLR(spread, 1)
    twins.backward()
    spread.step()
    scheduler.step()
    assert rpc.rpc_sync("worker0", live_shards) == before + 1
    del spread, scheduler  # no collection of cycles is needed
    deadline = time.monotonic() + 10
    while rpc.rpc_sync("worker0", live_shards) != before:
        assert time.monotonic() < deadline


def test_a_failed_constructor_leaves_nothing() -> None:
    before = rpc.rpc_sync("worker0", live_shards)
    twins = Twins(["worker0", "worker1"])
    bad = rpc.remote("worker1", str, (1,))
    with pytest.raises(TypeError, match="one to a str"):
        DistributedOptimizer(torch.optim.SGD, [*twins.spread, bad])
    deadline = time.monotonic() + 10
    while rpc.rpc_sync("worker0", live_shards) != before:
        assert time.monotonic() < deadline
