"""Backwards that fail: what the caller is told, and that nothing is left behind."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import torch

from tensorplay.distributed import rpc
from tensorplay.errors import GraphLostError
from tests.autograd import modules
from tests.autograd.modules import numbers
from tests.autograd.waiting import until
from tests.autograd.ways import WAYS, Sync, Way

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("cluster")]

every_way = pytest.mark.parametrize("way", WAYS, ids=repr)


def freed(worker: str = "worker0") -> bool:
    return until(lambda: rpc.rpc_sync(worker, modules.live_graphs) == 0)


@every_way
def test_an_error_of_the_remote_backward(way: Way) -> None:
    module = way.module(modules.FailsInBackward)
    x = numbers(3, requires_grad=True)
    with pytest.raises(ArithmeticError, match="no gradient today") as caught:
        way.call(module, x).sum().backward()
    text = _formatted(caught.value)
    assert "in backward" in text
    assert "modules.py" in text
    assert "worker0" in text
    assert x.grad is None
    assert freed()


def test_an_error_two_calls_away() -> None:
    inner = rpc.remote("worker1", modules.make, (modules.FailsInBackward,))
    outer = rpc.remote("worker0", modules.make, (modules.Relay, (inner,)))
    with pytest.raises(ArithmeticError, match="no gradient today"):
        Sync().call(outer, numbers(5, 3, requires_grad=True)).sum().backward()
    assert freed("worker0")
    assert freed("worker1")


def test_after_an_error_the_graph_is_gone() -> None:
    module = rpc.remote("worker0", modules.make, (modules.FailsInBackward,))
    result = Sync().call(module, numbers(3))
    with pytest.raises(ArithmeticError):
        result.sum().backward()
    with pytest.raises(GraphLostError, match="worker0"):
        result.sum().backward()


def test_others_go_on_after_an_error() -> None:
    bad = rpc.remote("worker0", modules.make, (modules.FailsInBackward,))
    good = rpc.remote("worker0", modules.make, (modules.Net,))
    x = numbers(5, 3, requires_grad=True)
    result = Sync().call(good, x)
    with pytest.raises(ArithmeticError):
        Sync().call(bad, numbers(3)).sum().backward()
    result.sum().backward()
    assert x.grad is not None


def test_a_step_of_another_client_in_between() -> None:
    """Never a wrong gradient: torch notices, and the error says what has happened."""
    module = rpc.remote("worker0", modules.make, (modules.Net,))
    x = numbers(5, 3, requires_grad=True)
    mine = rpc.rpc_sync("worker0", modules.place, (module, x))
    rpc.rpc_sync("worker1", modules.train_elsewhere, (module, numbers(5, 3)))
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
        mine.sum().backward()
    assert "another client" in str(caught.value)
    assert x.grad is None
    assert freed()
    again = rpc.rpc_sync("worker0", modules.place, (module, x))
    again.sum().backward()
    assert x.grad is not None


def test_a_gradient_that_cannot_find_its_way() -> None:
    """A tensor was sent with a call of which nothing is left but what the worker has kept."""
    module = rpc.remote("worker0", modules.make, (modules.Remembering,))
    Sync().call(module, numbers(5, 3, requires_grad=True))
    result = Sync().call(module, numbers(5, 3))
    with pytest.raises(GraphLostError, match="have been dropped"):
        result.sum().backward()


def test_autograd_grad_through_a_value_that_was_kept() -> None:
    module = rpc.remote("worker0", modules.make, (modules.Remembering,))
    x, y = numbers(5, 3, requires_grad=True), numbers(5, 3, requires_grad=True)
    first = Sync().call(module, x)
    second = Sync().call(module, y)
    with pytest.raises(GraphLostError, match=r"autograd\.grad"):
        torch.autograd.grad(second.sum(), [y])
    del first


def test_a_hook_that_raises_on_the_worker() -> None:
    x = numbers(3, requires_grad=True)
    result: Any = rpc.rpc_sync("worker0", modules.with_a_failing_hook, (x,))
    with pytest.raises(LookupError, match="hooked"):
        result.sum().backward()
    assert freed()


def _formatted(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)) + "".join(getattr(error, "__notes__", ()))
