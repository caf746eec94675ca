"""Leases of a process that forks.

A child inherits the tensors of its parent, and with them blocks of shared memory: a data loader's
workers do, for one. The parent must not return such a block while a child may read it, and the
child must never return it.

So each fork has a number, and a pipe whose writing end the child keeps: when its reading end is
at its end, the child, and all children of its own, have ended or become other programs. A block
that was leased before a fork is returned after that.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections import deque
from contextlib import suppress

#: What stands for a child of which nobody can tell whether it lives: no pipe could be had.
_UNKNOWN = -1


class Forks:
    """The children of this process, and the blocks that wait for their ends."""

    def __init__(self) -> None:
        self._count = 0  # number of the last fork
        self._born = 0  # number of the fork that made this process
        self._living: dict[int, int] = {}  # by number: the reading end
        self._numbers = itertools.count()
        self._held: set[int] = set()  # leases
        self._waiting: deque[tuple[memoryview, int, int]] = deque()
        self._pipe = threading.local()

    def watch(self) -> None:
        """Has the forks of this process counted from now on."""
        os.register_at_fork(
            before=self._before, after_in_parent=self._in_parent, after_in_child=self._in_child
        )

    def hold(self, buffer: object, memory: memoryview, lease: int) -> None:
        """Has a block returned when a buffer is gone, and no child can read it any more.

        Args:
            buffer: What lies in the block.
            memory: The slab.
            lease: Which of its bytes is the lease.
        """
        number = next(self._numbers)
        self._held.add(number)
        finalizer = weakref.finalize(buffer, self._gone, number, memory, lease, self._count)
        finalizer.atexit = False

    def settle(self) -> None:
        """Returns the blocks that no child can read any more."""
        for number, reading in list(self._living.items()):
            if reading != _UNKNOWN and _at_end(reading):
                del self._living[number]
                os.close(reading)
        last = max(self._living, default=-1)
        for _ in range(len(self._waiting)):
            memory, lease, since = self._waiting.popleft()
            if since >= last:
                memory[lease] = 0
            else:
                self._waiting.append((memory, lease, since))

    def _gone(self, number: int, memory: memoryview, lease: int, since: int) -> None:
        # Runs anywhere: takes no lock.
        self._held.discard(number)
        if since < self._born:  # it is the parent's
            return
        if since == self._count or not self._living:
            memory[lease] = 0
        else:
            self._waiting.append((memory, lease, since))

    def _before(self) -> None:
        self._pipe.ends = None
        if self._held:
            with suppress(OSError):
                self._pipe.ends = os.pipe()
        self._count += 1

    def _in_parent(self) -> None:
        if self._pipe.ends is not None:
            reading, writing = self._pipe.ends
            os.close(writing)
            os.set_blocking(reading, False)
            self._living[self._count] = reading
        elif self._held:
            self._living[self._count] = _UNKNOWN

    def _in_child(self) -> None:
        # The writing end stays open as long as this process lives.
        for reading in (*self._living.values(), *(self._pipe.ends or ())[:1]):
            if reading != _UNKNOWN:
                os.close(reading)
        self._living.clear()
        self._waiting.clear()
        self._held.clear()
        self._born = self._count


def _at_end(reading: int) -> bool:
    try:
        return not os.read(reading, 1)
    except BlockingIOError:
        return False


forks = Forks()
forks.watch()
