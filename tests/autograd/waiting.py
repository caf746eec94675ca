"""Waiting for what another process will have done soon."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(condition: Callable[[], bool], timeout: float = 20.0) -> bool:
    """Polls a condition; returns whether it has come about in time."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
