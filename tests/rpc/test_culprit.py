"""What cannot travel is named, with the path to it."""

from __future__ import annotations

import collections
import contextvars
import dataclasses
import functools
import re
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tensorplay.errors import SerializationError
from tests.rpc.travel import travel


def refusal(obj: Any) -> str:
    """Returns the text of the error with which an object is refused."""
    with pytest.raises(SerializationError) as info:
        travel(obj)
    assert isinstance(info.value, TypeError)
    assert info.value.__cause__ is not None
    return str(info.value)


@pytest.fixture
def lock() -> Any:
    return threading.Lock()


def refused() -> dict[str, Callable[[], Any]]:
    return {
        "generator": lambda: (number for number in range(3)),
        "lock": threading.Lock,
        "RLock": threading.RLock,
        "Event": threading.Event,
        "Thread": threading.Thread,
        "frame": lambda: sys._getframe(),
        "Future": torch.futures.Future,
        "weakref": lambda: weakref.ref(SerializationError),
        "local": threading.local,
        "ContextVar": lambda: contextvars.ContextVar("variable"),
    }


@pytest.mark.parametrize("kind", refused())
def test_what_cannot_travel_is_named_with_its_type(kind: str) -> None:
    thing = refused()[kind]()
    text = refusal((len, ([1, thing],), {}))
    if kind not in ("Event", "Thread"):  # it is the lock inside that cannot travel
        assert type(thing).__name__ in text
    assert "args[0][1]" in text


def test_sockets_and_files(tmp_path: Path) -> None:
    with socket.socket() as one, (tmp_path / "file").open("w") as other:
        assert "args[0] (socket)" in refusal((len, (one,), {}))
        assert "kwargs['file'] (TextIOWrapper)" in refusal((len, (), {"file": other}))


def test_async_things() -> None:
    async def coroutine() -> None:
        pass

    running = coroutine()
    try:
        assert "coroutine" in refusal([running])
    finally:
        running.close()


# --------------------------------------------------------------------------------------- paths


class Slotted:
    __slots__ = ("empty", "part")

    def __init__(self, part: Any) -> None:
        self.part = part


@dataclasses.dataclass
class Config:
    name: str
    extra: Any


class Method:
    def __init__(self, part: Any) -> None:
        self.part = part

    def call(self) -> None:
        pass


Pair = collections.namedtuple("Pair", ["left", "right"])


def test_paths_through_containers(lock: Any) -> None:
    assert "args[0]['a'][2] (lock)" in refusal((len, ({"a": (0, 1, lock)},), {}))
    assert "kwargs['x'].extra['deep'] (lock)" in refusal(
        (len, (), {"x": Config("n", {"deep": lock})})
    )
    assert "[1] (lock)" in refusal([0, lock])
    assert "key" in refusal({lock: 1})
    assert "lock" in refusal({lock})
    assert "[1] (lock)" in refusal(Pair(1, lock))
    assert "['a'] (lock)" in refusal(collections.OrderedDict(a=lock))
    assert "[0] (lock)" in refusal(collections.deque([lock]))


def test_paths_through_objects(lock: Any) -> None:
    assert ".part (lock)" in refusal(Slotted(lock))
    assert ".__self__.part (lock)" in refusal(Method(lock).call)
    layer = torch.nn.Sequential(torch.nn.Linear(1, 1))
    layer[0].guard = lock
    text = refusal((len, (layer,), {}))
    assert "args[0]" in text
    assert ".guard (lock)" in text
    tensor = torch.ones(1)
    tensor.guard = lock  # type: ignore[attr-defined]
    assert "guard (lock)" in refusal([tensor])


def test_paths_through_functions(lock: Any) -> None:
    def closure() -> Any:
        return lock

    def default(x: Any = lock) -> Any:
        return x

    def outer() -> Any:
        return closure()

    assert "function's variable 'lock' (lock)" in refusal((closure, (), {}))
    assert "'closure''s variable" in refusal(outer) or "'lock' (lock)" in refusal(outer)
    assert "default 0 (lock)" in refusal(default)
    assert ".args[0] (lock)" in refusal(functools.partial(print, lock))
    assert ".keywords['file'] (lock)" in refusal(functools.partial(print, file=lock))


def test_paths_through_globals(monkeypatch: pytest.MonkeyPatch, lock: Any) -> None:
    space: dict[str, Any] = {"guard": lock, "__name__": "__main__"}
    exec("def function():\n    return guard", space)
    assert "global 'guard' (lock)" in refusal(space["function"])


def test_a_method_of_an_object_that_cannot_travel(lock: Any) -> None:
    assert "(lock)" in refusal((Method(lock).call, (), {}))


def test_the_reason_is_told(lock: Any) -> None:
    assert re.search(r"cannot pickle '_thread\.lock' object", refusal([lock]))


def test_the_first_of_several_is_named() -> None:
    assert "[1] (generator)" in refusal([0, (one for one in [1]), (one for one in [1])])


def test_an_object_that_cannot_travel_by_itself() -> None:
    class Refuses:
        def __reduce__(self) -> Any:
            raise ValueError("not me")

    assert "[0] (Refuses): not me" in refusal([Refuses()])


# ------------------------------------------------------------------------------------ odd cases


def test_cycles_end(lock: Any) -> None:
    sent: list[Any] = []
    sent.append(sent)
    sent.append(lock)
    assert "[1] (lock)" in refusal(sent)


def test_a_cycle_of_objects_ends(lock: Any) -> None:
    first, second = Config("a", None), Config("b", None)
    first.extra, second.extra = [second, lock], first
    assert "lock" in refusal(first)


def test_a_large_object_is_not_searched_forever(lock: Any) -> None:
    start = time.monotonic()
    refusal([list(range(10)) for _ in range(20_000)] + [lock])
    assert time.monotonic() - start < 10


def test_long_paths_are_shortened(lock: Any) -> None:
    deep: Any = lock
    for _ in range(150):
        deep = {"a-rather-long-key": deep}
    assert len(refusal(deep)) < 600


def test_objects_that_break_the_search(lock: Any) -> None:
    class Hostile:
        def __init__(self) -> None:
            self.lock = lock

        @property
        def __dict__(self) -> Any:  # type: ignore[override]
            raise RuntimeError("no looking")

    class Lying(dict[str, Any]):
        def items(self) -> Any:
            raise RuntimeError("no looking")

    refusal([Hostile()])
    refusal([Lying(a=lock)])


def test_a_representation_that_raises_does_not_hide_the_reason(lock: Any) -> None:
    class Key:
        def __repr__(self) -> str:
            raise RuntimeError("no text")

    assert "lock" in refusal({Key(): lock})


def test_errors_that_are_no_refusals_pass() -> None:
    class Interrupts:
        def __reduce__(self) -> Any:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        travel(Interrupts())


def test_iterators_of_builtins_travel() -> None:
    numbers: Iterator[int] = iter([1, 2])
    assert next(travel(numbers)) == 1
