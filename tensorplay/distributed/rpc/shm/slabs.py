"""The sender's pool of slabs.

Fresh memory costs page faults, about a second for each gigabyte; a slab that is used again is
written at the speed of memory. So slabs are kept: a block that its receiver has returned is
the next one to be used, which also finds it in the processor's caches.

Each slab is made for one receiver, and only ever used for that one: nobody reads what another was
sent. When a receiver is lost its slabs are given up and never used again, as it may live on
somewhere and still hold tensors in them.

The pool stays within its limit, by these steps, as far as they are needed: it gives up slabs
that lie idle; it leaves slabs whose blocks are held for long to their receivers, whose
tensors they are by then; it lets a payload travel as frames.
"""

from __future__ import annotations

import itertools
import logging
import os
import resource
import threading
import time
from collections import defaultdict
from collections.abc import Callable

import torch

from tensorplay.distributed.rpc import memory
from tensorplay.distributed.rpc.shm import files, limits
from tensorplay.protocol.calls import Block

_log = logging.getLogger(__name__)

#: Slabs of blocks smaller than this have several.
SLAB_BYTES = 4 << 20
#: A process has at most this many slabs, which take two descriptors each of those it may have.
MOST_SLABS = max(16, min(256, resource.getrlimit(resource.RLIMIT_NOFILE)[0] % (1 << 20) // 16))
#: Seconds after which an idle slab is given up.
IDLE_SECONDS = 30.0
#: Seconds after which a block that is still held is taken for one that will be.
HELD_SECONDS = 5.0


class Slab:
    """A slab of this process.

    Args:
        owner: Incarnation of this process.
        number: Unique in this process.
        size: Bytes of a block.
        count: Number of blocks.

    Raises:
        OSError: If the system does not allow it, or has not as much memory.
    """

    def __init__(self, owner: int, number: int, size: int, count: int) -> None:
        self.number = number
        self.block_bytes = size
        self.nbytes = files.HEADER_BYTES + size * count
        self.used = time.monotonic()
        self._end = files.LEASES + count
        self.fd, self.memory = files.create(owner, number, self.nbytes)
        self.address = torch.frombuffer(self.memory, dtype=torch.uint8).data_ptr()

    @property
    def idle(self) -> bool:
        """Whether no block is leased."""
        return self.memory.find(b"\1", files.LEASES, self._end) < 0

    @property
    def leases(self) -> int:
        """How many blocks are leased."""
        return self.memory[files.LEASES : self._end].count(1)

    @property
    def mapped(self) -> bool:
        """Whether the receiver has mapped it."""
        return bool(self.memory[files.MAPPED])

    def take(self) -> int | None:
        """Leases a block and returns its number; None if all are."""
        found = self.memory.find(b"\0", files.LEASES, self._end)
        if found < 0:
            return None
        self.memory[found] = 1
        self.used = time.monotonic()
        return found - files.LEASES

    def retire(self) -> None:
        """Gives it up; the receiver's mapping lasts as long as tensors of its lie there."""
        self.memory[files.RETIRED] = 1
        os.close(self.fd)


class Lease:
    """A leased block of a slab.

    Args:
        slab: The slab.
        number: The block's number in it.
        nbytes: How many of its bytes are used.
    """

    def __init__(self, slab: Slab, number: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._slab = slab
        self._number = number
        self._offset = files.HEADER_BYTES + number * slab.block_bytes
        self.memory = memoryview(slab.memory)[self._offset : self._offset + nbytes]

    def fill(self, address: int) -> None:
        """Copies memory of this process, from an address on, into it."""
        memory.copy(self._slab.address + self._offset, address, self.nbytes)

    def block(self, frame: int) -> Block:
        """Returns what tells the receiver where payload frame number ``frame`` lies."""
        slab = self._slab
        return Block(
            frame, slab.number, slab.fd, slab.nbytes, self._number, self._offset, self.nbytes
        )

    def undo(self) -> None:
        """Returns the block; not after its receiver has been told of it."""
        self._slab.memory[files.LEASES + self._number] = 0


class SlabPool:
    """The slabs of this process, by receiver and size of their blocks.

    Args:
        owner: Incarnation of this process.
        limit: Bytes of all of its slabs.
        available: Tells how much memory there is; a slab takes at most half of it.
    """

    def __init__(
        self, owner: int, limit: int, available: Callable[[], int] = limits.available
    ) -> None:
        self.limit = limit
        self._owner = owner
        self._available = available
        self._numbers = itertools.count(1)
        self._lock = threading.RLock()  # a finalizer may call in here
        self._slabs: dict[int, dict[int, list[Slab]]] = defaultdict(lambda: defaultdict(list))
        self._total = 0
        self._count = 0
        self._warned = False

    def allocate(self, peer: int, nbytes: int) -> Lease | None:
        """Returns a leased block for a payload to a peer.

        Args:
            peer: Incarnation of the receiver.
            nbytes: Bytes of the payload, at least 1.

        Returns:
            The block, or None if there is no room for it.
        """
        size = memory.block_bytes(nbytes)
        count = max(1, min(files.MOST_BLOCKS, SLAB_BYTES // size))
        total = files.HEADER_BYTES + size * count
        with self._lock:
            for slab in self._slabs[peer][size]:
                lease = slab.take()
                if lease is not None:
                    return Lease(slab, lease, nbytes)
            if not self._make_room(total):
                return None
            self._total += total  # reserved; to make a slab takes long
            self._count += 1
        made = self._make(size, count, total)
        if made is None:
            return None
        lease = made.take()
        assert lease is not None
        with self._lock:
            self._slabs[peer][size].append(made)
        return Lease(made, lease, nbytes)

    def drop(self, peer: int) -> None:
        """Gives up the slabs for a peer that is gone."""
        with self._lock:
            for slabs in self._slabs.pop(peer, {}).values():
                for slab in slabs:
                    self._forget(slab)

    def trim(self, now: float) -> None:
        """Gives up the slabs that have lain idle for long."""
        with self._lock:
            for peer, size, slab in self._all():
                if now - slab.used > IDLE_SECONDS and slab.idle:
                    self._slabs[peer][size].remove(slab)
                    self._forget(slab)

    def peers(self) -> list[int]:
        """Returns the incarnations of the peers that there are slabs for."""
        with self._lock:
            return list(self._slabs)

    def unread(self) -> bool:
        """Returns whether there are leased blocks that their receiver could not read yet."""
        with self._lock:
            return any(not slab.mapped and not slab.idle for _, _, slab in self._all())

    def close(self) -> None:
        """Gives up all slabs."""
        with self._lock:
            peers = list(self._slabs)
        for peer in peers:
            self.drop(peer)

    def stats(self) -> dict[str, float]:
        """Returns counts of slabs, their bytes, and the blocks that are leased."""
        with self._lock:
            leases = sum(slab.leases for _, _, slab in self._all())
            return {"slabs": self._count, "slab_bytes": self._total, "slab_leases": leases}

    def _make(self, size: int, count: int, total: int) -> Slab | None:
        """Makes a slab for which there is room."""
        try:
            if total > self._available() // 2:
                raise OSError("the machine or container is short of memory")
            return Slab(self._owner, next(self._numbers), size, count)
        except OSError as error:
            with self._lock:
                self._total -= total
                self._count -= 1
            if not self._warned:
                self._warned = True
                _log.warning(
                    "no shared memory of %d bytes could be had (%s): large tensors to peers on "
                    "this host go through the broker meanwhile, which is slower",
                    total,
                    error,
                )
            return None

    def _make_room(self, nbytes: int) -> bool:
        """Gives up what it must for so many bytes; returns whether there is room then."""

        def fits() -> bool:
            return self._total + nbytes <= self.limit and self._count < MOST_SLABS

        if fits():
            return True
        if nbytes > self.limit:
            return False
        oldest = sorted(self._all(), key=lambda entry: entry[2].used)
        held_since = time.monotonic() - HELD_SECONDS
        steps: tuple[Callable[[Slab], bool], ...] = (
            lambda slab: slab.idle,
            lambda slab: slab.used < held_since and slab.mapped,
        )
        for expendable in steps:
            for peer, size, slab in oldest:
                if expendable(slab) and slab in self._slabs[peer][size]:
                    self._slabs[peer][size].remove(slab)
                    self._forget(slab)
                    if fits():
                        return True
        return False

    def _all(self) -> list[tuple[int, int, Slab]]:
        return [
            (peer, size, slab)
            for peer, sizes in self._slabs.items()
            for size, slabs in sizes.items()
            for slab in slabs
        ]

    def _forget(self, slab: Slab) -> None:
        slab.retire()
        self._total -= slab.nbytes
        self._count -= 1
