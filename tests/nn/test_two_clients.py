"""Two clients train one remote module: in turn, or the one that came too late is told so."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tensorplay.distributed import rpc
from tensorplay.distributed.nn import RemoteModule
from tensorplay.distributed.optim import DistributedOptimizer
from tests.autograd.modules import Net, numbers

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("cluster")]


def step(handle: nn.Module, x: torch.Tensor) -> None:
    """A whole step of training."""
    assert isinstance(handle, RemoteModule)
    optimizer = DistributedOptimizer(torch.optim.SGD, handle.remote_parameters(), lr=0.1)
    optimizer.zero_grad()
    handle(x).square().sum().backward()
    optimizer.step()


def local_twin(handle: RemoteModule) -> Net:
    twin = Net()
    twin.load_state_dict(handle.remote_state_dict())
    return twin


def gradients(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.grad for tensor in tensors if tensor.grad is not None]


def test_steps_in_turn_are_those_of_one_client() -> None:
    handle, x = RemoteModule("worker0", Net), numbers(5, 3).float()
    twin = local_twin(handle)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for client in ("worker1", None, "worker2"):
        if client is None:
            step(handle, x)
        else:
            rpc.rpc_sync(client, step, (handle, x))
        optimizer.zero_grad()
        twin(x).square().sum().backward()
        optimizer.step()
    for name, value in handle.remote_state_dict().items():
        torch.testing.assert_close(value, twin.state_dict()[name])


def test_a_step_of_another_between_forward_and_backward_is_told() -> None:
    handle, x = RemoteModule("worker0", Net), numbers(5, 3).float().requires_grad_()
    loss = handle(x).square().sum()
    rpc.rpc_sync("worker1", step, (handle, numbers(5, 3).float()))
    with pytest.raises(RuntimeError, match="another client"):
        loss.backward()
    assert not gradients(x)
    # A forward of the new parameters has right gradients.
    handle(x).square().sum().backward()
    inputs = x.detach().clone().requires_grad_()
    local_twin(handle)(inputs).square().sum().backward()
    torch.testing.assert_close(gradients(x), gradients(inputs))
