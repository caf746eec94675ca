"""Which peers share memory with this process, and the memory that it shares with them.

That two peers have the same host name, or even the same process ids in sight, proves nothing: two
containers can look alike and share nothing. So the first large payload for a peer starts a probe:
the peer is told of a small slab, maps it and returns what it reads there. Until it has answered,
and for good if it could not, payloads travel as frames.
"""

from __future__ import annotations

import logging
import mmap
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from tensorplay.distributed.rpc.shm import files, limits
from tensorplay.distributed.rpc.shm.mapping import Mappings
from tensorplay.distributed.rpc.shm.slabs import Lease, SlabPool
from tensorplay.errors import ProtocolError
from tensorplay.protocol.calls import Answer, Block, Offer
from tensorplay.protocol.messages import PeerInfo

_log = logging.getLogger(__name__)

_Frame = TypeVar("_Frame")

#: Payloads smaller than this travel as frames. Measured (median of a call): 32 KiB 1.0 ms either
#: way, 64 KiB 1.06 ms against 1.21 as a frame, 256 KiB 1.2 against 1.4, 1 MiB 1.1 against 2.4.
THRESHOLD_BYTES = 32 << 10
_NONCE_BYTES = 16
_WAIT_SECONDS = 0.002

#: Sends an offer to a peer and has a function called with its answer.
Probe = Callable[[PeerInfo, bytes, Callable[[bytes], None]], None]


class SharedMemory:
    """What this process shares with others of its host.

    Args:
        me: Incarnation of this process.
        limit: Bytes of slabs at most; None for a quarter of the memory that there is.
        probe: Sends an offer to a peer and calls back with its answer.
        is_there: Tells whether a peer of some incarnation is there.
        enabled: Whether memory is shared at all.
    """

    def __init__(
        self,
        me: int,
        limit: int | None,
        probe: Probe,
        is_there: Callable[[int], bool],
        *,
        enabled: bool = True,
    ) -> None:
        self.mappings = Mappings()
        self._me = me
        self._probe = probe
        self._is_there = is_there
        self._enabled = enabled
        self._pool = SlabPool(me, limits.default_limit() if limit is None else limit)
        self._peers: dict[int, _Peer] = {}
        self._lock = threading.Lock()
        self._beacon: tuple[int, mmap.mmap, bytes] | None = None
        self._counts = self._pool.stats()

    def leases_for(self, peer: PeerInfo) -> Leases | None:
        """Returns what gives memory for the large parts of a payload to a peer, if any does."""
        if not self._enabled or peer.incarnation == self._me:
            return None
        known = self._peers.get(peer.incarnation)
        if known is None:
            known = self._peers.setdefault(peer.incarnation, _Peer(self, peer))
        return None if known.shares is False else Leases(known)

    def answer(self, src: PeerInfo, offer: bytes | memoryview) -> bytes:
        """Returns the answer to the offer of a peer, whether its memory can be mapped here.

        Raises:
            ProtocolError: If it is no offer.
        """
        try:
            slab = msgspec.msgpack.decode(offer, type=Offer)
        except (msgspec.MsgspecError, ValueError) as error:
            raise ProtocolError(f"not an offer of shared memory: {error}") from None
        if not self._enabled:
            return msgspec.msgpack.encode(Answer(reason="shared memory is turned off there"))
        try:
            memory = files.open_slab(src.pid, slab.fd, src.incarnation, 0, files.HEADER_BYTES)
        except (OSError, ProtocolError) as error:
            return msgspec.msgpack.encode(Answer(reason=str(error)))
        return msgspec.msgpack.encode(Answer(bytes(memory[files.LEASES :][:_NONCE_BYTES])))

    def drop(self, peer: int) -> None:
        """Forgets a peer that is gone; its tensors in this process stay valid."""
        self._peers.pop(peer, None)
        self._pool.drop(peer)
        self.mappings.drop(peer)

    def trim(self, now: float) -> None:
        """Gives up what has lain idle for long, and what was made for a peer as it went."""
        for peer in {*self._peers, *self._pool.peers()}:
            if not self._is_there(peer):
                self.drop(peer)
        self._pool.trim(now)
        self.mappings.trim()
        self._counts = self._pool.stats()

    def wait_read(self, timeout: float) -> None:
        """Waits until what was sent lies in memory that its receivers have mapped.

        Args:
            timeout: Seconds to wait at most.
        """
        end = time.monotonic() + timeout
        while self._pool.unread() and time.monotonic() < end:
            time.sleep(_WAIT_SECONDS)

    def close(self) -> None:
        """Gives up everything; tensors in this process and in others stay valid."""
        self._enabled = False
        for peer in list(self._peers):
            self.drop(peer)
        self._pool.close()
        with self._lock:
            if self._beacon is not None:
                os.close(self._beacon[0])
                self._beacon = None

    def stats(self) -> dict[str, float]:
        """Returns counts of slabs, of leases some seconds ago, and of mapped slabs of others."""
        return {
            **self._counts,
            "slabs_mapped": len(self.mappings),
            "slab_peers": sum(peer.shares is True for peer in list(self._peers.values())),
        }

    def _offer(self, peer: _Peer) -> None:
        """Starts to find out whether a peer shares memory."""
        try:
            with self._lock:
                if self._beacon is None:
                    fd, memory = files.create(self._me, 0, files.HEADER_BYTES)
                    nonce = secrets.token_bytes(_NONCE_BYTES)
                    memory[files.LEASES : files.LEASES + _NONCE_BYTES] = nonce
                    self._beacon = fd, memory, nonce
                fd, _, nonce = self._beacon
        except OSError as error:
            self._enabled = False
            _log.warning("memory cannot be shared with other processes here: %s", error)
            return
        offer = msgspec.msgpack.encode(Offer(fd))
        self._probe(peer.info, offer, lambda answer: peer.answered(answer, nonce))


