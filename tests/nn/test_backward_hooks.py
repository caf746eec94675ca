"""Backward hooks on a handle run at the caller, by the rules of nn.Module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tensorplay.distributed import rpc
from tensorplay.distributed.nn import RemoteModule
from tests.nn import modules
from tests.nn.modules import Scale

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.usefixtures("cluster"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning"),
]


def pair(factor: float = 3.0) -> tuple[nn.Module, nn.Module]:
    """A remote module, and the same one here."""
    return RemoteModule("worker0", Scale, (factor,)), Scale(factor)


def double_output(module: Any, grad_output: Any) -> Any:
    return (2 * grad_output[0],)


def add_one(module: Any, grad_input: Any, grad_output: Any) -> Any:
    return (grad_input[0] + 1,)


def record(module: nn.Module, x: torch.Tensor, *args: Any) -> list[Any]:
    """Registers both hooks, runs backward, and returns what they saw."""
    seen: list[Any] = []
    module.register_full_backward_hook(lambda m, i, o: seen.append(("hook", m is module, i, o)))
    module.register_full_backward_pre_hook(lambda m, o: seen.append(("pre", m is module, o)))
    module(x, *args).sum().backward()
    return seen


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("args", [(), (2.0,)])
def test_hooks_see_what_those_of_a_local_module_see(requires_grad: bool, args: Any) -> None:
    remote, local = pair()
    x = torch.ones(2)
    theirs = record(local, x.clone().requires_grad_(requires_grad), *args)
    ours = record(remote, x.clone().requires_grad_(requires_grad), *args)
    assert [event[0] for event in ours] == ["pre", "hook"]
    assert str(ours) == str(theirs)


def test_no_hook_runs_if_no_output_requires_grad() -> None:
    remote, _ = pair()
    seen: list[Any] = []
    remote.register_full_backward_hook(lambda *args: seen.append(args))
    x = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        result = remote(x)
    (x * result).sum().backward()
    assert seen == []


@pytest.mark.parametrize("which", [0, 1])
def test_hooks_can_replace_gradients(which: int) -> None:
    module = pair()[which]
    x = torch.ones(2, requires_grad=True)
    module.register_full_backward_pre_hook(double_output)
    module.register_full_backward_hook(add_one)
    module(x).sum().backward()
    assert torch.equal(x.grad, torch.full((2,), 7.0))  # type: ignore[arg-type]


def test_order_and_removal() -> None:
    remote, _ = pair()
    seen: list[str] = []
    first = remote.register_full_backward_hook(lambda *_: seen.append("first"))
    remote.register_full_backward_hook(lambda *_: seen.append("before"), prepend=True)
    remote(torch.ones(1)).sum().backward()
    first.remove()
    remote(torch.ones(1)).sum().backward()
    assert seen == ["before", "first", "before"]


def test_gradients_of_the_remote_parameters_are_those_of_a_local_module() -> None:
    remote, local = pair()
    for module in (remote, local):
        module.register_full_backward_pre_hook(double_output)
        module(torch.ones(2)).sum().backward()
    assert isinstance(remote, RemoteModule)
    (factor,) = remote.remote_parameters()
    ours = rpc.rpc_sync("worker0", modules.attribute, (factor, "grad"))
    assert torch.equal(ours, local.factor.grad)  # type: ignore[arg-type]
