"""What workers run, and remember: imported there, not sent."""

from __future__ import annotations

import time

_counts: dict[str, int] = {}


def count(name: str, seconds: float = 0.0) -> int:
    """Returns how often it has been called with this name, after a while."""
    time.sleep(seconds)
    _counts[name] = _counts.get(name, 0) + 1
    return _counts[name]
