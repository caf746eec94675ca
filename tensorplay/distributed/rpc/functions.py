"""Decorators for functions that others call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from tensorplay.distributed.rpc.constants import ASYNC_EXECUTION_MARK

P = ParamSpec("P")
T = TypeVar("T")

__all__ = ["async_execution"]


def async_execution(fn: Callable[P, T]) -> Callable[P, T]:
    """Marks a function whose result is a future: the reply is sent when that is complete.

    The thread that runs the function is free as soon as it returns. Combined with
    ``staticmethod`` or ``classmethod`` this decorator is the inner one, with
    ``torch.jit.script`` the outer one.

    Args:
        fn: Returns a ``torch.futures.Future``. Anything else makes the call fail with
            TypeError.

    Returns:
        A function that does the same.
    """

    @functools.wraps(fn)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        return fn(*args, **kwargs)

    setattr(wrapper, ASYNC_EXECUTION_MARK, fn)
    return wrapper
