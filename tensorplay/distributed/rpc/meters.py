"""How many calls this process makes and serves, and how long they take.

Recording a duration costs a fraction of a microsecond: it adds one to a bucket.  Buckets
are a quarter of a power of two wide, so that a percentile is known to within an eighth.
Each histogram is written by one thread at a time; who reads may miss the very last.
"""

from __future__ import annotations

import resource
import time
from collections import deque
from itertools import accumulate
from math import frexp
from pathlib import Path
from typing import Final

import torch

#: Exponent of the first bucket: it ends near a microsecond.
_FIRST = -20
_STEPS = 4
_BUCKETS = 32 * _STEPS
#: A mantissa, 0.5 to 1, times 8 is 4 to 8.
_SHIFT = -_FIRST * _STEPS - 4
#: Heartbeats over which percentiles are taken.
_WINDOW = 10
#: Upper bounds, in seconds, of the few buckets that are told to the broker.
BOUNDS: Final = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0, 60.0)
#: Errors kept until they are told, and how long one may be.
_MAX_ERRORS, _MAX_TEXT = 16, 300
_PAGE = resource.getpagesize()


class Histogram:
    """Counts durations in buckets of growing width."""

    __slots__ = ("_counts", "_past", "total")

    def __init__(self) -> None:
        self._counts = [0] * _BUCKETS
        self._past: deque[list[int]] = deque([list(self._counts)], maxlen=_WINDOW)
        self.total = 0.0

    def add(self, seconds: float) -> None:
        """Counts a duration."""
        mantissa, exponent = frexp(seconds)
        index = exponent * _STEPS + int(mantissa * 8) + _SHIFT
        if index < 0:
            index = 0
        elif index >= _BUCKETS:
            index = _BUCKETS - 1
        self._counts[index] += 1
        self.total += seconds

    @property
    def count(self) -> int:
        """How many durations there were."""
        return sum(self._counts)

    def below(self) -> list[int]:
        """Returns how many durations were at most each of ``BOUNDS``, to within a bucket."""
        sums = list(accumulate(self._counts))
        return [sums[_index(bound)] for bound in BOUNDS]

    def recent(self, *quantiles: float) -> list[float]:
        """Ends an interval and returns quantiles over the last ones, in seconds.

        A quantile of nothing is 0.
        """
        now = list(self._counts)
        grown = [after - before for after, before in zip(now, self._past[0], strict=True)]
        self._past.append(now)
        return [_quantile(grown, quantile) for quantile in quantiles]


class Meters:
    """The figures that the broker's status shows of this process.

    Attributes:
        made: Durations of the calls that this process made, from sending the request to the
            arrival of the reply, in seconds.
        served: Durations of the calls that it served, from the arrival of the request to the
            sending of the reply.
        failed: How many of the calls it served raised.
        expired: How many of the calls it made ran out of time.
        cancelled: How many of them were cancelled.
        dropped: How many of the requests of others were not run, as their callers had stopped
            waiting before.
        discarded: How many results were not sent, or not taken, as their callers had stopped
            waiting meanwhile.
    """

    def __init__(self) -> None:
        self.made = Histogram()
        self.served = Histogram()
        self.failed = 0
        self.expired = self.cancelled = self.dropped = self.discarded = 0
        self._errors: deque[str] = deque(maxlen=_MAX_ERRORS)

    def error(self, caller: str, what: str) -> None:
        """Notes that a call has raised."""
        self.failed += 1
        self._errors.append(f"a call of {caller!r} raised {what}"[:_MAX_TEXT])

    @property
    def errors(self) -> int:
        """How many errors have not been told yet."""
        return len(self._errors)

    def take_errors(self) -> list[str]:
        """Returns what has been raised since the last time."""
        errors = []
        while self._errors:
            errors.append(self._errors.popleft())
        return errors

    def stats(self) -> dict[str, float]:
        """Returns the figures; once for each heartbeat."""
        figures: dict[str, float] = {
            "calls_failed": self.failed,
            "calls_expired": self.expired,
            "calls_cancelled": self.cancelled,
            "requests_dropped": self.dropped,
            "results_discarded": self.discarded,
            "cpu_seconds": time.process_time(),
            "memory_bytes": _resident_bytes(),
        }
        for name, histogram in (("made", self.made), ("served", self.served)):
            figures[f"calls_{name}"] = histogram.count
            if not histogram.count:
                continue
            figures[f"{name}_seconds"] = histogram.total
            key = "call" if name == "made" else "served"
            figures[f"{key}_p50"], figures[f"{key}_p99"] = histogram.recent(0.5, 0.99)
            for bound, below in zip(BOUNDS, histogram.below(), strict=True):
                figures[f"{name}_le_{bound:g}"] = below
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            figures["cuda_memory_bytes"] = torch.cuda.memory_allocated()
        return figures


def _index(seconds: float) -> int:
    mantissa, exponent = frexp(seconds)
    return exponent * _STEPS + int(mantissa * 8) + _SHIFT


def _quantile(counts: list[int], quantile: float) -> float:
    total = sum(counts)
    if not total:
        return 0.0
    wanted = quantile * total
    seen = 0
    for index, count in enumerate(counts):
        seen += count
        if seen >= wanted:
            return _middle(index)
    raise AssertionError("unreachable")


def _middle(index: int) -> float:
    """Returns the duration in the middle of a bucket."""
    octave, step = divmod(index, _STEPS)
    return float((4.5 + step) / 8 * 2.0 ** (octave + _FIRST))


def _resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * _PAGE
    except (OSError, IndexError, ValueError):
        return 0
