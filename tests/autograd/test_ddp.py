"""DistributedDataParallel around the local part of a model whose other part is remote."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel

from tensorplay.distributed import autograd, rpc
from tensorplay.distributed.rpc import RRef
from tests.autograd import modules
from tests.autograd.modules import numbers
from tests.autograd.ways import Sync, assert_equal

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("cluster")]

TRAINERS = 2


def inputs(rank: int) -> Tensor:
    return numbers(5, 3, seed=rank)


def train(rank: int, store: str, net: RRef[nn.Module], in_context: bool) -> list[Tensor | None]:
    """One step of a trainer; returns the gradients of its local part."""
    init_process_group("gloo", f"file://{store}", rank=rank, world_size=TRAINERS)
    front = DistributedDataParallel(modules.make(nn.Linear, (3, 3)))
    if not in_context:
        modules.call(net, front(inputs(rank))).square().sum().backward()
        return [parameter.grad for parameter in front.parameters()]
    with autograd.context() as context_id:
        loss = modules.call(net, front(inputs(rank))).square().sum()
        autograd.backward(context_id, [loss])
        found = autograd.get_gradients(context_id)
        assert all(parameter.grad is None for parameter in front.parameters())
        return [found[parameter] for parameter in front.parameters()]


@pytest.fixture
def _groups_end() -> Iterator[None]:
    """Ends the workers' process groups.

    In calls of their own: a group that ends while its threads still let go of tensors waits for
    them, and they for the interpreter's lock.
    """
    yield
    for rank in range(TRAINERS):
        rpc.rpc_sync(f"worker{rank}", destroy_process_group)


@pytest.mark.usefixtures("_groups_end")
@pytest.mark.parametrize("in_context", [False, True])
def test_gradients_are_averaged_over_the_trainers(tmp_path: Path, in_context: bool) -> None:
    net = rpc.remote("worker2", modules.make, (modules.Net,))
    store = str(tmp_path / "store")
    futures = [
        rpc.rpc_async(f"worker{rank}", train, (rank, store, net, in_context))
        for rank in range(TRAINERS)
    ]

    front, twin = modules.make(nn.Linear, (3, 3)), modules.make(modules.Net)
    losses = [twin(front(inputs(rank))).square().sum() for rank in range(TRAINERS)]
    averages = list(
        torch.autograd.grad(sum(losses) / TRAINERS, [*front.parameters()], retain_graph=True)
    )
    for future in futures:
        assert_equal(future.wait(), averages)
    if not in_context:
        sum(losses).backward()
        assert_equal(Sync().gradients(net), [parameter.grad for parameter in twin.parameters()])
