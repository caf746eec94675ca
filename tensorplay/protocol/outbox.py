"""What a peer has to send, in the order in which it may go.

Control messages go first.  Requests and replies go in order for each receiver, receivers
taking turns; small ones overtake the chunks of large ones, so that a gigabyte under way
delays nobody.  A receiver that has not consumed ``window`` bytes gets no more until it
has said so (CREDIT): a slow receiver fills its own lane and nothing else.

Pure state: the caller sends what ``take`` returns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from tensorplay.protocol import wire
from tensorplay.protocol.chunks import Position, cut
from tensorplay.protocol.messages import Kind, Route

Frames: TypeAlias = Sequence[bytes | memoryview]

#: Small messages that may go between two chunks to the same receiver.
BURST = 32


@dataclass
class _Lane:
    """What is waiting for one receiver."""

    small: deque[tuple[int, Frames]] = field(default_factory=deque)
    streams: deque[Iterator[tuple[int, Frames]]] = field(default_factory=deque)
    ahead: tuple[int, Frames] | None = None  # the chunk that comes next
    outstanding: int = 0
    burst: int = 0

    @property
    def idle(self) -> bool:
        return not self.small and not self.streams and self.ahead is None


class Outbox:
    """Messages waiting to be sent.

    Args:
        window: Bytes that may be under way to one receiver, unconsumed.
    """

    def __init__(self, window: int) -> None:
        self._window = window
        self._control: deque[Frames] = deque()
        self._lanes: dict[int, _Lane] = {}
        self._turns: deque[int] = deque()  # receivers with something to send

    @property
    def empty(self) -> bool:
        """Whether nothing is waiting, not even for credit."""
        return not self._control and all(lane.idle for lane in self._lanes.values())

    def post_control(self, *frames: bytes) -> None:
        """Queues a message that goes before all others."""
        self._control.append(frames)

    def post(self, route: Route, *frames: bytes | memoryview) -> None:
        """Queues a message of which no part is larger than a chunk."""
        lane = self._lane(route.dst)
        lane.small.append((route.size, (wire.encode(route), *frames)))
        self._turn(route.dst)

    def post_stream(self, route: Route, header: bytes, payload: Sequence[memoryview]) -> None:
        """Queues a request or reply whose payload goes in chunks."""
        lane = self._lane(route.dst)
        lane.small.append((0, (wire.encode(route), header)))
        lane.streams.append(_chunks(route, payload))
        self._turn(route.dst)

    def credit(self, dst: int, consumed: int) -> None:
        """Notes that ``dst`` has consumed so many bytes."""
        lane = self._lanes.get(dst)
        if lane is not None:
            lane.outstanding = max(0, lane.outstanding - consumed)
            self._turn(dst)

    def drop(self, dst: int) -> None:
        """Forgets everything for a receiver that is gone."""
        self._lanes.pop(dst, None)

    def take(self) -> Frames | None:
        """Returns the next message to send, or None if nothing may go now."""
        if self._control:
            return self._control.popleft()
        while self._turns:
            dst = self._turns.popleft()
            lane = self._lanes.get(dst)
            frames = None if lane is None else self._take_from(lane)
            if frames is not None:
                self._turns.append(dst)
                return frames
        return None

    def queued_bytes(self) -> dict[int, int]:
        """Returns the bytes under way or unconsumed, by receiver."""
        return {dst: lane.outstanding for dst, lane in self._lanes.items() if lane.outstanding}

    def _lane(self, dst: int) -> _Lane:
        lane = self._lanes.get(dst)
        if lane is None:
            lane = self._lanes[dst] = _Lane()
        return lane

    def _turn(self, dst: int) -> None:
        if dst not in self._turns:
            self._turns.append(dst)

    def _take_from(self, lane: _Lane) -> Frames | None:
        if lane.small and (lane.burst < BURST or not (lane.streams or lane.ahead)):
            size, frames = lane.small[0]
            if not self._admits(lane, size):
                return None
            lane.small.popleft()
            lane.burst += 1
            lane.outstanding += size
            return frames
        lane.burst = 0
        if lane.ahead is None:
            lane.ahead = self._next_chunk(lane)
        if lane.ahead is None:
            return self._take_from(lane) if lane.small else None
        size, frames = lane.ahead
        if not self._admits(lane, size):
            return None
        lane.ahead = None
        lane.outstanding += size
        return frames

    def _next_chunk(self, lane: _Lane) -> tuple[int, Frames] | None:
        """Returns the next chunk of the streams, which take turns."""
        while lane.streams:
            stream = lane.streams.popleft()
            chunk = next(stream, None)
            if chunk is not None:
                lane.streams.append(stream)
                return chunk
        return None

    def _admits(self, lane: _Lane, size: int) -> bool:
        # One message may always be under way, or one larger than the window never would.
        return lane.outstanding == 0 or lane.outstanding + size <= self._window


def _chunks(route: Route, payload: Sequence[memoryview]) -> Iterator[tuple[int, Frames]]:
    for offset, pieces in cut(payload):
        size = sum(len(piece) for piece in pieces)
        header = Route(Kind.CHUNK, route.dst, route.src, route.id, size)
        position = Position(route.kind, offset)
        yield size, (wire.encode(header), wire.encode(position), *pieces)
