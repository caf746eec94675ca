"""Exceptions in futures keep nothing alive."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch

from tensorplay.distributed.rpc import Future
from tensorplay.errors import RemoteError


class Picky(Exception):
    """An exception that copy.copy cannot copy."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first}, {second}")


class Holder:
    """Holds a future as an object of a user would."""

    future: Future[None]


def fail_in_then(holder: Holder, error: Exception) -> None:
    def callback(done: torch.futures.Future[None]) -> None:
        raise error

    done: Future[None] = Future()
    done.set_result(None)
    holder.future = done._then(callback)


def fail_in_here(holder: Holder, error: Exception) -> None:
    holder.future = Future()
    try:
        raise error
    except Exception as caught:
        holder.future.set_exception(caught)


@pytest.mark.parametrize("fail", [fail_in_then, fail_in_here])
@pytest.mark.parametrize("error", [lambda: KeyError("key"), lambda: Picky(1, 2)])
def test_a_failed_future_in_the_frames_of_its_error_is_collected(
    fail: Callable[[Holder, Exception], None], error: Callable[[], Exception]
) -> None:
    def use() -> weakref.ref[Holder]:
        holder = Holder()
        fail(holder, error())
        for _ in range(2):
            with pytest.raises((KeyError, Picky)):
                holder.future.wait()
        return weakref.ref(holder)

    held = use()
    gc.collect()
    assert held() is None


@pytest.mark.parametrize(
    ("error", "raised"), [(KeyError("k"), KeyError), (Picky(1, 2), RemoteError)]
)
def test_a_future_that_torch_alone_holds_still_raises(
    error: Exception, raised: type[Exception]
) -> None:
    future: Future[None] = Future()
    future.set_exception(error)
    collected = torch.futures.collect_all([future])
    del future
    with pytest.raises(raised):
        collected.wait()
