"""What a reducer makes of objects, and objects of odd structure."""

from __future__ import annotations

import functools
import gc
import pickle
import random
import types
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tensorplay.distributed.rpc import pickler
from tensorplay.distributed.rpc.internal import _internal_rpc_pickler
from tensorplay.errors import ProtocolError, SerializationError
from tests.rpc.travel import travel

# ---------------------------------------------------------------------------------------- reducers


class Handle:
    """Cannot be pickled by itself."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        raise TypeError("a handle needs the RPC pickler")


class SpecialHandle(Handle):
    pass


class HandleModule(torch.nn.Module):
    pass


@pytest.fixture
def _handles() -> Iterator[None]:
    reducers, found = dict(pickler._reducers), dict(pickler._found)
    _internal_rpc_pickler._register_reducer(Handle, lambda one: (type(one), (one.number + 1,)))
    yield
    pickler._reducers.clear()
    pickler._reducers.update(reducers)
    pickler._found.clear()
    pickler._found.update(found)


@pytest.mark.usefixtures("_handles")
def test_a_registered_reducer_holds_for_the_class_and_its_subclasses() -> None:
    assert travel(Handle(1)).number == 2
    got = travel([SpecialHandle(1)])[0]
    assert type(got) is SpecialHandle
    assert got.number == 2


@pytest.mark.usefixtures("_handles")
def test_the_reducer_of_the_nearest_class_counts() -> None:
    pickler.register_reducer(SpecialHandle, lambda one: (Handle, (100,)))
    assert travel(SpecialHandle(1)).number == 100
    assert travel(Handle(1)).number == 2


@pytest.mark.usefixtures("_handles")
def test_a_reducer_registered_after_the_class_was_met_counts() -> None:
    pickler._reducers.pop(Handle)
    pickler._found.clear()
    with pytest.raises(SerializationError):
        travel(Handle(1))
    pickler.register_reducer(Handle, lambda one: (Handle, (7,)))
    assert travel(Handle(1)).number == 7


@pytest.mark.usefixtures("_handles")
def test_reducers_are_found_wherever_the_object_is() -> None:
    handle = Handle(1)
    layer: Any = torch.nn.Linear(1, 1)
    layer.handle = handle

    def closure() -> int:
        return handle.number

    got = travel({"a": [handle], "b": closure, "c": layer, "d": functools.partial(id, handle)})
    assert got["a"][0].number == got["b"]() == got["c"].handle.number == 2
    assert got["d"].args[0] is got["a"][0] is got["c"].handle


@pytest.mark.usefixtures("_handles")
def test_a_reducer_for_tensors_of_a_subclass() -> None:
    class Remote(torch.Tensor):
        pass

    pickler.register_reducer(Remote, lambda one: (torch.full, ((2,), 5)))
    assert travel(torch.ones(3).as_subclass(Remote)).tolist() == [5, 5]


@pytest.mark.usefixtures("_handles")
def test_a_reducer_that_fails_is_named_with_the_path() -> None:
    def refuse(one: Handle) -> Any:
        raise RuntimeError("this handle is closed")

    pickler.register_reducer(Handle, refuse)
    with pytest.raises(SerializationError, match=r"args\[0\].*this handle is closed"):
        travel((len, (Handle(1),), {}))


def test_exporters_and_importers_are_those_of_the_call() -> None:
    class Seen:
        def __reduce__(self) -> Any:
            return _told, (str(pickler.current_exporter()),)

    pickled = pickler.dumps(Seen(), exporter="out")
    assert pickler.current_exporter() is None
    assert pickler.loads(pickled.head, [], importer="in") == ("out", "in")
    assert pickler.current_importer() is None


def test_exporters_of_nested_picklings() -> None:
    class Outer:
        def __reduce__(self) -> Any:
            pickler.dumps(1, exporter="inner")
            return str, (str(pickler.current_exporter()),)

    assert pickler.loads(pickler.dumps(Outer(), exporter="outer").head, []) == "outer"


def _told(exporter: str) -> tuple[str, Any]:
    return exporter, pickler.current_importer()


# ---------------------------------------------------------------------------------- odd structures


def test_cycles() -> None:
    sent: list[Any] = [1]
    sent.append({"self": sent})
    got = travel(sent)
    assert got[1]["self"] is got
    node = types.SimpleNamespace(name="a")
    node.me = node
    got = travel(node)
    assert got.me is got


def test_identity_is_kept() -> None:
    shared = [1]
    first, second = travel((shared, shared))
    assert first is second


@pytest.mark.parametrize("kind", ["list", "dict", "closure"])
def test_very_deep_nesting_is_a_clear_error(kind: str) -> None:
    deep: Any = None
    for _ in range(50_000):
        if kind == "list":
            deep = [deep]
        elif kind == "dict":
            deep = {"next": deep}
        else:
            deep = functools.partial(print, deep)
    with pytest.raises(SerializationError, match="recursion"):
        travel(deep)


def test_deep_nesting_within_the_limit_travels() -> None:
    deep: Any = None
    for _ in range(200):
        deep = [deep]
    assert travel(deep)


def test_tensors_from_another_pickle_cannot_be_read_elsewhere() -> None:
    pickled = pickler.dumps([torch.ones(1)])
    with pytest.raises(SerializationError, match="RPC"):
        pickle.loads(pickled.head)


def test_the_state_of_random_generators_travels() -> None:
    mine = random.Random(3)
    assert travel(mine).random() == mine.random()
    generator = torch.Generator().manual_seed(5)
    try:
        got = travel(generator)
    except SerializationError as error:
        assert "Generator" in str(error)  # noqa: PT017
    else:
        assert torch.rand(1, generator=got) == torch.rand(1, generator=generator)


@pytest.mark.parametrize("head", [b"", b"\x80\x05", b"nonsense", b"\x80\x05K\x01"])
def test_a_stream_that_is_none(head: bytes) -> None:
    with pytest.raises(ProtocolError, match="pickle"):
        pickler.loads(head, [])


def test_what_goes_out_of_band_is_optional() -> None:
    sent = pickle.PickleBuffer(bytearray(b"abc" * 100))
    pickled = pickler.dumps(sent, out_of_band=False)
    assert not pickled.buffers
    assert bytes(pickler.loads(pickled.head, [])) == b"abc" * 100


def test_copies_are_the_parameters_of_modules() -> None:
    layer: Any = torch.nn.Linear(1, 1)
    weight = torch.ones(1)
    pickled = pickler.dumps([weight, layer])
    assert sorted(pickled.copies) == [1, 2]
    assert not pickler.dumps([layer.weight]).copies


def test_unpickling_keeps_no_tensor_in_a_cycle() -> None:
    """Else a graph at a worker would live until the garbage collector runs at the caller."""
    gc.disable()
    try:
        there = weakref.ref(travel([torch.ones(3)])[0])
        assert there() is None
    finally:
        gc.enable()
