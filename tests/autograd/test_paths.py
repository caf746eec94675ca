"""Graphs that lead over several calls, workers and threads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tensorplay.distributed import rpc
from tensorplay.distributed.nn import RemoteModule
from tests.autograd import modules
from tests.autograd.modules import numbers
from tests.autograd.ways import LOCAL, WAYS, Handle, Sync, Way, assert_equal, assert_same_as_local

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("cluster")]

every_way = pytest.mark.parametrize("way", WAYS, ids=repr)


@every_way
def test_the_same_module_twice(way: Way) -> None:
    def program(way: Way) -> Any:
        module = way.module(torch.nn.Linear, 3, 3)
        x = numbers(5, 3, requires_grad=True)
        way.call(module, way.call(module, x).relu()).square().sum().backward()
        return x.grad, way.gradients(module)

    assert_same_as_local(program, way)


@every_way
def test_a_diamond_over_two_workers(way: Way) -> None:
    def program(way: Way) -> Any:
        left = way.module(torch.nn.Linear, 3, 3, on="worker0")
        right = way.module(torch.nn.Linear, 3, 3, on="worker1")
        x = numbers(5, 3, requires_grad=True)
        middle = x.tanh()
        (way.call(left, middle) * way.call(right, middle)).square().sum().backward()
        return x.grad, way.gradients(left), way.gradients(right)

    assert_same_as_local(program, way)


@every_way
def test_a_chain_over_three_workers(way: Way) -> None:
    def program(way: Way) -> Any:
        stages = [way.module(torch.nn.Linear, 3, 3, on=f"worker{n}") for n in range(3)]
        x = numbers(5, 3, requires_grad=True)
        y = x
        for stage in stages:
            y = way.call(stage, y).relu()
        y.square().sum().backward()
        return x.grad, [way.gradients(stage) for stage in stages]

    assert_same_as_local(program, way)


@every_way
def test_a_module_that_calls_modules_on_other_workers(way: Way) -> None:
    """worker0 calls worker1, which calls worker2; the client sees only the first."""

    def program(way: Way) -> Any:
        last = way.module(torch.nn.Linear, 3, 3, on="worker2")
        middle = way.module(modules.Relay, rref(last), on="worker1")
        first = way.module(modules.Relay, rref(middle), on="worker0")
        x = numbers(5, 3, requires_grad=True)
        way.call(first, x).square().sum().backward()
        return x.grad, [way.gradients(module) for module in (first, middle, last)]

    def rref(module: Any) -> Any:
        return module.get_module_rref() if isinstance(module, RemoteModule) else module

    assert_same_as_local(program, way)


@every_way
def test_gradients_of_gradients_over_several_workers(way: Way) -> None:
    def program(way: Way) -> Any:
        last = way.module(modules.Net, on="worker1")
        first = way.module(
            modules.Relay, last.get_module_rref() if isinstance(last, RemoteModule) else last
        )
        other = way.module(torch.nn.Linear, 3, 3, on="worker2")
        x = numbers(5, 3, requires_grad=True)
        y = way.call(first, way.call(other, x).tanh())
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (y.sum() + gradient.square().sum()).backward()
        return gradient, x.grad, [way.gradients(module) for module in (first, last, other)]

    assert_same_as_local(program, way)


def test_a_callee_that_calls_back_into_the_caller() -> None:
    x = numbers(5, 3, requires_grad=True)
    rpc.rpc_sync("worker0", modules.call_back, ("client", x)).square().sum().backward()
    other = numbers(5, 3, requires_grad=True)
    (other.cos() * 2 + other).square().sum().backward()
    torch.testing.assert_close(x.grad, other.grad)


def test_a_callee_that_calls_a_module_of_the_callers() -> None:
    net = modules.make(torch.nn.Linear, (3, 3))
    there = rpc.remote("worker0", modules.make, (modules.Relay, (rpc.RRef(net),)))
    x = numbers(5, 3, requires_grad=True)
    modules.call(there, x).square().sum().backward()

    twin = modules.make(torch.nn.Linear, (3, 3))
    relay = modules.make(modules.Relay, (twin,))
    y = numbers(5, 3, requires_grad=True)
    relay(y).square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    assert_equal([p.grad for p in net.parameters()], [p.grad for p in twin.parameters()])
    assert_equal(Sync().gradients(there), [p.grad for p in relay.parameters()])


def test_a_value_that_stays_on_a_worker() -> None:
    """The result of one call, kept behind an RRef, is the argument of the next."""
    net = rpc.remote("worker0", modules.make, (modules.Net,))
    x = numbers(5, 3, requires_grad=True)
    kept = rpc.remote("worker0", modules.scaled, (x,))
    y = rpc.rpc_sync("worker0", modules.call_with_kept, (net, kept))
    y.square().sum().backward()

    twin = modules.make(modules.Net)
    other = numbers(5, 3, requires_grad=True)
    twin(other * 2).square().sum().backward()
    torch.testing.assert_close(x.grad, other.grad)
    assert_equal(Sync().gradients(net), [p.grad for p in twin.parameters()])


def test_a_value_that_goes_from_worker_to_worker() -> None:
    """Neither the value nor its gradient passes through the client."""
    x = numbers(5, 3, requires_grad=True)
    kept = rpc.remote("worker0", modules.scaled, (x,))
    further = rpc.remote("worker1", modules.fetched, (kept,))
    further.to_here().square().sum().backward()

    other = numbers(5, 3, requires_grad=True)
    modules.scaled(modules.scaled(other)).square().sum().backward()
    torch.testing.assert_close(x.grad, other.grad)


@every_way
def test_threads_that_train_at_the_same_time(way: Way) -> None:
    """Each has its own loss; the gradients of the module are the sum."""
    threads, rounds = 4, 5
    start = threading.Barrier(threads)

    def program(way: Way) -> Any:
        module = way.module(modules.Net)

        def train(number: int) -> Any:
            if way is not LOCAL:
                start.wait(20)
            inputs = [
                numbers(5, 3, requires_grad=True, seed=number * rounds + n) for n in range(rounds)
            ]
            for x in inputs:
                way.call(module, x).square().sum().backward()
            return [x.grad for x in inputs]

        if way is LOCAL:
            grads = [train(number) for number in range(threads)]
        else:
            with ThreadPoolExecutor(threads) as pool:
                grads = list(pool.map(train, range(threads)))
        return grads, way.gradients(module)

    assert_same_as_local(program, way)


def test_a_backward_in_another_thread() -> None:
    way = Handle()
    module = way.module(modules.Net)
    x = numbers(5, 3, requires_grad=True)
    loss = way.call(module, x).square().sum()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(loss.backward).result()
    other = numbers(5, 3, requires_grad=True)
    twin = modules.make(modules.Net)
    twin(other).square().sum().backward()
    torch.testing.assert_close(x.grad, other.grad)
    assert_equal(way.gradients(module), [p.grad for p in twin.parameters()])


def test_many_calls_at_once() -> None:
    net = rpc.remote("worker0", modules.make, (modules.Net,))
    inputs = [numbers(5, 3, requires_grad=True, seed=n) for n in range(20)]
    futures = [rpc.rpc_async("worker0", modules.place, (net, x)) for x in inputs]
    sum(future.wait().square().sum() for future in futures).backward()

    twin = modules.make(modules.Net)
    others = [numbers(5, 3, requires_grad=True, seed=n) for n in range(20)]
    sum(twin(x).square().sum() for x in others).backward()
    assert_equal([x.grad for x in inputs], [x.grad for x in others])
    assert_equal(Sync().gradients(net), [p.grad for p in twin.parameters()])


def test_a_result_that_a_callback_takes_on() -> None:
    x = numbers(5, 3, requires_grad=True)
    future = rpc.rpc_async("worker0", modules.scaled, (x,)).then(lambda f: f.value().exp())
    future.wait().sum().backward()
    torch.testing.assert_close(x.grad, 2 * (2 * x.detach()).exp())
