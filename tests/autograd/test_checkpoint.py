"""Activation checkpointing around remote calls."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tensorplay.distributed import rpc
from tests.autograd import modules
from tests.autograd.modules import numbers
from tests.autograd.waiting import until
from tests.autograd.ways import WAYS, Sync, Way, assert_same_as_local

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("cluster")]

every_way = pytest.mark.parametrize("way", WAYS, ids=repr)
both_kinds = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "other"])


def _keeps_nothing(worker: str) -> bool:
    kept: int = rpc.rpc_sync(worker, modules.live_graphs)
    return kept == 0


@every_way
@both_kinds
@pytest.mark.parametrize("around", ["call", "more"])
def test_gradients(way: Way, reentrant: bool, around: str) -> None:
    def program(way: Way) -> Any:
        module = way.module(modules.Net)
        x = numbers(5, 3, requires_grad=True)

        def part(x: Tensor) -> Any:
            if around == "call":
                return way.call(module, x)
            return way.call(module, x.sin() * x).exp() * 2

        checkpoint(part, x, use_reentrant=reentrant).square().sum().backward()
        return x.grad, way.gradients(module)

    assert_same_as_local(program, way)


@both_kinds
def test_the_worker_keeps_no_graph_in_between(reentrant: bool) -> None:
    """That is the purpose: the graph is made again when it is wanted."""
    module = rpc.remote("worker0", modules.make, (modules.Noisy,))
    x = numbers(5, 3, requires_grad=True)

    def part(x: Tensor) -> Tensor:
        noisy: Tensor = Sync().call(module, x)[0]
        return noisy * x

    y = checkpoint(part, x, use_reentrant=reentrant)
    assert until(lambda: rpc.rpc_sync("worker0", modules.live_graphs) == 0)
    y.sum().backward()
    assert until(lambda: rpc.rpc_sync("worker0", modules.live_graphs) == 0)
    calls = Sync().ask(module, modules.buffers)[-1]
    assert int(calls) == 2


def test_a_checkpoint_on_the_worker() -> None:
    module = rpc.remote("worker0", modules.make, (modules.Checkpointed,))
    x = numbers(5, 3, requires_grad=True)
    Sync().call(module, x).square().sum().backward()
    twin = modules.make(modules.Checkpointed)
    y = numbers(5, 3, requires_grad=True)
    twin(y).square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    torch.testing.assert_close(Sync().gradients(module), [p.grad for p in twin.parameters()])


def test_a_checkpoint_on_a_worker_around_a_call_to_another() -> None:
    net = rpc.remote("worker1", modules.make, (modules.Net,))
    x = numbers(5, 3, requires_grad=True)
    rpc.rpc_sync("worker0", modules.call_in_checkpoint, (net, x)).square().sum().backward()
    twin = modules.make(modules.Net)
    y = numbers(5, 3, requires_grad=True)
    twin(y.sin()).square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    torch.testing.assert_close(Sync().gradients(net), [p.grad for p in twin.parameters()])
    for worker in ("worker0", "worker1"):
        assert until(partial(_keeps_nothing, worker))


def test_saved_tensors_hooks_at_the_caller() -> None:
    """A call saves something for its backward, as any node does; hooks may see it."""
    x = numbers(5, 3, requires_grad=True)
    with torch.autograd.graph.save_on_cpu():
        y = rpc.rpc_sync("worker0", modules.scaled, (x,))
    y.sum().backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, 2))
    packed: list[Tensor] = []
    future = rpc.rpc_async("worker0", modules.scaled, (x,))  # made outside of the hooks

    def pack(saved: Tensor) -> Tensor:
        packed.append(saved)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        future.wait()
    assert packed == []