class _Peer:
    """What is known of a peer."""

    def __init__(self, shared: SharedMemory, info: PeerInfo) -> None:
        self.info = info
        self.shares: bool | None = None
        self._shared = shared
        self._asked = False

    def take(self, nbytes: int) -> Lease | None:
        if self.shares:
            return self._shared._pool.allocate(self.info.incarnation, nbytes)
        if not self._asked:
            self._asked = True
            self._shared._offer(self)
        return None

    def answered(self, answer: bytes, nonce: bytes) -> None:
        found = msgspec.msgpack.decode(answer, type=Answer)
        self.shares = secrets.compare_digest(found.nonce, nonce)
        if self.shares:
            _log.info("%r shares memory with this process", self.info.name)
        else:
            _log.info("%r shares no memory with this process: %s", self.info.name, found.reason)


class Leases:
    """The blocks for one payload.

    Args:
        peer: The receiver.
    """

    def __init__(self, peer: _Peer) -> None:
        self.taken: list[Lease] = []
        self._peer = peer

    def take(self, nbytes: int) -> Lease | None:
        """Returns a block of so many bytes; None if they are to travel in a frame."""
        if nbytes < THRESHOLD_BYTES:
            return None
        lease = self._peer.take(nbytes)
        if lease is not None:
            self.taken.append(lease)
        return lease

    def undo(self) -> None:
        """Returns the blocks of a payload that is not sent."""
        for lease in self.taken:
            lease.undo()
        self.taken = []


def hand_over(frames: Sequence[_Frame], leases: Leases | None) -> tuple[list[Block], list[_Frame]]:
    """Returns where the frames of a payload in shared memory lie, and those that have to travel.

    Args:
        frames: All frames of the payload.
        leases: The blocks for it.
    """
    if leases is None or not leases.taken:
        return [], list(frames)
    taken = {id(lease.memory): lease for lease in leases.taken}
    blocks, rest = [], []
    for number, frame in enumerate(frames):
        lease = taken.get(id(frame))
        if lease is None:
            rest.append(frame)
        else:
            blocks.append(lease.block(number))
    return blocks, rest
