"""Exceptions on another process: their type, text, traceback and origin at the caller."""

from __future__ import annotations

import asyncio
import builtins
import dataclasses
import gc
import json
import os
import pickle
import subprocess
import sys
import threading
import traceback
import types
import weakref
from typing import Any

import pytest
import torch

from tensorplay import errors
from tensorplay.distributed.rpc import remote_exception
from tensorplay.errors import ProtocolError, RemoteError

NOTES = pytest.mark.skipif(sys.version_info < (3, 11), reason="notes came with 3.11")


def caught(error: BaseException, worker: str = "worker0") -> remote_exception.Failure:
    """Returns the description of an exception that has been raised in a function."""

    def function_on_the_worker() -> None:
        raise error

    try:
        function_on_the_worker()
    except BaseException as raised:
        return remote_exception.describe(raised, worker, 3)
    raise AssertionError


def over(error: BaseException, worker: str = "worker0") -> BaseException:
    """Returns an exception as it is at the caller."""
    frame = remote_exception.encode(caught(error, worker))
    return remote_exception.rebuild(remote_exception.decode(frame))


def printed(error: BaseException) -> str:
    return "".join(traceback.format_exception(type(error), error, error.__traceback__))


class TwoArguments(Exception):
    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{code}: {reason}")
        self.code, self.reason = code, reason


class KeywordOnly(ValueError):
    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


class Prefixes(Exception):
    """Its constructor takes what its pickle has, but makes another text of it."""

    def __init__(self, what: str) -> None:
        super().__init__(f"failed: {what}")


