"""The parts of remote autograd, each by itself: no other process takes part."""

from __future__ import annotations

import gc
import threading
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from tensorplay.distributed.autograd import leases, leaves, nodes, passes, wire
from tensorplay.distributed.autograd.leases import Lease
from tensorplay.distributed.autograd.modes import Autocast, Modes, enabled_autocast
from tensorplay.distributed.autograd.nodes import edge_of, stand_in, wants_parameters
from tensorplay.distributed.autograd.passes import Pass
from tensorplay.distributed.autograd.threads import thread as this_thread

pytestmark = pytest.mark.timeout(60)


# Leases.


def lease(log: list[int], graph: int = 7) -> Lease:
    class Sent:
        peer: Any = None

    return Lease(Sent(), graph, lambda _, number: log.append(number))  # type: ignore[arg-type]


def test_a_lease_ends_with_the_memory_of_its_handle() -> None:
    log: list[int] = []
    handle = lease(log).handle()
    assert Lease.of(handle).graph == 7
    view = handle.view(1)
    del handle
    assert log == []
    assert Lease.of(view).graph == 7
    before = leases.live()
    del view
    assert log == [7]
    assert leases.live() == before - 1


def test_a_spent_lease_ends_quietly() -> None:
    log: list[int] = []
    handle = lease(log).handle()
    Lease.of(handle).spent = True
    del handle
    assert log == []


def test_a_lease_ends_in_the_garbage_collector_too() -> None:
    log: list[int] = []
    cycle: list[Any] = [lease(log).handle()]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert log == [7]


# Nodes.


def test_a_stand_in_needs_no_memory_and_passes_the_gradient_on() -> None:
    x = torch.randn(1000, 1000, requires_grad=True)
    h = x * 2
    other = stand_in(h)
    assert other.shape == x.shape
    assert other.untyped_storage().nbytes() == x.element_size()
    h.mul_(100)
    other.backward(torch.ones_like(x))
    torch.testing.assert_close(x.grad, torch.full_like(x, 2))


@pytest.mark.parametrize("layout", [torch.strided, torch.sparse_coo])
def test_an_edge_stays_where_it_was(layout: torch.layout) -> None:
    x = torch.eye(3)
    x = (x if layout is torch.strided else x.to_sparse()).requires_grad_()
    h = x * 2
    edge = edge_of(h)
    h.mul_(5)
    del h
    torch.autograd.backward([edge], [torch.ones(3, 3)])
    assert x.grad is not None
    torch.testing.assert_close(x.grad.to_dense(), 2 * (torch.ones(3, 3)))


