"""The names of ``torch.distributed.rpc.internal``."""

from __future__ import annotations

import pickle

import pytest
import torch

from tensorplay.distributed.rpc import current, internal, pickler
from tensorplay.distributed.rpc.internal import (
    PythonUDF,
    RemoteException,
    RPCExecMode,
    _handle_exception,
    _internal_rpc_pickler,
    _run_function,
)
from tensorplay.distributed.rpc.options import WorkerInfo
from tensorplay.errors import SerializationError


def test_serialize_lists_the_tensors_and_deserialize_puts_them_in() -> None:
    tensors = (torch.ones(2), torch.zeros(3))
    data, table = internal.serialize(PythonUDF(torch.add, (*tensors, tensors[0]), {}))
    assert isinstance(data, bytes)
    assert [one is two for one, two in zip(table, tensors, strict=True)] == [True, True]
    other = [torch.rand(2), torch.rand(3)]
    udf = internal.deserialize(data, other)
    assert type(udf) is PythonUDF
    assert udf.func is torch.add
    assert udf.args[0] is udf.args[2] is other[0]
    assert udf.args[1] is other[1]


def test_buffers_are_in_the_bytes() -> None:
    numpy = pytest.importorskip("numpy")
    data, table = internal.serialize(numpy.arange(5))
    got = internal.deserialize(data, table)
    got[0] = 9
    assert got.tolist() == [9, 1, 2, 3, 4]


class Base:
    def __init__(self, number: int) -> None:
        self.number = number


class Derived(Base):
    pass


def test_a_reducer_holds_for_a_class_and_its_subclasses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickler, "_reducers", dict(pickler._reducers))
    monkeypatch.setattr(pickler, "_found", {})
    data, _ = internal.serialize(Derived(1))
    assert internal.deserialize(data, []).number == 1
    _internal_rpc_pickler._register_reducer(Base, lambda one: (type(one), (one.number + 100,)))
    data, _ = internal.serialize([Base(1), Derived(2)])
    base, derived = internal.deserialize(data, [])
    assert (type(base), base.number) == (Base, 101)
    assert (type(derived), derived.number) == (Derived, 102)
    _internal_rpc_pickler._register_reducer(Derived, lambda one: (type(one), (-1,)))
    data, _ = internal.serialize([Base(1), Derived(2)])
    assert [one.number for one in internal.deserialize(data, [])] == [101, -1]


def test_a_reducer_does_not_reach_other_pickles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickler, "_reducers", dict(pickler._reducers))
    monkeypatch.setattr(pickler, "_found", {})
    _internal_rpc_pickler._register_reducer(Base, lambda one: (Base, (0,)))
    assert pickle.loads(pickle.dumps(Base(5))).number == 5


def test_what_cannot_be_serialized_is_named() -> None:
    with pytest.raises(SerializationError, match=r"args\[1\]"):
        internal.serialize((print, (1, (n for n in range(2))), {}))


def test_modes_and_the_profiler_key() -> None:
    assert [mode.value for mode in RPCExecMode] == ["sync", "async", "async_jit", "remote"]
    key = internal._build_rpc_profiling_key(RPCExecMode.ASYNC, "foo", "worker0", "worker1")
    assert key == "rpc_async#foo(worker0 -> worker1)"


def test_a_record_for_the_profiler() -> None:
    with torch.autograd.profiler.profile() as profile:
        record = internal._start_record_function(RPCExecMode.SYNC, "foo", "a", "b")
        record.__exit__(None, None, None)
    assert "rpc_sync#foo(a -> b)" in [event.name for event in profile.function_events]


class FakeAgent:
    @staticmethod
    def get_worker_info() -> WorkerInfo:
        return WorkerInfo("worker1", 1)


class Picky(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def raises(error: Exception) -> None:
    raise error


def test_run_function_returns_results_and_describes_exceptions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(current, "agent", FakeAgent)
    assert _run_function(PythonUDF(max, (1, 2), {})) == 2
    failed = _run_function(PythonUDF(raises, (ValueError("no good"),), {}))
    assert isinstance(failed, RemoteException)
    assert failed.exception_type is ValueError
    assert failed.msg.startswith(f"On {FakeAgent.get_worker_info()}:\nValueError('no good')\n")
    assert "in raises" in failed.msg


def test_handle_exception_raises_what_was_described() -> None:
    _handle_exception("a result")
    with pytest.raises(ValueError, match="no good"):
        _handle_exception(RemoteException("no good", ValueError))
    with pytest.raises(RuntimeError, match="Original exception on remote side was 1 and 2"):
        _handle_exception(RemoteException("1 and 2", Picky))
