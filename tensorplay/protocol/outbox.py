"""The channels of a peer to all others, and the order in which their messages go.

Control messages go first.  Channels take turns, message by message, so that a gigabyte
under way to one receiver delays no other.

Pure state: the caller sends what ``take`` returns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import Enum

from tensorplay.protocol.channel import Channel, Frame, Frames
from tensorplay.protocol.messages import Route

__all__ = ["Frames", "Outbox", "Verdict"]

#: Lost peers whose number of lives is remembered.
_MAX_LIVES = 4096


class Verdict(Enum):
    """What is to be done with a message that has come."""

    HANDLE = "handle"
    IGNORE = "ignore"
    #: The sender had given up this peer: so has this one to do with the sender; then HANDLE
    #: or IGNORE, which asking again tells.
    FORGOTTEN = "forgotten"


class Outbox:
    """Channels by peer, and what waits to be sent.

    Args:
        me: Incarnation of this peer.
        window: Bytes that may be under way to one receiver, unconsumed.
    """

    def __init__(self, me: int, window: int) -> None:
        self._me = me
        self._window = window
        self._control: deque[Frames] = deque()
        self._channels: dict[int, Channel] = {}
        self._lives: dict[int, int] = {}  # of the next channel to a peer that was given up
        self._turns: deque[int] = deque()  # receivers with something to send
        self._waiting: set[int] = set()  # the same
        self._next_tick = float("inf")

    @property
    def empty(self) -> bool:
        """Whether everything has been sent, but for what awaits credit."""
        return not self._control and all(channel.idle for channel in self._channels.values())

    def post_control(self, *frames: bytes) -> None:
        """Queues a message that goes before all others."""
        self._control.append(frames)

    def post(self, dst: int, kind: int, id: int, size: int, frames: Sequence[Frame]) -> None:
        """Queues a message of which no part is larger than a chunk."""
        self._channel(dst).post(kind, id, size, frames)
        self._turn(dst)

    def post_stream(
        self, dst: int, kind: int, id: int, size: int, header: bytes, payload: Sequence[memoryview]
    ) -> None:
        """Queues a request or reply whose payload goes in chunks."""
        self._channel(dst).post_stream(kind, id, size, header, payload)
        self._turn(dst)

    def take(self, now: float) -> Frames | None:
        """Returns the next message to send, or None if nothing may go now."""
        if self._control:
            return self._control.popleft()
        while self._turns:
            dst = self._turns.popleft()
            channel = self._channels.get(dst)
            frames = None if channel is None else channel.take(now)
            if channel is not None:
                self._next_tick = min(self._next_tick, channel.next_tick())
            if frames is not None:
                self._turns.append(dst)
                return frames
            self._waiting.discard(dst)
        return None

    def receive(self, route: Route, now: float) -> Verdict:
        """Takes the Route of a message that has come; its CREDIT and SYNC are dealt with here."""
        src = route.src
        channel = self._channel(src)
        if route.life != channel.life:
            return self._other_life(route, channel)
        handle, credit = channel.receive(route, now)
        if credit is not None:
            self._control.append((credit,))
        self._turn(src)
        self._next_tick = min(self._next_tick, channel.next_tick())
        return Verdict.HANDLE if handle else Verdict.IGNORE

    def consumed(self, src: int, size: int, now: float) -> None:
        """Notes that so many bytes of a peer have been dealt with."""
        channel = self._channels.get(src)
        if channel is None:
            return
        credit = channel.consumed(size, now)
        if credit is not None:
            self._control.append((credit,))
        self._next_tick = min(self._next_tick, channel.next_tick())

    # Recovery.

    def back(self, dst: int, now: float) -> None:
        """Notes that a peer, or the way to it, is back: asks what has been lost."""
        channel = self._channels.get(dst)
        if channel is not None:
            channel.back(now)
            self._next_tick = now
            self._turn(dst)

    def all_back(self, now: float) -> None:
        """Notes that this peer has registered again."""
        self._control.clear()
        for dst in self._channels:
            self.back(dst, now)

    def away(self, dst: int) -> None:
        """Notes that a peer is out of the broker's reach, perhaps for a while."""
        channel = self._channels.get(dst)
        if channel is not None:
            channel.away()

    def full(self, dst: int, now: float) -> None:
        """Notes that the broker had no room for a message to a peer."""
        channel = self._channels.get(dst)
        if channel is not None:
            channel.full(now)
            self._next_tick = min(self._next_tick, channel.next_tick())

    def void(self, dst: int, id: int) -> None:
        """Gives up the messages of a call."""
        channel = self._channels.get(dst)
        if channel is not None:
            channel.void(id)
            self._turn(dst)

    def drop(self, dst: int) -> None:
        """Gives up a peer and forgets everything for it."""
        channel = self._channels.pop(dst, None)
        if channel is None:
            return
        if len(self._lives) >= _MAX_LIVES:
            del self._lives[next(iter(self._lives))]
        self._lives[dst] = channel.life + 1

    @property
    def next_tick(self) -> float:
        """The time at which ``tick`` has something to do."""
        return self._next_tick

    def tick(self, now: float) -> float:
        """Queues what is due at ``now``; returns when there will be something again."""
        if now >= self._next_tick:
            for channel in self._channels.values():
                self._control += [(header,) for header in channel.tick(now)]
            self._next_tick = min(
                (channel.next_tick() for channel in self._channels.values()),
                default=float("inf"),
            )
        return self._next_tick

    def queued_bytes(self) -> dict[int, int]:
        """Returns the bytes under way or unconsumed, by receiver."""
        return {
            dst: channel.outstanding
            for dst, channel in self._channels.items()
            if channel.outstanding
        }

    def progress(self, dst: int, id: int) -> tuple[int, int]:
        """Returns how many bytes of a request have gone in chunks, and of how many."""
        channel = self._channels.get(dst)
        return (0, 0) if channel is None else channel.progress(id)

    def finished(self, dst: int) -> int:
        """Returns how many of the bytes for a receiver it has consumed, or never will."""
        channel = self._channels.get(dst)
        return 0 if channel is None else channel.finished

    def _channel(self, dst: int) -> Channel:
        channel = self._channels.get(dst)
        if channel is None:
            life = self._lives.get(dst, 0)
            channel = self._channels[dst] = Channel(self._me, dst, self._window, life)
        return channel

    def _other_life(self, route: Route, channel: Channel) -> Verdict:
        if route.life < channel.life:  # the sender does not know yet
            self._control.append((channel.greeting(),))
            return Verdict.IGNORE
        self._channels.pop(route.src)
        self._lives[route.src] = route.life
        return Verdict.FORGOTTEN

    def _turn(self, dst: int) -> None:
        if dst not in self._waiting:
            self._waiting.add(dst)
            self._turns.append(dst)