class Wants(torch.autograd.Function):
    """Notes whether its backward is to give gradients to parameters."""

    seen: ClassVar[list[bool]] = []

    @staticmethod
    def forward(ctx: Any, parameters: Tensor, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        Wants.seen.append(wants_parameters())
        return None, gradient


def test_who_wants_the_gradients_of_parameters() -> None:
    x = torch.ones(2, requires_grad=True)

    def run() -> Tensor:
        result: Tensor = Wants.apply(nodes.PARAMETERS, x)
        return result.sum()

    run().backward()
    torch.autograd.grad(run(), [x])
    run().backward(inputs=[x])
    torch.autograd.grad(run(), [x, nodes.PARAMETERS], allow_unused=True)
    assert Wants.seen == [True, False, False, True]
    assert nodes.PARAMETERS.grad is None


# Passes.


def test_a_pass_is_found_by_the_nodes_in_it() -> None:
    assert passes.running() is None
    with Pass(accumulate=True) as outer:
        assert passes.running() is outer
        with Pass(accumulate=False) as inner:
            assert passes.running() is inner
        assert passes.running() is outer
    assert passes.running() is None


def test_a_pass_is_found_on_the_threads_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a thread knows nothing but the number of the engine's task."""
    monkeypatch.setattr(passes, "_has_device_threads", lambda: True)
    found: list[Pass | None] = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            before, this_thread.running = this_thread.running, None
            found.append(passes.running())
            this_thread.running = before
            return gradient

    x = torch.ones(2, requires_grad=True)
    edge = edge_of(Look.apply(x))
    run = Pass(accumulate=True)
    run.watch([edge])
    with run:
        torch.autograd.backward([edge], [torch.ones(2)], retain_graph=True)
    assert found == [run]
    torch.autograd.backward([edge], [torch.ones(2)])
    assert found == [run, None]
    assert not passes._by_task


def test_a_pass_adds_up_from_any_thread() -> None:
    run = Pass(accumulate=True)
    threads = [
        threading.Thread(target=run.capture, args=((1, 2), [torch.ones(2), None, None]))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    run.capture((1, 2), [None, torch.ones(1), None])
    taken = run.take((1, 2))
    assert taken is not None
    torch.testing.assert_close(taken[0], torch.full((2,), 8.0))
    torch.testing.assert_close(taken[1], torch.ones(1))
    assert taken[2] is None
    assert run.take((1, 2)) is None


def test_sparse_and_dense_gradients_add_up_in_either_order() -> None:
    dense, sparse = torch.ones(3, 3), torch.eye(3).to_sparse()
    for pair in ((dense, sparse), (sparse, dense)):
        torch.testing.assert_close(passes.total(*pair), torch.ones(3, 3) + torch.eye(3))
    assert passes.total(sparse, sparse).is_sparse


# Leaves.


def test_the_leaves_of_a_graph() -> None:
    a, b, c = (torch.ones(2, requires_grad=True) for _ in range(3))
    found = leaves.find_leaves([edge_of(a * b + a), edge_of(c)])
    assert {id(leaf) for leaf in found.tensors} == {id(a), id(b), id(c)}
    assert found.origins == []
    assert not found.watched


def test_hooks_on_the_accumulation_are_noticed() -> None:
    def watched(x: Tensor) -> bool:
        return leaves.find_leaves([edge_of(x * 2)]).watched

    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda gradient: gradient)  # runs wherever the gradient is asked for
    assert not watched(x)
    handle = x.register_post_accumulate_grad_hook(lambda _: None)
    assert watched(x)
    handle.remove()
    assert not watched(x)
    node = edge_of(x).node  # which is kept by whoever uses it
    handle = node.register_hook(lambda *_: None)
    assert watched(x)
    handle.remove()
    assert not watched(x)


def test_a_deep_graph_is_walked_without_recursion() -> None:
    x = torch.ones(2, requires_grad=True)
    y = x
    for _ in range(20_000):
        y = y + 1
    assert len(leaves.find_leaves([edge_of(y)]).tensors) == 1


def test_a_loan_of_grad() -> None:
    x = torch.ones(2, requires_grad=True)
    x.grad = torch.full((2,), 9.0)
    with leaves.lent([x], 1) as found:
        assert getattr(x, "grad") is None  # noqa: B009  # mypy thinks to know better
        (x * 3).sum().backward()
        with leaves.lent([x], 1) as again:  # the same context
            (x * 4).sum().backward()
        assert again == []
    ((leaf, gradient),) = found
    assert leaf is x
    torch.testing.assert_close(gradient, torch.full((2,), 7.0))
    torch.testing.assert_close(x.grad, torch.full((2,), 9.0))


def test_another_context_waits_for_a_loan() -> None:
    x = torch.ones(2, requires_grad=True)
    order: list[str] = []
    lent = threading.Event()

    def borrow() -> None:
        lent.wait(20)
        with leaves.lent([x], 2):
            order.append("second")

    thread = threading.Thread(target=borrow)
    thread.start()
    with leaves.lent([x], 1):
        lent.set()
        thread.join(0.1)
        order.append("first")
    thread.join(20)
    assert order == ["first", "second"]


# Modes and messages.


def test_modes_are_taken_over_and_given_back() -> None:
    with torch.autocast("cpu", torch.float16):
        captured = enabled_autocast()
    assert captured == [Autocast("cpu", "float16")]
    assert enabled_autocast() == []
    with Modes(False, True, captured):
        assert torch.is_inference_mode_enabled()
        assert not torch.is_grad_enabled()
        assert torch.get_autocast_dtype("cpu") is torch.float16
        assert nn.Linear(2, 2)(torch.ones(2)).dtype is torch.float16
    assert not torch.is_inference_mode_enabled()
    assert torch.is_grad_enabled()
    assert enabled_autocast() == []
    assert torch.get_autocast_dtype("cpu") is torch.bfloat16


def test_what_travels() -> None:
    assert wire.decode_meta(wire.GRAD_MODE) == wire.Meta()
    assert wire.decode_meta(wire.NO_GRAD_MODE) == wire.Meta(grad=False)
    meta = wire.Meta(True, False, [Autocast("cpu", "bfloat16")], 5, [0, 2], True, 1 << 60, 3)
    assert wire.decode_meta(wire.encode(meta)) == meta
    recorded = wire.Recorded(3, [1])
    assert wire.decode_recorded(wire.encode(recorded)) == recorded
    assert wire.encode(recorded) != wire.PLAIN_RESULT
