"""The peers that this process knows of, found by name, rank or incarnation."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from tensorplay.distributed.rpc.options import WorkerInfo
from tensorplay.errors import ConfigError, WorkerNotFoundError
from tensorplay.protocol.messages import Departure, PeerInfo

#: So many peers that have left are remembered, for messages about them.
_MOST_DEPARTED = 1024


class PeerRoster:
    """Thread-safe view of the namespace; changes wake those who wait for a peer.

    Args:
        world_size: Size of the fixed world that this process belongs to, or 0.

    Attributes:
        refused: Why others were refused to that world.
        world_was_complete: Whether all of it have been here at the same time. It stays true
            when members leave: one may be gone before another looks.
    """

    def __init__(self, world_size: int = 0) -> None:
        self._world_size = world_size
        self.world_was_complete = False
        self._changed = threading.Condition()
        self._peers: dict[int, PeerInfo] = {}
        self._by_name: dict[str, PeerInfo] = {}
        self._by_id: dict[int, PeerInfo] = {}
        self._departed: dict[int, Departure] = {}
        self._me: PeerInfo | None = None
        self.refused: list[str] = []

    @property
    def me(self) -> PeerInfo:
        """This process's own entry."""
        assert self._me is not None, "not registered yet"
        return self._me

    def update_self(self, me: PeerInfo) -> None:
        """Notes how the broker has registered this process."""
        self._me = me
        self.change([me], [])

    def change(
        self,
        joined: Sequence[PeerInfo],
        left: Sequence[Departure],
        refused: Sequence[str] = (),
    ) -> None:
        """Removes and adds peers, and notes why others were refused."""
        with self._changed:
            self.refused += refused
            for gone in left:
                self._peers.pop(gone.peer.incarnation, None)
                self._departed[gone.peer.incarnation] = gone
                while len(self._departed) > _MOST_DEPARTED:
                    del self._departed[next(iter(self._departed))]
            for peer in joined:
                self._departed.pop(peer.incarnation, None)
                self._peers[peer.incarnation] = peer
            self._by_name = {peer.name: peer for peer in self._peers.values()}
            self._by_id = {peer.id: peer for peer in self._peers.values()}
            if not self.world_was_complete:
                self.world_was_complete = not self.missing()
            self._changed.notify_all()

    def missing(self) -> list[int]:
        """Returns the ranks of the fixed world that nobody has now."""
        return [rank for rank in range(self._world_size) if rank not in self._by_id]

    def get(self, incarnation: int) -> PeerInfo | None:
        """Returns the live peer of that incarnation."""
        return self._peers.get(incarnation)

    def all(self) -> list[PeerInfo]:
        """Returns the live peers, those with ranks first, by rank."""
        return sorted(self._peers.values(), key=lambda peer: (peer.id < 0, abs(peer.id)))

    def departure(self, peer: PeerInfo) -> str:
        """Returns why a peer is not here any more."""
        gone = self._departed.get(peer.incarnation)
        return "it has left" if gone is None else gone.reason

    def find(
        self, target: str | int | WorkerInfo | PeerInfo, *, departed: bool = False
    ) -> PeerInfo:
        """Returns the peer that ``target`` names.

        Args:
            target: A name, a rank, a WorkerInfo or a PeerInfo.
            departed: Whether one that has left will do, if no live peer has the name.

        Raises:
            WorkerNotFoundError: If there is none; the text lists who is there.
            ConfigError: If ``target`` is none of these.
        """
        peer: PeerInfo | None
        if isinstance(target, str):
            peer = self._by_name.get(target)
        elif isinstance(target, int) and not isinstance(target, bool):
            peer = self._by_id.get(target)
        elif isinstance(target, WorkerInfo):
            peer = self._by_name.get(target.name)
            if peer is not None and peer.id != target.id:
                peer = None
        elif isinstance(target, PeerInfo):
            peer = self._peers.get(target.incarnation)
        else:
            raise ConfigError(
                f"a worker is named by str, int or WorkerInfo; got {target!r}, a "
                f"{type(target).__name__}"
            )
        if peer is None and departed:
            peer = self._last_departed(target)
        if peer is None:
            raise WorkerNotFoundError(
                f"Unknown destination worker {target!r}: could not find destination; "
                f"registered are {self.describe()}"
            )
        return peer

    def _last_departed(self, target: str | int | WorkerInfo | PeerInfo) -> PeerInfo | None:
        for gone in reversed(self._departed.values()):
            peer = gone.peer
            if target in (peer.name, peer.id, WorkerInfo(peer.name, peer.id)) or target == peer:
                return peer
        return None

    def describe(self) -> str:
        """Returns names and ids of the live peers for a message."""
        return ", ".join(f"{peer.name} ({peer.id})" for peer in self.all()) or "none"

    def notify(self) -> None:
        """Has those who wait look again at their condition."""
        with self._changed:
            self._changed.notify_all()

    def wait_for(self, condition: Callable[[], bool], timeout: float | None) -> bool:
        """Waits until ``condition`` holds, looking at each change; returns whether it does."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while not condition():
                rest = None if deadline is None else deadline - time.monotonic()
                if rest is not None and rest <= 0.0:
                    return False
                self._changed.wait(rest)
        return True
