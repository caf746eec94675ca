"""The caller's grad mode, inference mode and autocast hold on the worker, for the call only."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tensorplay.distributed import rpc
from tests.autograd import modules
from tests.autograd.modules import numbers
from tests.autograd.ways import WAYS, Sync, Way, assert_same_as_local

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("cluster")]

every_way = pytest.mark.parametrize("way", WAYS, ids=repr)

DEFAULT = (True, False, False, False)


@every_way
@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_grad_modes(way: Way, mode: Any, requires_grad: bool) -> None:
    def program(way: Way) -> Any:
        module = way.module(modules.Modes)
        x = numbers(5, 3, requires_grad=requires_grad)
        with mode():
            y, told = way.call(module, x)
        return y.detach(), y.requires_grad, y.is_inference(), told

    assert_same_as_local(program, way)
    assert rpc.rpc_sync("worker0", modules.modes) == DEFAULT


@every_way
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(way: Way, dtype: torch.dtype) -> None:
    def program(way: Way) -> Any:
        module = way.module(modules.Modes)
        x = numbers(5, 3).float().requires_grad_()
        with torch.autocast("cpu", dtype):
            y, told = way.call(module, x)
        (y.float() ** 2).sum().backward()
        return y.detach(), told, x.grad, way.gradients(module)

    assert_same_as_local(program, way)
    assert rpc.rpc_sync("worker0", modules.modes) == DEFAULT


@every_way
def test_autocast_that_is_off_inside(way: Way) -> None:
    def program(way: Way) -> Any:
        module = way.module(modules.Modes)
        with torch.autocast("cpu"), torch.autocast("cpu", enabled=False):
            return way.call(module, numbers(5, 3))[1]

    assert_same_as_local(program, way)


def test_autocast_for_a_device_that_the_worker_lacks() -> None:
    """The type of device is the caller's; what it means there is the worker's business."""
    before = torch.is_autocast_enabled("cuda")
    torch.set_autocast_enabled("cuda", True)
    try:
        told = rpc.rpc_sync("worker0", modules.modes)
    finally:
        torch.set_autocast_enabled("cuda", before)
    assert told == (True, False, False, True)
    assert rpc.rpc_sync("worker0", modules.modes) == DEFAULT


def test_modes_hold_in_calls_that_the_callee_makes() -> None:
    with torch.no_grad(), torch.autocast("cpu"):
        told = rpc.rpc_sync("worker0", rpc.rpc_sync, ("worker1", modules.modes))
    assert told == (False, False, True, False)


def test_modes_end_with_a_call_that_raises() -> None:
    with torch.inference_mode(), torch.autocast("cpu"), pytest.raises(ZeroDivisionError):
        rpc.rpc_sync("worker0", divmod, (1, 0))
    assert rpc.rpc_sync("worker0", modules.modes) == DEFAULT


def test_no_grad_keeps_no_graph_on_the_worker() -> None:
    module = rpc.remote("worker0", modules.make, (modules.Net,))
    x = numbers(5, 3, requires_grad=True)
    with torch.no_grad():
        y = rpc.rpc_sync("worker0", modules.place, (module, x))
    assert not y.requires_grad
    assert y.grad_fn is None
    assert rpc.rpc_sync("worker0", modules.live_graphs) == 0


def test_no_grad_holds_for_a_result_that_requires_grad_there() -> None:
    module = rpc.remote("worker0", modules.make, (modules.Net,))
    with torch.no_grad():
        weight = module.rpc_sync().get_parameter("first.weight")
    assert not weight.requires_grad


def test_the_mode_at_the_time_of_the_call_counts() -> None:
    x = numbers(5, 3, requires_grad=True)
    with torch.no_grad():
        without = rpc.rpc_async("worker0", modules.scaled, (x,))
    future = rpc.rpc_async("worker0", modules.scaled, (x,))
    with torch.no_grad():
        got = future.wait()
    assert got.requires_grad
    assert not without.wait().requires_grad
    with torch.inference_mode():
        got = rpc.rpc_async("worker0", modules.scaled, (numbers(3),)).wait()
        assert got.is_inference()
    got = Sync().call(rpc.remote("worker0", modules.make, (modules.Net,)), x)
    got.sum().backward()
    assert x.grad is not None
