"""How the C library treats memory that is freed, in processes of this library's own.

Chunks of large payloads come and go by the megabyte. By default the C library hands what is freed
back to the system at once, which then has to clear it anew for the next chunk: measured with
payloads of 16 and 128 MiB, a third of the time that broker and worker spend in the system.
"""

from __future__ import annotations

import ctypes
import os

#: Bytes of freed memory that are kept for what comes next.
KEPT_BYTES = 64 << 20
#: Smaller pieces come from memory that is kept; the largest value that the C library takes.
PIECE_BYTES = 32 << 20
#: Bytes by which the memory grows at a time.
GROWTH_BYTES = 16 << 20

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
#: Who sets one of these knows better.
_VARIABLES = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")


def keep_freed_memory() -> bool:
    """Has this process keep freed memory for what comes next.

    Returns:
        Whether it does: only the GNU C library can be told, and only if the environment has not
        told it something else.
    """
    if any(variable in os.environ for variable in _VARIABLES):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library
        return False
    return all(
        [
            mallopt(_M_MMAP_THRESHOLD, PIECE_BYTES),
            mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES),
            mallopt(_M_TOP_PAD, GROWTH_BYTES),
        ]
    )
