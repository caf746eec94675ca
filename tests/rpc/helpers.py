"""Functions that the tests run on workers."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import torch

from tensorplay.distributed import rpc

events: dict[str, threading.Event] = {}


def event(name: str) -> threading.Event:
    """Returns an event of this process, made at first use."""
    return events.setdefault(name, threading.Event())


def set_event(name: str) -> None:
    event(name).set()


def wait_event(name: str, timeout: float = 30.0) -> bool:
    return event(name).wait(timeout)


def begin_and_wait(name: str) -> bool:
    """Tells that it has begun, then waits for its event."""
    set_event(f"{name} has begun")
    return wait_event(name)


def is_set(name: str) -> bool:
    return event(name).is_set()


def set_and_return(name: str, value: Any) -> Any:
    set_event(name)
    return value


def double_when_set(name: str, x: torch.Tensor) -> torch.Tensor:
    begin_and_wait(name)
    return x * 2


class Waiter:
    """Waits for an event that nobody sets."""

    def wait(self, seconds: float) -> bool:
        return threading.Event().wait(seconds)


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


_kept = _Kept()


def keep_log() -> None:
    """Keeps from now on what this process logs of references."""
    logger = logging.getLogger("tensorplay.distributed.rpc.rref_context")
    logger.setLevel(logging.INFO)
    logger.addHandler(_kept)


def kept_log() -> list[str]:
    return _kept.lines


class WaitingModule(torch.nn.Module):
    """Waits for an event in its forward pass."""

    def forward(self, name: str) -> bool:
        return begin_and_wait(name)


def counts() -> dict[str, float]:
    """Returns what this process tells the broker of itself."""
    return rpc._get_current_rpc_agent().stats()


def add(a: Any, b: Any) -> Any:
    return a + b


def echo(*args: Any, **kwargs: Any) -> Any:
    return args, kwargs


def who() -> str:
    return rpc.get_worker_info().name


def fail(message: str) -> None:
    raise ValueError(message)


def spin(seconds: float) -> None:
    """Computes for a while without giving the interpreter's lock away for long."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def nest(names: list[str], depth: int) -> int:
    """Calls itself on the workers in turn until the depth is used up."""
    if depth == 0:
        return 0
    return 1 + int(rpc.rpc_sync(names[depth % len(names)], nest, (names, depth - 1)))


@rpc.functions.async_execution
def later(name: str) -> torch.futures.Future[str]:
    """Answers when the event is set, without holding a thread."""
    future: torch.futures.Future[str] = torch.futures.Future()
    threading.Thread(
        target=lambda: future.set_result(f"{name} {wait_event(name)}"), daemon=True
    ).start()
    return future


@rpc.functions.async_execution
def not_a_future() -> Any:
    return 3


def unpicklable() -> Any:
    return (number for number in range(3))


class Counter:
    """A stateful object."""

    def __init__(self, value: int = 0) -> None:
        self.value = value

    def increment(self, by: int = 1) -> int:
        self.value += by
        return self.value


def fill_and_sum(tensor: torch.Tensor) -> float:
    return float(tensor.sum())
