"""Time-outs of handles: on every method, and longer for what is done for the first time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tensorplay.distributed import autograd, rpc
from tensorplay.distributed.nn import RemoteModule
from tensorplay.distributed.optim import DistributedOptimizer
from tensorplay.errors import RpcTimeoutError

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("cluster")]

W0 = "worker0"


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    before = rpc.get_rpc_timeout()
    yield
    rpc._set_rpc_timeout(before)


class Slow(nn.Module):
    """Takes its time to be made, and to be called."""

    def __init__(self, making: float = 0.0, calling: float = 0.0) -> None:
        super().__init__()
        time.sleep(making)
        self.calling = calling
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.calling)
        return x * self.weight


def test_to_be_made_and_called_first_may_take_longer() -> None:
    rpc._set_rpc_timeout(0.5)
    handle = RemoteModule(W0, Slow, (1.0, 1.0))
    assert handle(torch.ones(2)).tolist() == [1.0, 1.0]
    with pytest.raises(RpcTimeoutError, match="500 ms"):
        handle(torch.ones(2))
    with pytest.raises(RpcTimeoutError, match="500 ms"):
        handle.forward_async(torch.ones(2)).wait()


def test_longer_has_an_end() -> None:
    rpc._set_rpc_timeout(0.05)
    with pytest.raises(RpcTimeoutError, match="500 ms"):
        RemoteModule(W0, Slow, (2.0,))
    handle = RemoteModule(W0, Slow, (0.0, 2.0))
    for _ in range(2):  # one that has never been answered is still at its first call
        with pytest.raises(RpcTimeoutError, match="500 ms"):
            handle(torch.ones(2))


def test_no_limit_is_none_for_the_first_either() -> None:
    rpc._set_rpc_timeout(0.0)
    assert RemoteModule(W0, Slow, (0.2, 0.2))(torch.ones(2)).tolist() == [1.0, 1.0]


def test_every_method_ends_in_a_time_out() -> None:
    """A tiny time-out is a Python exception, wherever it strikes."""
    x = torch.ones(2, requires_grad=True)
    handle = RemoteModule(W0, Slow)
    handle(x)
    optimizer = DistributedOptimizer(torch.optim.SGD, handle.remote_parameters(), lr=0.1)
    state = handle.remote_state_dict()
    loss = handle(x).sum()
    rref = rpc.remote(W0, torch.ones, (2,))
    rref.to_here()

    def in_context() -> None:
        with autograd.context() as context:
            autograd.backward(context, [handle(x).sum()])

    uses: list[Callable[[], Any]] = [
        lambda: RemoteModule(W0, Slow),
        lambda: handle(x),
        lambda: handle.forward(x),
        lambda: handle.forward_async(x).wait(),
        lambda: handle.train(),
        lambda: handle.eval(),
        handle.remote_parameters,
        handle.remote_state_dict,
        lambda: handle.load_remote_state_dict(state),
        lambda: handle.get_parameter("weight"),
        lambda: handle.register_module("part", nn.Linear(1, 1)),
        lambda: RemoteModule.init_from_module_rref(W0, handle.get_module_rref()),
        rref.to_here,
        rref.rpc_sync().sum,
        in_context,
        optimizer.step,
        optimizer.zero_grad,
        loss.backward,
    ]
    for number, use in enumerate(uses):
        rpc._set_rpc_timeout(1e-6)
        error: BaseException | None = None
        try:
            use()
        except Exception as caught:
            error = caught
        finally:
            rpc._set_rpc_timeout(30.0)
        assert isinstance(error, TimeoutError), f"use {number} ended in {error!r}"
    assert handle(x).tolist() == [1.0, 1.0]  # all is well after that
