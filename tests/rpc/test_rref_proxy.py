"""Calls of methods through references, and the types of referenced objects."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tensorplay.cluster import LocalCluster
from tensorplay.distributed import rpc
from tensorplay.errors import RpcTimeoutError, RRefError
from tests.rpc import rref_helpers as helpers
from tests.rpc.rref_helpers import Tracked

pytestmark = pytest.mark.usefixtures("cluster")

W0, W1 = "worker0", "worker1"

Make = Callable[[], rpc.RRef[Tracked]]


@pytest.fixture(autouse=True)
def _nothing_stays_counted(
    cluster: LocalCluster, caplog: pytest.LogCaptureFixture
) -> Iterator[None]:
    # Records of failed calls would hold the frames in which they failed.
    caplog.set_level(logging.ERROR, "tensorplay.distributed.rpc.callee")
    yield
    helpers.check_nothing_is_left(cluster.workers)


def call(rref: rpc.RRef[Any], how: str, name: str, *args: Any, timeout: float = 30.0) -> Any:
    """Calls a method through one of the proxies and returns the result."""
    result = getattr(getattr(rref, how)(timeout=timeout), name)(*args)
    if how == "rpc_async":
        return result.wait()
    return result.to_here() if how == "remote" else result


@pytest.fixture(params=["rpc_sync", "rpc_async", "remote"])
def how(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["of a worker", "of this process"])
def make(request: pytest.FixtureRequest) -> Make:
    """Makes references, of which pytest then keeps none."""
    if request.param == "of a worker":
        return lambda: rpc.remote(W0, Tracked, (7,))
    return lambda: rpc.RRef(Tracked(7))


def test_methods_run_at_the_owner(make: Make, how: str) -> None:
    rref = make()
    assert call(rref, how, "get") == 7
    assert call(rref, how, "add", 3) == 10
    assert call(rref, how, "get") == 10
    assert call(rref, how, "static", 1) == 2
    assert call(rref, how, "of_class", 1) == "Tracked 1"
    assert call(rref, how, "where") == rref.owner_name()


def test_keyword_arguments_may_have_any_name() -> None:
    box: rpc.RRef[Any] = rpc.remote(W0, dict, (), {"a": 1})
    box.rpc_sync().update(rref=1, method=2, timeout=3, self=4, name=5)
    assert box.to_here() == {"a": 1, "rref": 1, "method": 2, "timeout": 3, "self": 4, "name": 5}


def test_a_proxy_can_be_used_again(make: Make) -> None:
    rref = make()
    proxy = rref.rpc_sync()
    assert [proxy.add(1), proxy.add(1), proxy.get()] == [8, 9, 9]


def test_methods_of_tensors(how: str) -> None:
    rref = rpc.remote(W0, torch.ones, ((2, 2),))
    assert call(rref, how, "size") == torch.Size([2, 2])
    assert torch.equal(call(rref, how, "add", 1), torch.full((2, 2), 2.0))
    assert torch.equal(call(rref, how, "view", 1, 4), torch.ones(1, 4))


def test_attributes_of_the_object_itself(how: str) -> None:
    """Submodules are no attributes of the class."""
    rref = rpc.remote(W0, torch.nn.ModuleDict, ({"linear": torch.nn.Linear(2, 3)},))
    assert call(rref, how, "linear", torch.ones(1, 2)).shape == (1, 3)


def test_references_among_the_arguments(how: str) -> None:
    box: rpc.RRef[Any] = rpc.remote(W0, list)
    item = rpc.remote(W1, Tracked, (5,))
    call(box, how, "append", item)
    assert box.to_here()[0].to_here().value == 5


def test_async_execution_works_through_proxies(how: str) -> None:
    rref = rpc.remote(W0, Tracked, (1,))
    assert call(rref, how, "later", W1, 4) == 8
    assert call(rref, how, "static_later", W1, 5) == 10


def test_a_third_process_uses_a_proxy() -> None:
    rref = rpc.remote(W0, Tracked, (1,))
    assert rpc.rpc_sync(W1, call, (rref, "rpc_sync", "where")) == W0


def test_an_exception_of_the_method(make: Make, how: str) -> None:
    rref = make()
    with pytest.raises(KeyError, match="missing"):
        call(rref, how, "fail")


def test_an_unknown_method_is_an_attribute_error(make: Make, how: str) -> None:
    rref = make()
    with pytest.raises(AttributeError, match="'Tracked' object has no attribute 'non_exist'"):
        call(rref, how, "non_exist")


def test_remote_of_an_unknown_method_fails_at_once() -> None:
    rref = rpc.remote(W0, Tracked)
    with pytest.raises(AttributeError, match="has no attribute 'non_exist'"):
        rref.remote().non_exist()


def test_the_error_of_the_creation_is_raised(how: str) -> None:
    rref = rpc.remote(W0, helpers.raise_with, (1,))
    with pytest.raises(ValueError, match="refused"):
        call(rref, how, "get")


@pytest.mark.parametrize("owner", [W0, "client"])
def test_the_time_out_is_honoured(how: str, owner: str) -> None:
    try:
        rref = rpc.remote(owner, Tracked, (1,))
        with pytest.raises(RpcTimeoutError, match="RPC ran for more than"):  # noqa: PT012
            result = getattr(rref, how)(timeout=0.2).slow()
            (result._get_future() if how == "remote" else result).wait()
        unmade = rpc.remote(owner, helpers.gated, (1,))
        with pytest.raises(RpcTimeoutError, match="RPC ran for more than"):
            call(unmade, how, "bit_length", timeout=0.2)
    finally:
        rpc.rpc_sync(owner, helpers.open_gate)


def test_a_proxy_cannot_be_copied_or_sent() -> None:
    proxy = rpc.RRef(1).rpc_sync()
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(RRefError, match="send the RRef"):
            attempt(proxy)
    assert "RRefProxy(OwnerRRef(" in repr(proxy)


# Types.


def test_the_type_of_the_object(make: Make) -> None:
    rref = make()
    assert rref._get_type() is Tracked
    future = rref._get_type(blocking=False)
    assert isinstance(future, torch.futures.Future)
    assert future.wait() is Tracked
    assert rref._get_type(blocking=False) is future, "the owner is asked once"


@pytest.mark.parametrize("blocking", [True, False])
def test_the_type_of_what_failed(blocking: bool) -> None:
    rref = rpc.remote(W0, helpers.raise_with, (1,))
    with pytest.raises(ValueError, match="refused"):  # noqa: PT012
        found: Any = rref._get_type(blocking=blocking)
        found.wait()


def test_the_type_is_waited_for_and_asked_again() -> None:
    rref = rpc.remote(W0, helpers.gated, (1,))
    with pytest.raises(RpcTimeoutError):
        rref._get_type(timeout=0.2)
    rpc.rpc_sync(W0, helpers.open_gate)
    assert rref._get_type() is int
