"""What a handle is as an nn.Module, called on the handle itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tensorplay.distributed import rpc
from tensorplay.distributed.nn import RemoteModule
from tests.nn.modules import Container, Scale

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("cluster")]

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "register_buffer": ("buffer", torch.ones(5)),
    "register_parameter": ("param", nn.Parameter(torch.ones(1))),
    "add_module": ("empty", None),
    "apply": (print,),
    "cuda": (),
    "ipu": (),
    "xpu": (),
    "cpu": (),
    "type": (torch.FloatTensor,),
    "float": (),
    "double": (),
    "half": (),
    "bfloat16": (),
    "to": ("cpu", torch.int32),
    "register_backward_hook": (print,),
    "register_forward_pre_hook": (print,),
    "register_forward_hook": (print,),
    "state_dict": (),
    "load_state_dict": ({},),
    "named_parameters": (),
    "buffers": (),
    "named_buffers": (),
    "children": (),
    "named_children": (),
    "modules": (),
    "named_modules": (),
    "requires_grad_": (),
    "zero_grad": (),
    "share_memory": (),
    "extra_repr": (),
}


@pytest.fixture
def handle() -> RemoteModule:
    return RemoteModule("worker0", Scale)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_an_unsupported_method_says_so_at_once(handle: RemoteModule, name: str) -> None:
    with pytest.raises(ValueError, match=f"Method '{name}' is not supported by RemoteModule"):
        getattr(handle, name)(*UNSUPPORTED[name])


def test_parameters_points_to_remote_parameters(handle: RemoteModule) -> None:
    with pytest.raises(ValueError, match=r"Use remote_parameters\(\) to access remote parameters"):
        handle.parameters()


def test_keywords_are_refused_in_the_same_way(handle: RemoteModule) -> None:
    with pytest.raises(ValueError, match="'state_dict' is not supported"):
        handle.state_dict(prefix="x.")
    with pytest.raises(ValueError, match="'named_modules' is not supported"):
        handle.named_modules(prefix="x.", remove_duplicate=False)
    with pytest.raises(ValueError, match="'register_forward_hook' is not supported"):
        handle.register_forward_hook(print, prepend=True, with_kwargs=True)


def test_repr_shows_class_owner_device_and_remote_class(handle: RemoteModule) -> None:
    assert repr(handle) == str(handle) == "RemoteModule(worker0/cpu, Scale)"
    assert repr(nn.Sequential(handle)) == (
        "Sequential(\n  (0): RemoteModule(worker0/cpu, Scale)\n)"
    )
    assert repr(object.__new__(RemoteModule)) == "RemoteModule(not created)"


@pytest.mark.parametrize(
    "value", [nn.Linear(1, 1), nn.Parameter(torch.ones(1)), nn.Buffer(torch.ones(1))]
)
def test_a_module_or_parameter_cannot_be_assigned(handle: RemoteModule, value: Any) -> None:
    with pytest.raises(ValueError, match="RemoteModule"):
        handle.x = value
    assert not hasattr(handle, "x")
    with pytest.raises(ValueError, match="RemoteModule"):
        handle.h = handle


def test_a_plain_attribute_can_be_set_and_deleted() -> None:
    for handle in (
        RemoteModule("worker0", Scale),
        RemoteModule.init_from_module_rref("worker0", RemoteModule("worker0", Scale).module_rref),
    ):
        handle.tag = "mine"
        assert handle.tag == "mine"
        del handle.tag
        assert not hasattr(handle, "tag")
        assert not hasattr(handle, "factor")


def test_forward_can_be_wrapped_as_profilers_do(handle: RemoteModule) -> None:
    inner, calls = handle.forward, []

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return inner(*args, **kwargs)

    handle.forward = wrapper  # type: ignore[method-assign]
    handle(torch.ones(1))
    assert len(calls) == 1


def test_handles_are_told_apart_by_identity(handle: RemoteModule) -> None:
    other = RemoteModule.init_from_module_rref("worker0", handle.module_rref)
    assert handle != other
    assert len({handle, other, handle}) == 2


def test_nothing_is_asked_of_the_worker_to_print_or_list(
    handle: RemoteModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc._get_current_rpc_agent(), "call", None)
    container = Container(handle)
    repr(container), list(container.parameters()), list(container.modules()), handle.training
