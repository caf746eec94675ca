"""Two peers in touch by way of a broker that may lose messages, or restart.

Each message from one peer to another has a number (``seq``).  The receiver takes them in
order, each once, and drops what comes again or too early.  The sender keeps a message
until the receiver has acknowledged it; every message the other way acknowledges, and a
CREDIT does where there is none.

Nothing is sent twice on a suspicion.  Where something may have been lost (this peer or
the other has registered again, the broker had no room, nothing has been acknowledged for
a while) the sender asks with a SYNC, which travels behind all that was sent before it.
The CREDIT that answers it tells how far the receiver has come; what is missing is sent
again.

A channel has a number, too, its *life*.  A peer that gives the other up for lost ends the
channel, and begins the next life if they meet again; the other, which may have noticed
nothing, sees the higher number and does the same.

A receiver that has not consumed ``window`` bytes gets no more until it has said so: a
slow receiver fills its own channel and nothing else.  Of these bytes, at most ``TRANSIT``
are on their way: what is behind them in all the queues on the way waits no longer than they
take, and neither the broker nor the network has to hold more.

Pure state: time is an argument, the caller sends what ``take`` and ``tick`` return.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from tensorplay.protocol import batch, wire
from tensorplay.protocol.chunks import Position, cut
from tensorplay.protocol.messages import Kind, Route

Frame: TypeAlias = bytes | memoryview
Frames: TypeAlias = Sequence[Frame]

#: Small messages that may go between two chunks to the same receiver.
BURST = 32
#: Bytes and messages that may be on their way, unacknowledged.
TRANSIT = 8 << 20
MAX_UNACKNOWLEDGED = 4096
#: Bytes and messages taken after which the sender is told even if nothing goes its way.
ACK_BYTES = TRANSIT // 4
ACK_MESSAGES = 64
#: Seconds after which it is told of the last ones.
ACK_SECONDS = 0.1
#: Seconds without an acknowledgement after which the sender asks for one, at first and at
#: most; they double each time.
SYNC_SECONDS = 1.0
MAX_SYNC_SECONDS = 8.0
#: Seconds until a sender tries again whom the broker told that the receiver's queue is full.
FULL_SECONDS = 0.05


class Item(NamedTuple):
    """A message as it is queued.

    Attributes:
        kind: Its kind.
        id: Its id.
        size: The bytes that its Route tells.
        cost: The bytes that it takes of the window.
        frames: What stands behind the Route.
    """

    kind: int
    id: int
    size: int
    cost: int
    frames: Frames


@dataclass(slots=True)
class _Stream:
    """A payload that goes in chunks.

    Attributes:
        kind: Whether it is a request's or a reply's.
        id: Of its call.
        chunks: What is to come of it.
        left: The bytes of that.
        size: All its bytes.
    """

    kind: int
    id: int
    chunks: Iterator[Item]
    left: int
    size: int


class Channel:
    """This peer's side of the channel to another: what it sends there and takes from there.

    Args:
        me: Incarnation of this peer.
        peer: Incarnation of the other.
        window: Bytes that may be under way, unconsumed.
        life: How often either has given up the other before.
    """

    def __init__(self, me: int, peer: int, window: int, life: int = 0) -> None:
        self.life = life
        self._me = me
        self._peer = peer
        self._window = window
        # Sending.
        self._small: deque[Item] = deque()
        self._streams: deque[_Stream] = deque()
        self._ahead: Item | None = None  # the chunk that comes next
        self._burst = 0
        self._seq = 0  # of the last message that was sent
        self._unacknowledged: deque[tuple[int, Item]] = deque()
        self._again: deque[tuple[int, Item]] = deque()  # of them, what is to be sent again
        self._transit = 0  # their bytes
        self._sent_bytes = 0
        self._freed_bytes = 0  # of them, what the receiver has consumed
        self._dropped_bytes = 0  # of what was posted, what never will be
        self._syncing = False  # sends nothing until a SYNC is answered
        self._away = False  # the receiver is not there at the moment
        self._sync_at = float("inf")
        self._sync_interval = SYNC_SECONDS
        self._rewound_to = 0  # where it last began to send again, and until when asking
        self._rewound_until = 0.0  # once more would only do it twice
        # Receiving.
        self._received = 0  # seq of the last message that was taken
        self._told = 0  # the last one that the sender has been told of
        self._untold = 0  # bytes received since
        self._gap = -1  # the one after which one was missing when that was last reported
        self._consumed = 0
        self._told_consumed = 0
        self._credit_at = float("inf")

    # Sending.

    @property
    def idle(self) -> bool:
        """Whether everything has been sent."""
        return not (self._small or self._streams or self._ahead or self._again)

    @property
    def outstanding(self) -> int:
        """Bytes under way or unconsumed."""
        return self._sent_bytes - self._freed_bytes

    @property
    def finished(self) -> int:
        """Bytes that were posted and are consumed by the receiver, or given up."""
        return self._freed_bytes + self._dropped_bytes

    def progress(self, id: int) -> tuple[int, int]:
        """Returns how many bytes of a request's payload have gone in chunks, and of how many."""
        for stream in tuple(self._streams):
            if stream.id == id and stream.kind == Kind.REQUEST:
                return stream.size - stream.left, stream.size
        return 0, 0

    @property
    def unacknowledged(self) -> int:
        """Messages that were sent and of which it is unknown whether they have arrived."""
        return len(self._unacknowledged)

    def post(self, kind: int, id: int, size: int, frames: Frames) -> None:
        """Queues a message of which no part is larger than a chunk."""
        if kind == Kind.CANCEL:
            self._drop_stream(id)
        self._small.append(Item(kind, id, size, size, frames))

    def post_stream(
        self, kind: int, id: int, size: int, header: bytes, payload: Sequence[memoryview]
    ) -> None:
        """Queues a request or reply whose payload goes in chunks."""
        self._small.append(Item(kind, id, size, 0, (header,)))
        self._streams.append(_Stream(kind, id, _chunks(kind, id, payload), size, size))

    def take(self, now: float) -> Frames | None:
        """Returns the next message to send, or None if nothing may go now."""
        if self._syncing or self._away:
            return None
        while self._again:
            seq, item = self._again.popleft()
            if not self._unacknowledged or seq < self._unacknowledged[0][0]:
                continue  # acknowledged meanwhile
            return self._sendable(seq, item)
        fresh = self._next()
        if fresh is None:
            if self._sync_at == float("inf"):
                self._expect_progress(now)  # else a lost CREDIT would be waited for for ever
            return None
        self._seq += 1
        if not self._unacknowledged:
            self._expect_progress(now, sending=True)
        self._unacknowledged.append((self._seq, fresh))
        self._transit += fresh.cost
        self._sent_bytes += fresh.cost
        return self._sendable(self._seq, fresh)

    def void(self, id: int) -> None:
        """Gives up the unacknowledged messages of a call; their numbers stay taken."""
        self._drop_stream(id)
        for queue in (self._unacknowledged, self._again):
            for position, (seq, item) in enumerate(queue):
                if item.id == id and item.kind != Kind.BATCH:
                    queue[position] = (seq, Item(Kind.VOID, id, 0, 0, ()))
                    if queue is self._unacknowledged:
                        self._transit -= item.cost
                        self._sent_bytes -= item.cost
                        self._dropped_bytes += item.cost

    # Recovery.

    def away(self) -> None:
        """Notes that the receiver is out of the broker's reach until ``back`` or for ever."""
        self._away = True
        self._syncing = False
        self._sync_at = float("inf")

    def back(self, now: float) -> None:
        """Notes that this peer or the other has registered again: something may be lost."""
        self._away = False
        self._told = self._told_consumed = -1  # so may what the other was told
        self._credit_at = now
        self._syncing = False
        self._sync_at = float("inf")
        self._ask(now)

    def full(self, now: float) -> None:
        """Notes that the broker had no room for a message of this channel."""
        self._ask(now + FULL_SECONDS)

    def tick(self, now: float) -> list[bytes]:
        """Returns the headers of the SYNC and CREDIT that are due."""
        due = []
        if now >= self._sync_at and not self._away and not self._again:
            due.append(wire.encode(self._route(Kind.SYNC, self._seq)))
            self._sync_at = now + self._sync_interval
            self._sync_interval = min(2 * self._sync_interval, MAX_SYNC_SECONDS)
        if now >= self._credit_at and not self._away:
            due.append(self._credit(0))
        return due

    def next_tick(self) -> float:
        """Returns the time at which ``tick`` has something to do."""
        if self._away:
            return float("inf")
        return self._credit_at if self._again else min(self._sync_at, self._credit_at)

    def greeting(self) -> bytes:
        """Returns a header that tells the other of this channel's life."""
        return self._credit(0)

    # Receiving.

    def receive(self, route: Route, now: float) -> tuple[bool, bytes | None]:
        """Takes the Route of what has come.

        Returns:
            Whether the message is the next one, to be handled now; and the header of a CREDIT
            to send, if there is one.
        """
        self._away = False
        self._acknowledged(route.ack, now)
        if route.kind == Kind.CREDIT:
            self._credited(route, now)
            return False, None
        if route.kind == Kind.SYNC:
            return False, self._credit(route.id)
        if route.seq != self._received + 1:
            if route.seq <= self._received or self._gap == self._received:
                return False, None
            self._gap = self._received
            return False, self._credit(route.seq - 1)
        self._received = route.seq
        self._gap = -1
        self._untold += route.size
        if route.seq - self._told >= ACK_MESSAGES or self._untold >= ACK_BYTES:
            return True, self._credit(0)
        if self._credit_at > now + ACK_SECONDS:
            self._credit_at = now + ACK_SECONDS
        return True, None

    def consumed(self, size: int, now: float) -> bytes | None:
        """Notes that so many bytes have been dealt with; returns a CREDIT if it is time."""
        self._consumed += size
        if (self._consumed - self._told_consumed) * 4 >= self._window:
            return self._credit(0)
        if self._credit_at > now + ACK_SECONDS:
            self._credit_at = now + ACK_SECONDS
        return None

    # The rest serves the above.

    def _acknowledged(self, seq: int, now: float) -> None:
        waiting = self._unacknowledged
        if not waiting or seq < waiting[0][0]:
            return
        while waiting and waiting[0][0] <= seq:
            self._transit -= waiting.popleft()[1].cost
        self._expect_progress(now)

    def _ask(self, at: float) -> None:
        """Sends nothing more until it is known what has arrived of what was sent."""
        if self._unacknowledged:
            self._syncing = True
            self._again.clear()
            self._rewound_until = 0.0
            self._sync_at = at
            self._sync_interval = SYNC_SECONDS

    def _expect_progress(self, now: float, *, sending: bool = False) -> None:
        """Sets the time at which to ask if nothing has been acknowledged until then."""
        if self._syncing:
            return
        self._sync_interval = SYNC_SECONDS
        waits = sending or self._unacknowledged or not self.idle
        self._sync_at = now + SYNC_SECONDS if waits else float("inf")

    def _credited(self, route: Route, now: float) -> None:
        self._freed_bytes = max(self._freed_bytes, min(route.size, self._sent_bytes))
        if not route.id:  # no answer
            return
        self._syncing = False
        repeated = route.ack == self._rewound_to and now < self._rewound_until
        if route.ack < route.id and not repeated:
            self._again = deque(self._unacknowledged)
            self._rewound_to, self._rewound_until = route.ack, now + SYNC_SECONDS / 2
        self._expect_progress(now)

    def _credit(self, asked: int) -> bytes:
        self._told_consumed = self._consumed
        header = wire.encode(self._route(Kind.CREDIT, asked, self._consumed))
        self._credit_at = float("inf")
        return header

    def _route(self, kind: int, id: int, size: int = 0, seq: int = 0) -> Route:
        self._told, self._untold = self._received, 0
        if self._told_consumed == self._consumed:
            self._credit_at = float("inf")
        return Route(kind, self._peer, self._me, id, size, seq, self._received, self.life)

    def _sendable(self, seq: int, item: Item) -> Frames:
        return (wire.encode(self._route(item.kind, item.id, item.size, seq)), *item.frames)

    def _next(self) -> Item | None:
        if len(self._unacknowledged) >= MAX_UNACKNOWLEDGED:
            return None
        if self._small and (self._burst < BURST or not (self._streams or self._ahead)):
            return self._next_small()
        self._burst = 0
        if self._ahead is None:
            self._ahead = self._next_chunk()
        if self._ahead is None:
            return self._next_small() if self._small else None
        item = self._ahead
        if not self._admits(item.cost):
            return None
        self._ahead = None
        return item

    def _next_small(self) -> Item | None:
        """Returns the next small message, or as many as there are in one."""
        small = self._small
        item = small[0]
        if not self._admits(item.cost):
            return None
        self._burst += 1
        small.popleft()
        if not small or not _is_small(item):
            return item
        together = [item]
        cost = item.cost
        room = batch.BATCH_BYTES - _bytes(item)
        free = min(self._window - self.outstanding, TRANSIT - self._transit)
        while small and len(together) < batch.BATCH_MESSAGES and _is_small(small[0]):
            item = small[0]
            room -= _bytes(item)
            if room < 0 or cost + item.cost > free:
                break
            cost += item.cost
            together.append(small.popleft())
        if len(together) == 1:
            return together[0]
        frames = batch.pack((item.kind, item.id, item.size, item.frames) for item in together)
        return Item(Kind.BATCH, together[0].id, cost, cost, frames)

    def _next_chunk(self) -> Item | None:
        """Returns the next chunk of the streams, which take turns."""
        while self._streams:
            stream = self._streams.popleft()
            chunk = next(stream.chunks, None)
            if chunk is not None:
                stream.left -= chunk.cost
                self._streams.append(stream)
                return chunk
        return None

    def _drop_stream(self, id: int) -> None:
        given_up = [stream for stream in self._streams if stream.id == id]
        if given_up:
            self._dropped_bytes += sum(stream.left for stream in given_up)
            self._streams = deque(stream for stream in self._streams if stream.id != id)
        if self._ahead is not None and self._ahead.id == id:
            self._dropped_bytes += self._ahead.cost
            self._ahead = None

    def _admits(self, cost: int) -> bool:
        # One message may always be under way, or one larger than the window never would.
        outstanding, transit = self._sent_bytes - self._freed_bytes, self._transit
        return (outstanding <= 0 or outstanding + cost <= self._window) and (
            transit <= 0 or transit + cost <= TRANSIT
        )


def _is_small(item: Item) -> bool:
    # A stream's header must stay in front of its chunks, but may go with others.
    return item.size <= batch.MESSAGE_BYTES


def _bytes(item: Item) -> int:
    return sum(len(frame) for frame in item.frames)


def _chunks(kind: int, id: int, payload: Sequence[memoryview]) -> Iterator[Item]:
    for offset, pieces in cut(payload):
        size = sum(len(piece) for piece in pieces)
        yield Item(Kind.CHUNK, id, size, size, (wire.encode(Position(kind, offset)), *pieces))
