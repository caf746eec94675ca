"""Calls whose tensors go through shared memory, between real processes."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tensorplay.cluster import LocalCluster
from tensorplay.distributed import rpc
from tensorplay.distributed.rpc.shm.slabs import SLAB_BYTES

from ..travel import assert_same
from . import helpers

COUNT = 1 << 18

pytestmark = pytest.mark.usefixtures("cluster")


def sync(function: Callable[..., Any], *args: Any, to: str = "worker0") -> Any:
    return rpc.rpc_sync(to, function, args=args, timeout=30)


@pytest.fixture(scope="module", autouse=True)
def _they_share(cluster: LocalCluster) -> None:
    for worker in cluster.workers:
        helpers.share_with(worker)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
        torch.float8_e4m3fn,
    ],
)
def test_values_of_every_dtype(dtype: torch.dtype) -> None:
    memory = torch.randint(0, 2, (COUNT * dtype.itemsize,), dtype=torch.uint8)
    sent = memory.view(dtype).view(512, -1)
    slabs = helpers.stats()["slab_leases"]
    got = sync(helpers.echo, {"whole": sent, "turned": sent.t(), "part": sent[3:400]})
    assert isinstance(got, dict)
    assert_same(sent, got["whole"])
    assert_same(sent.t(), got["turned"])
    assert_same(sent[3:400], got["part"])
    assert helpers.stats()["slabs_mapped"] > 0
    assert helpers.stats()["slab_leases"] <= slabs + 1


def test_tensors_of_several_buffers() -> None:
    dense = torch.randn(600, 600)
    got = sync(helpers.echo, [dense.to_sparse(), dense])
    assert isinstance(got, list)
    assert torch.equal(got[0].to_dense(), dense)
    assert torch.equal(got[1], dense)


def test_gradients() -> None:
    weight = torch.randn(600, 600, requires_grad=True)
    got = sync(helpers.echo, weight)
    assert isinstance(got, torch.Tensor)
    (got * 3).sum().backward()
    assert weight.grad is not None
    assert (weight.grad == 3).all()


def test_what_a_receiver_writes_nobody_sees() -> None:
    sent = torch.ones(COUNT)
    sync(helpers.keep, "mine", sent)
    sync(helpers.keep, "other", sent, to="worker1")
    sync(helpers.kept_fill, "mine", 5.0)
    assert sync(helpers.kept_sum, "mine") == 5.0 * COUNT
    assert sync(helpers.kept_sum, "other", to="worker1") == COUNT
    assert sent.sum() == COUNT
    fetched = sync(helpers.take_kept, "mine")
    assert isinstance(fetched, torch.Tensor)
    fetched.zero_()
    assert sync(helpers.kept_sum, "mine") == 5.0 * COUNT
    for worker, name in (("worker0", "mine"), ("worker1", "other")):
        sync(helpers.drop, name, to=worker)


def test_values_are_those_of_the_call() -> None:
    sent = torch.zeros(COUNT)
    futures = []
    for value in range(30):
        sent.fill_(value)
        futures.append(rpc.rpc_async("worker0", helpers.keep, args=("last", sent)))
    assert [future.wait() for future in futures] == [value * COUNT for value in range(30)]
    sync(helpers.drop, "last")


def test_a_kept_tensor_keeps_its_block_and_no_other() -> None:
    gc.collect()
    for number in range(8):
        sync(helpers.keep, f"kept{number}", torch.full((COUNT,), float(number)))
    for _ in range(20):
        sync(helpers.length, torch.full((COUNT,), 99.0))
    sums = [sync(helpers.kept_sum, f"kept{number}") for number in range(8)]
    assert sums == [number * COUNT for number in range(8)]
    assert helpers.stats()["slab_leases"] >= 8
    for number in range(8):
        sync(helpers.drop, f"kept{number}")
    sync(helpers.length, torch.ones(1))
    assert helpers.stats()["slab_leases"] <= 2


def test_a_view_of_a_reply_keeps_it() -> None:
    view = sync(helpers.full, COUNT, 3.0)[7:9]
    for value in range(20):
        sync(helpers.full, COUNT, float(value))
    assert view.tolist() == [3.0, 3.0]


def test_many_large_transfers_do_not_add_up() -> None:
    sent = torch.ones(COUNT)
    for _ in range(10):
        sync(helpers.echo, sent)
    before, there = helpers.stats(), sync(helpers.stats)
    for _ in range(300):
        sync(helpers.echo, sent)
    after, there_after = helpers.stats(), sync(helpers.stats)
    assert isinstance(there, dict)
    assert isinstance(there_after, dict)
    for stats, later in ((before, after), (there, there_after)):
        assert later["slab_bytes"] <= stats["slab_bytes"] + SLAB_BYTES * 1.1
        assert later["slabs_mapped"] <= stats["slabs_mapped"] + 1
        assert later["slab_leases"] <= stats["slab_leases"] + 2


def test_threads_share_the_pool() -> None:
    wrong: list[object] = []

    def work(number: int) -> None:
        for step in range(15):
            value = float(number * 100 + step)
            got = sync(helpers.echo, torch.full((COUNT,), value), to=f"worker{number % 3}")
            assert isinstance(got, torch.Tensor)
            if not (got == value).all():
                wrong.append((number, step, got[0]))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_workers_share_memory_with_each_other() -> None:
    for _ in range(3):
        got = sync(relay, "worker1", COUNT)
    assert got == COUNT
    shares = sync(helpers.stats)
    assert isinstance(shares, dict)
    assert shares["slab_peers"] == 2


def relay(to: str, count: int) -> float:
    got = rpc.rpc_sync(to, helpers.echo, args=(torch.ones(count),))
    return float(got.sum())


def test_an_error_returns_the_blocks() -> None:
    with pytest.raises(TypeError):
        sync(helpers.length, torch.ones(COUNT), torch.ones(COUNT))
    with pytest.raises(Exception, match="pickle"):
        sync(helpers.length, [torch.ones(COUNT), (one for one in [1])])
    sync(helpers.length, torch.ones(1))
    assert helpers.stats()["slab_leases"] <= 2
