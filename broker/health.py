"""How the broker's own process and loop are."""

from __future__ import annotations

import resource
import time
from pathlib import Path

_PAGE = resource.getpagesize()


class Health:
    """Measures the loop, the processor and the memory.

    Attributes:
        loop_latency: The longest turn of the loop in the last interval, in seconds: for so
            long a message may have waited because the broker was busy.
        busy: Share of the time that the loop's thread computed in the last interval, 0 to 1.
        wall_offset: The wall clock's lead over the clock of the loop, in seconds.
        memory: Resident memory of the process, in bytes; 0 where it cannot be read.
    """

    def __init__(self) -> None:
        self.loop_latency = 0.0
        self.busy = 0.0
        self.memory = 0
        self.wall_offset = time.time() - time.monotonic()
        self._longest = 0.0
        self._since = (0.0, 0.0)

    def turn(self, seconds: float) -> None:
        """Notes how long a turn of the loop took, the wait for messages not counted."""
        if seconds > self._longest:
            self._longest = seconds

    def sample(self, now: float) -> None:
        """Ends an interval; in the loop's thread."""
        self.loop_latency, self._longest = self._longest, 0.0
        spent = time.thread_time()
        began, before = self._since
        if began and now > began:
            self.busy = min(1.0, (spent - before) / (now - began))
        self._since = (now, spent)
        self.memory = resident_bytes()
        self.wall_offset = time.time() - now


def resident_bytes() -> int:
    """Returns the resident memory of this process, or 0 where it cannot be read."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * _PAGE
    except (OSError, IndexError, ValueError):
        return 0
