"""What waits in the broker for peers that read more slowly than others send to them.

A connection is here only while its socket takes nothing: the usual message never waits.
Messages keep their order, but for the few that carry none (credit, error reports), which
go first.  Data is bounded by bytes for each connection; what does not fit is the caller's
to report, and nobody else's messages are touched.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from tensorplay.protocol.messages import Kind

#: Frames behind the identity: a header, then whatever was received behind it.
Frames: TypeAlias = Sequence[Any]

#: Kinds whose messages may overtake others.
_URGENT = frozenset({Kind.UNDELIVERABLE, Kind.STRANGER, Kind.STATUS, Kind.CREDIT})
#: Bytes of the broker's own messages that may wait for one connection.
CONTROL_BYTES = 4 << 20
#: What a waiting message costs beyond its bytes.
OVERHEAD = 512


@dataclass(slots=True)
class _Queue:
    urgent: deque[tuple[Frames, int, bool]] = field(default_factory=deque)
    ordered: deque[tuple[Frames, int, bool]] = field(default_factory=deque)
    data: int = 0
    control: int = 0


class Outbound:
    """The queues of all connections that have to wait.

    Args:
        limit: Bytes of data that may wait for one connection.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._queues: dict[bytes, _Queue] = {}

    def __contains__(self, identity: bytes) -> bool:
        return identity in self._queues

    def __len__(self) -> int:
        return len(self._queues)

    def waiting(self) -> list[bytes]:
        """Returns the connections that have messages waiting."""
        return list(self._queues)

    def queued_bytes(self, identity: bytes) -> int:
        """Returns the bytes that wait for a connection."""
        queue = self._queues.get(identity)
        return 0 if queue is None else queue.data + queue.control

    def put(self, identity: bytes, frames: Frames, size: int, *, data: bool) -> bool:
        """Keeps a message until its connection takes it.

        Args:
            identity: The connection.
            frames: The message, its header first.
            size: Its bytes.
            data: Whether it is a peer's and not the broker's own.

        Returns:
            False if there is no room for it.
        """
        cost = size + OVERHEAD
        queue = self._queues.get(identity)
        if queue is None:
            queue = self._queues[identity] = _Queue()
        if data:
            # One message may always wait, or one larger than the limit never would pass.
            if queue.data and queue.data + cost > self._limit:
                return False
            queue.data += cost
        else:
            if queue.control + cost > CONTROL_BYTES:
                return False
            queue.control += cost
        lane = queue.urgent if frames[0][1] in _URGENT else queue.ordered
        lane.append((frames, cost, data))
        return True

    def first(self, identity: bytes) -> Frames | None:
        """Returns the message that goes next."""
        queue = self._queues.get(identity)
        if queue is None:
            return None
        lane = queue.urgent or queue.ordered
        return lane[0][0] if lane else None

    def pop(self, identity: bytes) -> None:
        """Takes the message away that ``first`` returned; the connection with its last one."""
        queue = self._queues[identity]
        lane = queue.urgent or queue.ordered
        _, cost, data = lane.popleft()
        if data:
            queue.data -= cost
        else:
            queue.control -= cost
        if not queue.urgent and not queue.ordered:
            del self._queues[identity]

    def drop(self, identity: bytes) -> None:
        """Throws away what waits for a connection."""
        self._queues.pop(identity, None)
