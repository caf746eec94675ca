"""Looking into a remote module, and changing what it consists of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tensorplay.distributed import rpc
from tensorplay.distributed.nn import RemoteModule
from tests.nn import modules
from tests.nn.modules import Net, Scale, Stateful

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("cluster")]


@pytest.fixture
def handle() -> RemoteModule:
    return RemoteModule("worker0", Net)


def test_get_parameter_is_a_parameter_without_history(handle: RemoteModule) -> None:
    parameter: Any = handle.get_parameter("block.1.weight")
    assert isinstance(parameter, nn.Parameter)
    assert parameter.shape == (2, 4)
    assert parameter.requires_grad
    assert parameter.is_leaf
    assert torch.equal(parameter, handle.remote_state_dict()["block.1.weight"])


def test_get_buffer(handle: RemoteModule) -> None:
    assert torch.equal(handle.get_buffer("norm.running_var"), torch.ones(4))


@pytest.mark.parametrize(
    ("method", "target", "text"),
    [
        ("get_parameter", "block.9.weight", "has no attribute `9`"),
        ("get_parameter", "nothing", "has no attribute `nothing`"),
        ("get_parameter", "norm.running_var", "is not an nn.Parameter"),
        ("get_parameter", "norm", "is not an nn.Parameter"),
        ("get_parameter", "norm.eps.x", "`eps` is not an nn.Module"),
        ("get_buffer", "norm.weight", "is not a buffer"),
        ("get_buffer", "norm.nothing", "has no attribute `nothing`"),
        ("get_submodule", "nothing", "has no attribute `nothing`"),
        ("get_submodule", "norm.weight", "is not an nn.Module"),
        ("get_submodule", "block.1.x", "has no attribute `x`"),
    ],
)
def test_a_name_that_is_not_there(
    handle: RemoteModule, method: str, target: str, text: str
) -> None:
    with pytest.raises(AttributeError, match=text):
        getattr(handle, method)(target)


def test_get_submodule_is_a_handle_of_the_part(handle: RemoteModule) -> None:
    handle.eval()
    block: Any = handle.get_submodule("block")
    assert isinstance(block, RemoteModule)
    assert repr(block) == "RemoteModule(worker0/cpu, Sequential)"
    assert not block.training
    x = torch.ones(1, 4)
    assert torch.equal(block(x), block.get_submodule("1")(x.relu()))
    block.load_remote_state_dict({"1.weight": torch.zeros(2, 4), "1.bias": torch.ones(2)})
    assert torch.equal(handle(torch.ones(1, 3)), torch.ones(1, 2))
    assert handle.get_submodule("") is handle


def test_set_submodule_replaces_and_adds(handle: RemoteModule) -> None:
    handle.eval()
    handle.set_submodule("block.1", nn.Linear(4, 5))
    assert handle(torch.ones(1, 3)).shape == (1, 5)
    handle.set_submodule("block.2", nn.Linear(5, 1), strict=False)
    assert handle(torch.ones(1, 3)).shape == (1, 1)
    assert handle.get_parameter("block.2.weight").requires_grad
    assert len(handle.remote_parameters()) == 8


def test_set_submodule_trains_what_it_was_given(handle: RemoteModule) -> None:
    handle.set_submodule("block.1", Scale(3.0))
    handle(torch.ones(4, 3)).sum().backward()
    (factor,) = handle.get_submodule("block.1").remote_parameters()  # type: ignore[operator]
    assert rpc.rpc_sync("worker0", has_gradient, (factor,))


def has_gradient(rref: Any) -> bool:
    return rref.local_value().grad is not None


def test_set_submodule_takes_a_handle(handle: RemoteModule) -> None:
    other = RemoteModule("worker1", nn.Linear, (4, 6))
    handle.set_submodule("block.1", other)
    assert handle(torch.ones(2, 3)).shape == (2, 6)


def test_set_submodule_refuses_as_documented(handle: RemoteModule) -> None:
    linear = nn.Linear(1, 1)
    with pytest.raises(ValueError, match="empty"):
        handle.set_submodule("", linear)
    with pytest.raises(ValueError, match=r"needs an nn.Module, got <class 'int'>"):
        handle.set_submodule("block.1", 3)  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match="has no attribute `nothing`"):
        handle.set_submodule("nothing.1", linear)
    with pytest.raises(AttributeError, match="has no attribute `conv`"):
        handle.set_submodule("block.conv", linear, strict=True)
    with pytest.raises(AttributeError, match=r"`weight` is not an nn.Module"):
        handle.set_submodule("norm.weight", linear)


def test_register_module_adds_a_child(handle: RemoteModule) -> None:
    handle.register_module("head", nn.Linear(2, 1))
    assert handle.get_parameter("head.weight").shape == (1, 2)
    handle.register_module("empty", None)
    with pytest.raises(KeyError, match="already exists"):
        handle.register_module("forward", nn.Linear(1, 1))
    with pytest.raises(KeyError, match="contain"):
        handle.register_module("a.b", nn.Linear(1, 1))
    with pytest.raises(TypeError, match="not a Module subclass"):
        handle.register_module("x", 3)  # type: ignore[arg-type]


def test_extra_state() -> None:
    handle = RemoteModule("worker0", Stateful)
    assert handle.get_extra_state() == "initial"
    handle.set_extra_state({"x": torch.ones(1)})
    assert handle.get_extra_state() == {"x": torch.ones(1)}
    with pytest.raises(RuntimeError):
        RemoteModule("worker0", Net).get_extra_state()


def test_to_empty_moves_the_remote_module() -> None:
    handle = RemoteModule("worker0/meta", nn.Linear, (3, 2))
    assert handle(torch.ones(3)).device.type == "meta"
    assert handle.to_empty(device="cpu") is handle
    assert handle.device == "cpu"
    assert "worker0/cpu" in repr(handle)
    state = {"weight": torch.ones(2, 3), "bias": torch.zeros(2)}
    handle.load_remote_state_dict(state)
    assert torch.equal(handle(torch.ones(3)), torch.full((2,), 3.0))
    with pytest.raises(TypeError):
        handle.to_empty()  # type: ignore[call-arg]


def test_to_empty_without_recursion_leaves_the_parts_alone(handle: RemoteModule) -> None:
    handle.to_empty(device="meta", recurse=False)
    assert handle.device == "cpu"
    assert handle.get_parameter("first.weight").device.type == "cpu"
    assert rpc.rpc_sync("worker0", modules.is_training, (handle.module_rref,))
