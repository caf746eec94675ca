"""A peer's registration with the broker: a state machine without clock or socket.

    IDLE --start--> REGISTERING --WELCOME--> REGISTERED --leave--> LEAVING --FAREWELL--> CLOSED
                     ^     |                    |   |
                     |     +--REFUSED--> CLOSED |   +-- silence or STRANGER
                     +--------------------------+

Rule 1: everything that changes the state is here; a shell feeds in what it receives
(``receive``) and the time (``tick``), and does what the returned commands say.

Rule 2: the incarnation stays the same for the life of the session.  A broker that
restarted, or that lost sight of this peer, is told HELLO again with the name, the id and
the incarnation that the peer had; its roster replaces the peer's.

Rule 3: a restarted broker learns of its peers one by one, so those that its first
rosters lack are not gone: they are lost if they have not come back after a grace period
of two heartbeat time-outs, however often this peer registers meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

import msgspec

from tensorplay.protocol.messages import (
    Answer,
    Ask,
    Control,
    Departure,
    Farewell,
    Goodbye,
    Heartbeat,
    Hello,
    PeerInfo,
    Refused,
    Roster,
    Stranger,
    Undeliverable,
    Welcome,
)

#: Seconds until an unanswered HELLO is repeated: at first, and at most. It doubles each time.
HELLO_INTERVAL = 0.02
MAX_HELLO_INTERVAL = 1.0


class State(Enum):
    """Where the session stands."""

    IDLE = "idle"
    REGISTERING = "registering"
    REGISTERED = "registered"
    LEAVING = "leaving"
    CLOSED = "closed"


@dataclass(frozen=True)
class Send:
    """Command: send this message to the broker."""

    message: Control


@dataclass(frozen=True)
class Registered:
    """Command: tell the owner that this peer is registered (again)."""

    welcome: Welcome
    again: bool


@dataclass(frozen=True)
class Rejected:
    """Command: tell the owner that the broker refused this peer; the session is closed."""

    refused: Refused


@dataclass(frozen=True)
class PeersChanged:
    """Command: tell the owner who came, who went, and who was refused to its fixed world.

    ``back`` are peers that it knows: they have registered again.
    """

    joined: tuple[PeerInfo, ...] = ()
    left: tuple[Departure, ...] = ()
    refused: tuple[str, ...] = ()
    back: tuple[PeerInfo, ...] = ()


@dataclass(frozen=True)
class BrokerLost:
    """Command: tell the owner that the broker is silent; the session tries to come back."""

    silent_for: float


@dataclass(frozen=True)
class NotDelivered:
    """Command: tell the owner that a routed message reached nobody."""

    report: Undeliverable


@dataclass(frozen=True)
class Closed:
    """Command: the session has ended cleanly."""


@dataclass(frozen=True)
class Asked:
    """Command: tell the owner what an operator asks of it; it sends an ``Answer``."""

    ask: Ask


@dataclass(frozen=True)
class Answered:
    """Command: tell the owner of the broker's answer to an ``Ask`` of its own."""

    answer: Answer


Command = (
    Send
    | Registered
    | Rejected
    | PeersChanged
    | BrokerLost
    | NotDelivered
    | Closed
    | Asked
    | Answered
)


