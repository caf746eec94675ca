"""Handles on the wire."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from tensorplay.distributed import rpc
from tensorplay.distributed.nn import RemoteModule, interface
from tensorplay.distributed.nn.api import remote_module
from tensorplay.distributed.nn.api.remote_module import (
    _REMOTE_MODULE_ATTRIBUTES_IGNORE_FOR_PICKLING,
    _REMOTE_MODULE_PICKLED_ATTRIBUTES,
    _RemoteModule,
    _SerializedRemoteModule,
)
from tests.nn import modules
from tests.nn.modules import Container, Holder, Scale

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("cluster")]

X = torch.arange(3.0)


class Sub(RemoteModule):
    """A subclass with a constructor of its own and a forward on top of the inherited one."""

    def __init__(self, worker: str) -> None:
        super().__init__(worker, Scale)

    def forward(self, *input: Any, **kwargs: Any) -> Any:
        return -super().forward(*input, **kwargs)


@interface
class ScaleInterface:
    def forward(self, x: torch.Tensor, times: float = 5.0) -> torch.Tensor:
        raise NotImplementedError


def same_module(a: RemoteModule, b: RemoteModule) -> bool:
    first, second = (
        rpc.rpc_sync(handle.module_rref.owner(), modules.identity, (handle.module_rref,))
        for handle in (a, b)
    )
    return first == second


def test_a_handle_works_on_a_third_worker_in_every_way() -> None:
    handle = RemoteModule("worker0", Scale)
    for result in rpc.rpc_sync("worker1", modules.call_all_ways, (handle, X)):
        assert torch.equal(result, 2 * X)


def test_a_handle_works_on_the_worker_that_owns_the_module() -> None:
    handle = RemoteModule("worker0", Scale)
    for result in rpc.rpc_sync("worker0", modules.call_all_ways, (handle, X)):
        assert torch.equal(result, 2 * X)


def test_what_the_third_worker_sees() -> None:
    handle = RemoteModule("rank:0/cpu", Scale)
    handle.eval()
    seen = rpc.rpc_sync("worker1", modules.inspect, (handle,))
    assert seen["repr"] == repr(handle) == "RemoteModule(worker0/cpu, Scale)"
    assert seen["training"] is False
    assert seen["hooks"] == ["hook"]


@pytest.mark.parametrize("wrap", [lambda h: [h], lambda h: {"handle": h}, Holder, lambda h: [[h]]])
def test_a_handle_in_a_container(wrap: Any) -> None:
    handle = RemoteModule("worker0", Scale)
    assert torch.equal(rpc.rpc_sync("worker1", modules.call_within, (wrap(handle), X)), 2 * X)
    assert torch.equal(
        modules.call_within(rpc.rpc_sync("worker1", modules.own_handle, (wrap(handle),)), X), 2 * X
    )


def test_a_handle_as_a_child_of_a_module_that_is_sent() -> None:
    container = Container(RemoteModule("worker0", nn.Linear, (3, 2)))
    with torch.no_grad():
        assert torch.allclose(rpc.rpc_sync("worker1", modules.call, (container, X)), container(X))


def test_a_remote_module_that_holds_handles_of_others() -> None:
    inner = RemoteModule("worker0", nn.Linear, (3, 2))
    outer = RemoteModule("worker1", Container, (inner,))
    assert outer(X).shape == (2,)
    assert outer.remote_state_dict().keys() == {
        "front.weight",
        "front.bias",
        "inner.weight",
        "inner.bias",
    }
    outer.eval()
    assert not rpc.rpc_sync("worker0", modules.is_training, (inner.module_rref,))
    # The way through to the inner module ends at a handle of that, not of a copy.
    found = outer.get_submodule("inner")
    assert isinstance(found, RemoteModule)
    assert same_module(found, inner)
    assert torch.equal(outer.get_parameter("inner.weight"), inner.get_parameter("weight"))
    outer.set_submodule("inner.extra", nn.Linear(1, 1))
    assert isinstance(inner.get_submodule("extra"), RemoteModule)


def test_gradients_flow_through_nested_remote_modules() -> None:
    inner = RemoteModule("worker0", Scale)
    outer = RemoteModule("worker1", Container, (inner,))
    x = torch.ones(1, 3, requires_grad=True)
    outer(x).sum().backward()
    weight = outer.get_parameter("front.weight")
    assert torch.allclose(x.grad, 2 * weight.sum(0, keepdim=True))  # type: ignore[arg-type]


# What travels.


def test_the_names_of_what_travels() -> None:
    assert list(_SerializedRemoteModule._fields) == list(_REMOTE_MODULE_PICKLED_ATTRIBUTES)
    handle = RemoteModule("worker0", Scale)
    known = {*_REMOTE_MODULE_PICKLED_ATTRIBUTES, *_REMOTE_MODULE_ATTRIBUTES_IGNORE_FOR_PICKLING}
    assert set(vars(handle)) <= known
    received = rpc.rpc_sync("worker1", modules.own_handle, (handle,))
    assert list(vars(received)) == [*_REMOTE_MODULE_PICKLED_ATTRIBUTES, "forward_async", "forward"]
    for name in ("on", "device", "is_device_map_set", "is_scriptable", "generated_methods"):
        assert getattr(received, name) == getattr(handle, name)
    assert same_module(received, handle)


def test_an_attribute_of_the_user_stays_and_is_warned_of_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote_module, "_warned_of", set())
    handle, other = RemoteModule("worker0", Scale), RemoteModule("worker0", Scale)
    handle.mine = other.mine = handle.yours = 1
    with pytest.warns(UserWarning, match="is not sent with it") as caught:
        received = rpc.rpc_sync("worker1", modules.own_handle, (handle,))
    assert not hasattr(received, "mine")
    assert handle.mine == 1
    assert sorted(str(w.message).split("'")[1] for w in caught) == ["mine", "yours"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rpc.rpc_sync("worker1", modules.own_handle, ([handle, other],))


def test_an_attribute_set_before_the_constructor_must_be_classified() -> None:
    class Early(RemoteModule):
        def __init__(self) -> None:
            self.mine = 1
            super().__init__("worker0", Scale)

    with pytest.raises(AttributeError, match="'mine' must be explicitly classified"):
        Early()


@pytest.mark.parametrize(
    "serialize",
    [
        pickle.dumps,
        copy.copy,
        copy.deepcopy,
        lambda handle: torch.save(handle, io.BytesIO()),
        lambda handle: torch.save(Container(handle), io.BytesIO()),
        lambda handle: copy.deepcopy(Container(handle)),
    ],
)
def test_only_the_rpc_pickler_serializes_a_handle(serialize: Any) -> None:
    text = "RemoteModule can only be serialized by the RPC pickler"
    with pytest.raises(RuntimeError, match=text):
        serialize(RemoteModule("worker0", Scale))
    with pytest.raises(RuntimeError, match="can only be restored by the RPC pickler"):
        RemoteModule("worker0", Scale).__setstate__({})


# Subclasses and interfaces.


def test_a_subclass_travels_as_itself() -> None:
    handle = Sub("worker0")
    assert torch.equal(handle(X), -2 * X)
    assert repr(handle) == "Sub(worker0/cpu, Scale)"
    seen = rpc.rpc_sync("worker1", modules.inspect, (handle,))
    assert seen["type"] == "Sub"
    assert torch.equal(rpc.rpc_sync("worker1", modules.call, (handle, X)), -2 * X)
    received = rpc.rpc_sync("worker1", modules.own_handle, (handle,))
    assert type(received) is Sub
    assert torch.equal(received(X), -2 * X)


def test_another_worker_can_be_told_to_make_a_handle() -> None:
    rref = Sub("worker0").module_rref
    for cls in (RemoteModule, Sub):
        made = rpc.rpc_sync("worker1", cls.init_from_module_rref, ("worker0", rref))
        assert type(made) is cls
        assert torch.equal(made(X).abs(), 2 * X)


def test_a_subclass_made_from_a_reference_is_itself() -> None:
    again = Sub.init_from_module_rref("worker0", Sub("worker0").module_rref)
    assert type(again) is Sub
    assert torch.equal(again(X), -2 * X)


def test_an_interface_goes_with_the_handle() -> None:
    handle = _RemoteModule("worker0", Scale, _module_interface_cls=ScaleInterface)
    assert handle.is_scriptable
    assert torch.equal(handle(X), 10 * X)
    assert torch.equal(rpc.rpc_sync("worker1", modules.call, (handle, X)), 10 * X)
    received = rpc.rpc_sync("worker1", modules.own_handle, (handle,))
    assert received.is_scriptable
    assert torch.equal(received.forward(X, times=1.0), 2 * X)
    with pytest.raises(TypeError, match="too many positional arguments"):
        received(X, 1.0, 2.0)
    again = RemoteModule.init_from_module_rref("worker0", handle.module_rref, ScaleInterface)
    assert torch.equal(again(X), 10 * X)


def test_a_bound_method_can_be_sent_and_outlives_its_handle() -> None:
    method = RemoteModule("worker0", Scale).forward
    assert torch.equal(method(X), 2 * X)
    assert torch.equal(rpc.rpc_sync("worker1", modules.call, (method, X)), 2 * X)
