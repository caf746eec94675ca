"""Objects and functions of the tests of references, used in every process."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from tensorplay.distributed import rpc

#: References that this process keeps between calls, by name.
kept: dict[str, Any] = {}
_gate = threading.Event()


class Tracked:
    """An object that its process counts while it lives."""

    live = 0

    def __new__(cls, *args: Any) -> Tracked:  # runs when a copy is unpickled, too
        Tracked.live += 1
        return super().__new__(cls)

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def __del__(self) -> None:
        Tracked.live -= 1

    def get(self) -> Any:
        return self.value

    def add(self, other: Any) -> Any:
        self.value = self.value + other
        return self.value

    @staticmethod
    def static(x: int) -> int:
        return x + 1

    @classmethod
    def of_class(cls, x: int) -> str:
        return f"{cls.__name__} {x}"

    def slow(self) -> int:
        _gate.wait(30)
        return 1

    @rpc.functions.async_execution
    def later(self, worker: str, x: int) -> Any:
        return rpc.rpc_async(worker, double, (x,))

    @staticmethod
    @rpc.functions.async_execution
    def static_later(worker: str, x: int) -> Any:
        return rpc.rpc_async(worker, double, (x,))

    def fail(self) -> None:
        raise KeyError("missing")

    def where(self) -> str:
        return rpc.get_worker_info().name


@dataclass
class Box:
    """Holds something in a field."""

    content: Any
    more: list[Any] = field(default_factory=list)


class Holder(torch.nn.Module):
    """A module with a reference among its attributes."""

    def __init__(self, rref: rpc.RRef[Any]) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        self.rref = rref


def open_gate() -> None:
    _gate.set()


def close_gate() -> None:
    _gate.clear()


def gated(value: Any) -> Any:
    """Returns ``value`` once the gate is open."""
    assert _gate.wait(30)
    return value


def live() -> int:
    gc.collect()
    return Tracked.live


def double(x: Any) -> Any:
    return x * 2


def size(x: torch.Tensor) -> int:
    return x.numel()


def counts() -> dict[str, int]:
    """Returns what this process counts of references."""
    gc.collect()
    return {name: int(n) for name, n in rpc._rref_context_get_debug_info().items()}


def keep(name: str, what: Any) -> None:
    kept[name] = what


def forget(name: str) -> None:
    kept.pop(name, None)


def fetch_kept(name: str) -> Any:
    return kept[name].to_here()


def gated_fetch(name: str) -> Any:
    """Fetches a kept reference once the gate is open."""
    assert _gate.wait(30)
    return fetch_kept(name)


def fetch(rref: rpc.RRef[Any]) -> Any:
    return rref.to_here()


def value_of(rref: rpc.RRef[Any]) -> Any:
    return rref.local_value().value


def dig(what: Any, path: str) -> Any:
    """Fetches the reference at the end of a path of attributes, keys and calls."""
    for step in path.split("/"):
        if step == "()":
            what = what()
        elif isinstance(what, dict):
            what = what[step]
        elif step.isdigit():
            what = what[int(step)]
        else:
            what = getattr(what, step)
    return what.to_here()


def own(value: Any) -> rpc.RRef[Tracked]:
    return rpc.RRef(Tracked(value))


def own_many(count: int) -> list[rpc.RRef[Tracked]]:
    return [rpc.RRef(Tracked(n)) for n in range(count)]


def remote_of(worker: str, value: Any) -> rpc.RRef[Tracked]:
    return rpc.remote(worker, Tracked, (value,))


def pass_on(rref: rpc.RRef[Any], workers: list[str]) -> Any:
    """Hands a reference from worker to worker; the last one fetches the object."""
    if not workers:
        return rref.to_here().value
    return rpc.rpc_sync(workers[0], pass_on, (rref, workers[1:]))


def confirmed(rref: rpc.RRef[Any]) -> bool:
    return rref.confirmed_by_owner()


def is_same(first: rpc.RRef[Any], second: rpc.RRef[Any]) -> bool:
    return first.local_value() is second.local_value()


def with_generator(rref: rpc.RRef[Any]) -> Any:
    """Returns something that cannot travel, behind a reference that can."""
    return [rref, (n for n in range(3))]


def raise_with(rref: rpc.RRef[Any]) -> None:
    raise ValueError("refused")


def wait_until(condition: Callable[[], bool], what: str, timeout: float = 20.0) -> None:
    """Waits for what another process does, of which there is no event here."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come about in {timeout} s"
        time.sleep(0.01)


def check_nothing_is_left(workers: list[str]) -> None:
    """Waits until no reference is counted and no object lives, here and on the workers."""
    for worker in workers:
        rpc.rpc_sync(worker, kept.clear)
        rpc.rpc_sync(worker, open_gate)
    kept.clear()
    open_gate()

    def found() -> list[dict[str, int]]:
        return [counts(), *(rpc.rpc_sync(worker, counts) for worker in workers)]

    def objects() -> list[int]:
        return [live(), *(rpc.rpc_sync(worker, live) for worker in workers)]

    try:
        wait_until(lambda: not any(any(each.values()) for each in found()), "the end of all counts")
        wait_until(lambda: not any(objects()), "the end of all objects")
    except AssertionError as error:
        raise AssertionError(f"{error}: {found()}, objects {objects()}") from None
    for worker in workers:
        rpc.rpc_sync(worker, close_gate)
    close_gate()
