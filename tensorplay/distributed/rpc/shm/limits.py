"""How much memory there is."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

#: A process keeps at most this part of the machine's memory, or its container's, in slabs.
DEFAULT_PART = 4
#: Limit and use of a container's memory, as it sees them: of control groups 2 and 1.
_GROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)


def default_limit() -> int:
    """Returns how many bytes of slabs a process keeps at most unless it is told otherwise."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit, _ in _GROUPS:
        total = min(total, _number(limit, total))
    return total // DEFAULT_PART


def available() -> int:
    """Returns how many bytes the machine, or this container, has left."""
    left = 1 << 62
    with suppress(OSError, ValueError, IndexError):
        text = Path("/proc/meminfo").read_text()
        left = int(text.partition("MemAvailable:")[2].split()[0]) << 10
    for limit, used in _GROUPS:
        left = min(left, max(0, _number(limit, left) - _number(used, 0)))
    return left


def _number(path: str, default: int) -> int:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):  # there is none, or "max"
        return default
