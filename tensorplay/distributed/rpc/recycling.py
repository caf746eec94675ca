"""Memory of large buffers, used again.

The system hands out fresh memory page by page, at 1 to 3 GB/s; memory that was used before is
written at 10 to 40 GB/s. The system's allocator keeps what is freed up to some size, but nothing
of more than 32 MiB. So the memory of buffers that are gone is kept, for the next ones.
"""

from __future__ import annotations

import ctypes
import threading
import time
import weakref
from collections import deque
from functools import lru_cache
from typing import Any

import torch

from tensorplay.distributed.rpc import memory
from tensorplay.distributed.rpc.shm import limits

#: Smaller buffers are left to the system's allocator.
SMALLEST_BYTES = 512 << 10
#: Seconds after which memory that nobody asked for is given back to the system.
IDLE_SECONDS = 5.0


class Recycler:
    """Gives out buffers and takes their memory back when nobody refers to them any more.

    Args:
        limit: Bytes that are kept at most; None for an eighth of the memory that there is.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limits.default_limit() // 2 if limit is None else limit
        self._lock = threading.RLock()  # a finalizer may call in here
        self._returned: deque[torch.Tensor] = deque()
        #: By size, with the time of their return; the last one returned is used first.
        self._free: dict[int, list[tuple[float, torch.Tensor]]] = {}
        self._kept = 0

    @property
    def kept(self) -> int:
        """Bytes that are kept for the next buffers."""
        with self._lock:
            self._collect()
            return self._kept

    def allocate(self, nbytes: int) -> memoryview:
        """Returns a writable buffer of so many bytes, aligned for every dtype, not cleared."""
        size = memory.block_bytes(nbytes)
        with self._lock:
            self._collect()
            free = self._free.get(size)
            tensor = free.pop()[1] if free else None
            if tensor is not None:
                self._kept -= size
        if tensor is None:
            tensor = torch.empty(size, dtype=torch.uint8)
        buffer = _buffer_type(size).from_address(tensor.data_ptr())
        # Does nothing but to note it: it runs anywhere.
        weakref.finalize(buffer, self._returned.append, tensor).atexit = False
        return memoryview(buffer).cast("B")[:nbytes]

    def trim(self, now: float) -> None:
        """Gives back to the system what has lain idle for long."""
        with self._lock:
            self._collect()
            for size, free in list(self._free.items()):
                kept = [entry for entry in free if now - entry[0] <= IDLE_SECONDS]
                self._kept -= size * (len(free) - len(kept))
                if kept:
                    self._free[size] = kept
                else:
                    del self._free[size]

    def _collect(self) -> None:
        """Takes in what has been returned, as far as it may be kept."""
        while self._returned:
            tensor = self._returned.popleft()
            size = tensor.numel()
            if self._kept + size <= self.limit:
                self._free.setdefault(size, []).append((time.monotonic(), tensor))
                self._kept += size


@lru_cache(maxsize=64)
def _buffer_type(nbytes: int) -> Any:
    """Returns a type of buffer that can be referred to weakly, as ctypes' own arrays cannot."""
    return type("Buffer", (ctypes.c_char * nbytes,), {})


_shared = Recycler()
allocate = _shared.allocate
trim = _shared.trim