@dataclass
class PeerSession:
    """The peer's side of registration, roster and liveness.

    Args:
        hello: The registration to ask for.
        heartbeat_interval: Seconds between heartbeats until the broker says otherwise.
        heartbeat_timeout: Seconds of silence that mean loss until the broker says otherwise.
    """

    hello: Hello
    heartbeat_interval: float = 1.0
    heartbeat_timeout: float = 5.0
    state: State = State.IDLE
    me: PeerInfo | None = None
    peers: dict[int, PeerInfo] = field(default_factory=dict)
    _broker: int = 0
    _last_heard: float = 0.0
    _next_send: float = 0.0
    _lost: bool = False
    _hello_interval: float = HELLO_INTERVAL
    _missing_until: dict[int, float] = field(default_factory=dict)

    def start(self, now: float) -> list[Command]:
        """Begins to register."""
        self.state = State.REGISTERING
        self._last_heard = now
        return self._say_hello(now)

    def receive(self, message: Control, now: float) -> list[Command]:
        """Handles a control message from the broker."""
        self._last_heard = now
        self._lost = False
        if self.state is State.CLOSED:
            return []
        if isinstance(message, Welcome):
            return self._welcomed(message, now)
        if isinstance(message, Roster):
            return self._changed(message)
        if isinstance(message, Stranger):
            return self._unknown(now)
        if isinstance(message, Refused):
            self.state = State.CLOSED
            return [Rejected(message)]
        if isinstance(message, Undeliverable):
            return [NotDelivered(message)]
        if isinstance(message, Ask):
            return [Asked(message)]
        if isinstance(message, Answer):
            return [Answered(message)]
        if isinstance(message, Farewell) and self.state is State.LEAVING:
            self.state = State.CLOSED
            return [Closed()]
        return []

    def heard(self, now: float) -> None:
        """Notes a sign of life of the broker that is no control message."""
        self._last_heard = now
        self._lost = False

    def connected(self, now: float) -> list[Command]:
        """Notes that the connection stands, for the first time or anew."""
        if self.state not in (State.REGISTERING, State.REGISTERED):
            return []
        self.state = State.REGISTERING
        self._hello_interval = HELLO_INTERVAL
        return self._say_hello(now)

    def tick(
        self, now: float, stats: Callable[[], dict[str, float]] | None = None
    ) -> list[Command]:
        """Does what is due at ``now``; ``stats`` gives what goes with a heartbeat."""
        commands: list[Command] = []
        if self.state is State.REGISTERED:
            commands += self._expire_missing(now)
            silent_for = now - self._last_heard
            if silent_for > self.heartbeat_timeout and not self._lost:
                self._lost = True
                commands.append(BrokerLost(silent_for))
        if now < self._next_send:
            return commands
        if self.state is State.REGISTERING:
            commands += self._say_hello(now)
        elif self.state is State.REGISTERED:
            self._next_send = now + self.heartbeat_interval
            commands.append(Send(Heartbeat(sent=now, stats=stats() if stats else {})))
        return commands

    def next_tick(self) -> float:
        """Returns the time at which ``tick`` has something to do."""
        return self._next_send

    def leave(self, reason: str = "left") -> list[Command]:
        """Begins to leave; the shell keeps going until ``Closed``."""
        if self.state in (State.CLOSED, State.IDLE):
            self.state = State.CLOSED
            return [Closed()]
        self.state = State.LEAVING
        return [Send(Goodbye(reason))]

    def _say_hello(self, now: float) -> list[Command]:
        self._next_send = now + self._hello_interval
        self._hello_interval = min(2 * self._hello_interval, MAX_HELLO_INTERVAL)
        return [Send(self.hello)]

    def _unknown(self, now: float) -> list[Command]:
        if self.state is State.LEAVING:  # nobody is left to say goodbye to
            self.state = State.CLOSED
            return [Closed()]
        if self.state is not State.REGISTERED:
            return []
        self.state = State.REGISTERING
        return self._say_hello(now)

    def _welcomed(self, welcome: Welcome, now: float) -> list[Command]:
        if (
            self.state is not State.REGISTERING
            or welcome.peer.incarnation != self.hello.incarnation
        ):
            return []
        again = self.me is not None
        self._hello_interval = HELLO_INTERVAL
        restarted = again and welcome.broker != self._broker
        self.state = State.REGISTERED
        self.me = welcome.peer
        # A later HELLO asks for the id that this one was given.
        self.hello = msgspec.structs.replace(self.hello, rank=welcome.peer.id)
        self._broker = welcome.broker
        self.heartbeat_interval = welcome.heartbeat_interval
        self.heartbeat_timeout = welcome.heartbeat_timeout
        self._next_send = now + welcome.heartbeat_interval
        present = {peer.incarnation: peer for peer in welcome.roster}
        joined = tuple(peer for key, peer in present.items() if key not in self.peers)
        missing = [key for key in self.peers if key not in present]
        left: tuple[Departure, ...] = ()
        if restarted:
            grace = now + 2 * welcome.heartbeat_timeout
            self._missing_until.update(dict.fromkeys(missing, grace))
        else:
            left = tuple(
                Departure(self.peers.pop(key), clean=False, reason="gone while out of touch")
                for key in missing
                if key not in self._missing_until
            )
        self.peers.update(present)
        for key in present:
            self._missing_until.pop(key, None)
        return [Registered(welcome, again), PeersChanged(joined, left)]

    def _changed(self, roster: Roster) -> list[Command]:
        joined = tuple(peer for peer in roster.joined if peer.incarnation not in self.peers)
        back = tuple(peer for peer in roster.joined if peer.incarnation in self.peers)
        left = tuple(gone for gone in roster.left if gone.peer.incarnation in self.peers)
        for gone in left:
            del self.peers[gone.peer.incarnation]
            self._missing_until.pop(gone.peer.incarnation, None)
        for peer in roster.joined:
            self.peers[peer.incarnation] = peer
            self._missing_until.pop(peer.incarnation, None)
        refused = tuple(roster.refused)
        if not (joined or left or refused or back):
            return []
        return [PeersChanged(joined, left, refused, back)]

    def _expire_missing(self, now: float) -> list[Command]:
        expired = [key for key, until in self._missing_until.items() if now >= until]
        left = []
        for key in expired:
            del self._missing_until[key]
            peer = self.peers.pop(key)
            left.append(Departure(peer, clean=False, reason="not back after the broker's restart"))
        return [PeersChanged(left=tuple(left))] if left else []