class NoText(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class NoRepresentation(Exception):
    def __repr__(self) -> str:
        raise RuntimeError("no representation")

    __str__ = __repr__


class WithState(Exception):
    def __reduce__(self) -> Any:
        return _make_with_state, (self.args, 5)


def _make_with_state(args: Any, number: int) -> WithState:
    made = WithState(*args)
    made.number = number  # type: ignore[attr-defined]
    return made


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    code: int


class Refuses(Exception):
    def __reduce__(self) -> Any:
        raise RuntimeError("not me")


class RaisesOnArrival(Exception):
    def __setstate__(self, state: Any) -> None:
        raise RuntimeError("not here")


# ---------------------------------------------------------------------------------------- types


@pytest.mark.parametrize(
    "error",
    [
        ValueError("x"),
        KeyError("missing"),
        IndexError(),
        ZeroDivisionError("a", "b"),
        OSError(2, "No such file", "/nowhere"),
        FileNotFoundError(2, "No such file", "/nowhere"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"),
        StopIteration(3),
        ImportError("no", name="module"),
        SyntaxError("bad", ("file.py", 1, 2, "text")),
        AssertionError({"a": 1}),
        json.JSONDecodeError("bad", "doc", 1),
        subprocess.CalledProcessError(3, ["cmd"], b"out"),
        torch.OutOfMemoryError("out of memory"),
        getattr(torch.linalg, "LinAlgError")("singular"),  # noqa: B009  (has no type)
        errors.SerializationError("a"),
        errors.WorkerLostError("worker1 died"),
        errors.RpcTimeoutError("late"),
        RecursionError("deep"),
        NotImplementedError(),
        asyncio.TimeoutError(),
        pickle.PicklingError("x"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_exceptions_keep_type_arguments_and_text(error: Exception) -> None:
    got = over(error)
    assert type(got) is type(error)
    assert got.args == error.args
    assert str(got) == str(error)


def test_attributes_are_kept() -> None:
    got = over(FileNotFoundError(2, "No such file", "/nowhere"))
    assert isinstance(got, FileNotFoundError)
    assert (got.errno, got.filename) == (2, "/nowhere")
    error = ValueError("x")
    error.details = {"tensor": torch.ones(2)}  # type: ignore[attr-defined]
    back: Any = over(error)
    assert back.details["tensor"].tolist() == [1, 1]
    with_state: Any = over(WithState("a"))
    assert with_state.number == 5


@pytest.mark.parametrize("error", [TwoArguments(3, "why"), KeywordOnly(code=3), Frozen(3)])
def test_classes_with_an_init_of_their_own(error: Any) -> None:
    got: Any = over(error)
    assert isinstance(got, type(error))
    assert got.code == 3
    assert got.args == error.args
    assert str(error) in printed(got)


def test_an_init_that_changes_its_argument_is_not_run_again() -> None:
    got = over(Prefixes("it"))
    assert isinstance(got, Prefixes)
    assert got.args == ("failed: it",)
    assert "failed: failed" not in printed(got)


def test_a_class_defined_in_a_function() -> None:
    class Local(Exception):
        pass

    got = over(Local("a", 1))
    assert type(got).__name__ == "Local"
    assert got.args == ("a", 1)


def test_an_attribute_that_cannot_travel_does_not_hide_the_others() -> None:
    error = TwoArguments(3, "why")
    error.lock = threading.Lock()  # type: ignore[attr-defined]
    got: Any = over(error)
    assert isinstance(got, TwoArguments)
    assert (got.code, got.reason) == (3, "why")
    assert not hasattr(got, "lock")
    assert isinstance(got, RemoteError)
    assert "why" in got.remote_traceback


def test_an_argument_that_cannot_travel() -> None:
    got = over(ValueError("a", threading.Lock()))
    assert isinstance(got, ValueError)
    assert "lock" in printed(got)


def test_the_class_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("worker_only")
    exec("class Special(Exception):\n    pass", module.__dict__)
    monkeypatch.setitem(sys.modules, "worker_only", module)
    failure = caught(module.Special("what happened"))
    monkeypatch.delitem(sys.modules, "worker_only")
    got = remote_exception.rebuild(failure)
    assert type(got) is RemoteError
    assert got.remote_type == "worker_only.Special"
    assert got.remote_message == "what happened"
    assert got.worker == "worker0"
    assert "function_on_the_worker" in got.remote_traceback
    assert "what happened" in str(got)
    assert "worker0" in str(got)


@pytest.mark.parametrize(
    "error",
    [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError()],
    ids=lambda error: type(error).__name__,
)
def test_what_would_end_a_process_is_told_as_a_remote_error(error: BaseException) -> None:
    got = over(error)
    assert isinstance(got, RemoteError)
    assert type(error).__name__ in got.remote_type
    assert not isinstance(got, type(error))


@pytest.mark.parametrize("error", [NoText("a"), NoRepresentation("a")])
def test_an_exception_without_a_text(error: Exception) -> None:
    got = over(error)
    assert isinstance(got, (type(error), RemoteError))
    assert "function_on_the_worker" in printed(got)


@pytest.mark.parametrize("error", [Refuses("why"), RaisesOnArrival("why")])
def test_an_exception_that_cannot_be_pickled(error: Exception) -> None:
    if isinstance(error, RaisesOnArrival):
        error.extra = 1  # type: ignore[attr-defined]
    got = over(error)
    assert isinstance(got, RemoteError)
    assert "why" in str(got)


def test_texts_with_undecodable_bytes() -> None:
    got = over(OSError(2, "No such file", os.fsdecode(b"/tmp/\xff")))
    assert isinstance(got, OSError)
    assert isinstance(over(ValueError("\ud800")), ValueError)


def test_an_exception_that_was_never_raised() -> None:
    got = remote_exception.rebuild(remote_exception.describe(ValueError("x"), "worker0"))
    assert isinstance(got, ValueError)


# ----------------------------------------------------------------------------------- tracebacks


def test_the_remote_traceback_is_printed() -> None:
    text = printed(over(ValueError("the reason"), worker="worker7"))
    assert "worker7" in text
    assert "function_on_the_worker" in text
    assert "ValueError: the reason" in text


def test_the_frames_are_those_of_the_worker() -> None:
    got = over(ValueError("x"))
    names = [frame.name for frame in traceback.extract_tb(got.__traceback__)]
    assert names == ["caught", "function_on_the_worker"]
    try:
        raise got
    except ValueError as raised:
        names = [frame.name for frame in traceback.extract_tb(raised.__traceback__)]
    assert names == ["test_the_frames_are_those_of_the_worker", "caught", "function_on_the_worker"]


@NOTES
def test_notes_are_kept() -> None:
    error: Any = ValueError("x")
    error.add_note("hint: try again")
    text = printed(over(error))
    assert "hint: try again" in text


def test_causes_travel() -> None:
    error, cause = ValueError("outer"), KeyError("inner")
    cause.__cause__ = TypeError("innermost")
    error.__cause__ = cause
    got = over(error)
    text = printed(got)
    assert "inner" in text
    assert "innermost" in text
    assert "direct cause" in text
    if sys.version_info >= (3, 11):
        assert isinstance(got.__cause__, KeyError)
        assert isinstance(got.__cause__.__cause__, TypeError)


def test_the_context_is_told() -> None:
    error = ValueError("outer")
    try:
        try:
            raise KeyError("inner")
        except KeyError:
            raise error  # noqa: B904
    except ValueError as raised:
        failure = remote_exception.describe(raised, "worker0")
    text = printed(remote_exception.rebuild(failure))
    assert "KeyError: 'inner'" in text
    assert "During handling" in text


def test_cycles_of_causes_end() -> None:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    assert isinstance(over(first), ValueError)


@NOTES
def test_groups_travel() -> None:
    group = getattr(builtins, "ExceptionGroup")  # noqa: B009  (not in 3.10)
    sent = group("several", [ValueError("a"), group("more", [KeyError("b")])])
    got: Any = over(sent)
    assert type(got) is group
    assert [type(one) for one in got.exceptions] == [ValueError, group]
    assert got.subgroup(KeyError).exceptions[0].exceptions[0].args == ("b",)
    assert "KeyError: 'b'" in printed(got)


@NOTES
def test_a_group_that_would_end_the_process_is_told() -> None:
    group = getattr(builtins, "BaseExceptionGroup")  # noqa: B009  (not in 3.10)
    assert isinstance(over(group("several", [KeyboardInterrupt()])), RemoteError)


def test_an_exception_that_passes_through_many_processes_stays_small() -> None:
    error: BaseException = TwoArguments(3, "the reason")
    sizes = []
    for hop in range(20):
        failure = caught(error, f"worker{hop}")
        sizes.append(len(remote_exception.encode(failure)))
        error = remote_exception.rebuild(failure)
    text = printed(error)
    assert isinstance(error, TwoArguments)
    assert error.reason == "the reason"
    assert all(f"worker{hop}'" in text for hop in range(20))
    assert text.count("On worker 'worker0'") == 1
    assert sizes[-1] - sizes[-2] <= 2 * (sizes[2] - sizes[1]) + 200, sizes


def test_a_remote_error_that_passes_on_keeps_what_it_was() -> None:
    first = over(SystemExit(3), "worker0")
    second = over(first, "worker1")
    assert isinstance(second, RemoteError)
    assert "SystemExit" in second.remote_type
    assert second.worker == "worker0"
    assert "worker1" in printed(second)


def test_deep_tracebacks() -> None:
    def deep() -> None:
        deep()

    try:
        deep()
    except RecursionError as raised:
        failure = remote_exception.describe(raised, "worker0")
    got = remote_exception.rebuild(failure)
    assert isinstance(got, RecursionError)
    assert len(remote_exception.encode(failure)) < 1 << 20


# ------------------------------------------------------------------------------------ memory etc.


def test_neither_side_is_kept_alive() -> None:
    class Large:
        pass

    def raises() -> remote_exception.Failure:
        local = Large()
        gone.append(weakref.ref(local))
        return caught(ValueError("x"))

    def rebuilds(failure: remote_exception.Failure) -> BaseException:
        local = Large()
        gone.append(weakref.ref(local))
        return remote_exception.rebuild(failure)

    gone: list[weakref.ref[Large]] = []
    got = rebuilds(raises())
    gc.collect()
    assert [one() for one in gone] == [None, None]
    assert isinstance(got, ValueError)


def test_no_thread_is_left() -> None:
    over(ValueError("x"))
    assert not [t for t in threading.enumerate() if t.name.startswith("tensorplay-traceback")]


@pytest.mark.parametrize("frame", [b"", b"\xc1", b"\x92\x01\x02", b"\x90", b"\x91" * 100_000])
def test_a_description_that_is_none(frame: bytes) -> None:
    with pytest.raises(ProtocolError):
        remote_exception.decode(frame)


def test_a_description_with_damaged_parts_is_still_told() -> None:
    failure = remote_exception.Failure(
        "m.E", "why", "the text", "worker0", 1, [b"x", b"y"], [b"x"], b"frames"
    )
    got = remote_exception.rebuild(failure)
    assert type(got) is RemoteError
    assert "the text" in printed(got)
    assert got.remote_traceback == "the text"


def test_of_many_frames_the_innermost_travel_and_the_text_has_all() -> None:
    def dive(depth: int) -> None:
        if depth:
            dive(depth - 1)
        raise ValueError("bottom")

    with pytest.raises(ValueError) as info:
        dive(300)
    failure = remote_exception.describe(info.value, "worker0")
    got = remote_exception.rebuild(failure)
    lines = [line for _, line in traceback.walk_tb(got.__traceback__)]
    assert len(lines) == remote_exception._MOST_FRAMES
    assert "Previous line repeated" in failure.traceback
