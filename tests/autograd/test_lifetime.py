"""How long workers keep graphs, and that a forward is computed once."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from tensorplay.distributed import rpc
from tensorplay.errors import RpcTimeoutError
from tests.autograd import modules
from tests.autograd.modules import numbers
from tests.autograd.waiting import until
from tests.autograd.ways import WAYS, Sync, Way, assert_same_as_local
from tests.rpc import helpers

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("cluster")]

every_way = pytest.mark.parametrize("way", WAYS, ids=repr)


def graphs(worker: str = "worker0") -> int:
    count: int = rpc.rpc_sync(worker, modules.live_graphs)
    return count


def freed(worker: str = "worker0") -> bool:
    return until(lambda: graphs(worker) == 0)


@every_way
def test_a_graph_is_kept_until_its_backward(way: Way) -> None:
    module = way.module(modules.Net)
    loss = way.call(module, numbers(5, 3)).sum()
    assert graphs() == 1
    loss.backward(retain_graph=True)
    assert graphs() == 1
    loss.backward()
    assert graphs() == 0


@every_way
def test_a_graph_is_kept_until_its_results_are_dropped(way: Way) -> None:
    module = way.module(modules.Net)
    result = way.call(module, numbers(5, 3))
    loss = result.sum()
    assert graphs() == 1
    del result
    gc.collect()
    assert graphs() == 1
    del loss
    assert freed()


def test_a_graph_is_dropped_with_a_result_that_nobody_waits_for() -> None:
    x = numbers(3, requires_grad=True)
    futures = [rpc.rpc_async("worker0", modules.slow, (f"go {n}", x)) for n in range(3)]
    futures[0].cancel()
    late = rpc.rpc_async("worker0", modules.slow, ("go 1", x), timeout=0.05)
    with pytest.raises(RpcTimeoutError):
        late.wait()
    del futures[2:]
    for n in range(3):
        rpc.rpc_sync("worker0", helpers.set_event, (f"go {n}",))
    assert futures[1].wait().requires_grad
    del futures, late
    assert freed()


def test_a_result_that_cannot_be_sent_leaves_no_graph() -> None:
    with pytest.raises(TypeError):
        rpc.rpc_sync("worker0", _with_a_generator, (numbers(3, requires_grad=True),))
    assert freed()


def _with_a_generator(x: torch.Tensor) -> Any:
    return x * 2, (n for n in range(3))


def test_graphs_on_the_way_are_dropped_too() -> None:
    net = rpc.remote("worker1", modules.make, (modules.Net,))
    result = rpc.rpc_sync("worker0", modules.call, (net, numbers(5, 3, requires_grad=True)))
    assert (graphs("worker0"), graphs("worker1")) == (1, 1)
    del result
    assert freed("worker0")
    assert freed("worker1")


def test_memory_does_not_grow_with_results_that_are_dropped() -> None:
    module = rpc.remote("worker0", modules.make, (torch.nn.Linear, (64, 64)))
    x = numbers(256, 64, requires_grad=True)  # 128 KiB each for input and activation

    def forward(times: int) -> int:
        for _ in range(times):
            rpc.rpc_sync("worker0", modules.place, (module, x))
        assert freed()
        size: int = rpc.rpc_sync("worker0", modules.resident_bytes)
        return size

    before = forward(200)
    after = forward(2000)
    assert after - before < 48 << 20, "2000 graphs would have had 500 MiB"


@every_way
def test_the_forward_is_computed_once(way: Way) -> None:
    """Statistics change once, and the mask of the forward is that of the backward."""

    def program(way: Way) -> Any:
        module = way.module(modules.Noisy)
        y, _ = way.call(module, numbers(8, 3, requires_grad=True))
        y.square().sum().backward()
        return way.ask(module, modules.buffers)

    assert_same_as_local(program, way)
    module = way.module(modules.Noisy)
    x = numbers(8, 3, requires_grad=True)
    y, mask = way.call(module, x)
    other = numbers(8, 3, requires_grad=True)
    norm = modules.make(modules.Noisy).get_submodule("norm")
    (norm(other) * mask).square().sum().backward()
    y.square().sum().backward()
    torch.testing.assert_close(x.grad, other.grad)


@every_way
def test_a_hidden_state_leads_from_call_to_call(way: Way) -> None:
    def program(way: Way) -> Any:
        module = way.module(modules.Remembering)
        steps = [numbers(5, 3, requires_grad=True, seed=n) for n in range(4)]
        results = [way.call(module, x.sin()) for x in steps]
        sum(result.square().sum() for result in results).backward()
        return results, [x.grad for x in steps], way.gradients(module)

    assert_same_as_local(program, way)
    assert freed()


@every_way
def test_only_the_last_result_of_a_hidden_state_is_used(way: Way) -> None:
    def program(way: Way) -> Any:
        module = way.module(modules.Remembering)
        steps = [numbers(5, 3, requires_grad=True, seed=n) for n in range(4)]
        results = [way.call(module, x.sin()) for x in steps]
        results[-1].square().sum().backward()
        return results[-1], [x.grad for x in steps], way.gradients(module)

    assert_same_as_local(program, way)


def test_a_backward_on_the_worker_reaches_the_caller() -> None:
    x = numbers(5, 3, requires_grad=True)
    rpc.rpc_sync("worker0", modules.train_here, (x * 3,))
    torch.testing.assert_close(x.grad, 18 * x.detach())


def test_the_same_kept_value_is_fetched_twice() -> None:
    x = numbers(5, 3, requires_grad=True)
    kept = rpc.remote("worker0", torch.exp, (x,))
    (kept.to_here() * kept.to_here()).sum().backward()
    torch.testing.assert_close(x.grad, 2 * (2 * x.detach()).exp())
    assert Sync().ask(kept, modules.is_there)
