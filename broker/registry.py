"""Who is registered: names and ids, unique in a namespace, and the connections behind them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from tensorplay.broker.history import Rates
from tensorplay.protocol.messages import FIRST_RANKLESS_ID, Departure, PeerInfo

#: Departures that a namespace remembers, so that late messages get a telling answer.
_DEPARTED = 64
#: Refusals that an incomplete world remembers, so that late members learn of them.
_REFUSALS = 8
#: Empty namespaces that are remembered, as members of their worlds may still come.
_FAILED = 64


@dataclass(slots=True)
class Traffic:
    """Messages and payload bytes of one direction."""

    messages: int = 0
    bytes: int = 0

    def add(self, size: int) -> None:
        """Counts a message."""
        self.messages += 1
        self.bytes += size


@dataclass(slots=True, eq=False)
class Peer:
    """A registered peer.

    Attributes:
        info: What everybody may know of it.
        namespace: Where it is registered.
        identity: The connection by which it is reached, a reconnect changes it; None while
            it is away.
        world_size: Size of the fixed world it belongs to, or 0.
        since: When it registered.
        last_heard: When its last message came.
        received: What it has sent.
        sent: What was passed on to it.
        sent_to: What it has sent, by the incarnation of the receiver.
        stats: What its last heartbeat told of it.
        rates: What it does a second.
        next_complaint: When it may be told of a malformed message again.
        gone_at: When it counts as lost, if it is away and does not come back.
        away: Why it is away, one sentence for people.
        key: The public key that it registered with, if the broker asks for keys.
    """

    info: PeerInfo
    namespace: Namespace
    identity: bytes | None
    world_size: int
    since: float
    last_heard: float
    received: Traffic = field(default_factory=Traffic)
    sent: Traffic = field(default_factory=Traffic)
    sent_to: dict[int, Traffic] = field(default_factory=dict)
    stats: dict[str, float] = field(default_factory=dict)
    rates: Rates = field(default_factory=Rates)
    next_complaint: float = float("-inf")
    gone_at: float = float("inf")
    away: str = ""
    key: str = ""

    def forget_the_gone(self) -> None:
        """Lets go of the counts of receivers that are not here any more."""
        here = self.namespace.by_incarnation
        if len(self.sent_to) > len(here):
            self.sent_to = {key: sent for key, sent in self.sent_to.items() if key in here}

    def __str__(self) -> str:
        info = self.info
        return f"{info.name!r} (id {info.id}, host {info.host or '?'}, pid {info.pid})"


@dataclass(slots=True, eq=False)
class Namespace:
    """The peers that can see each other."""

    name: str
    by_name: dict[str, Peer] = field(default_factory=dict)
    by_id: dict[int, Peer] = field(default_factory=dict)
    by_incarnation: dict[int, Peer] = field(default_factory=dict)
    departed: dict[int, Departure] = field(default_factory=dict)
    refusals: list[str] = field(default_factory=list)
    tried: set[int] = field(default_factory=set)

    def __iter__(self) -> Iterator[Peer]:
        return iter(self.by_incarnation.values())

    @property
    def world_size(self) -> int:
        """Size of the fixed world whose members are here, or 0."""
        return max((peer.world_size for peer in self), default=0)

    def world_is_waiting(self) -> bool:
        """Returns whether a fixed world has members here, but not all of them."""
        size = self.world_size
        return any(rank not in self.by_id for rank in range(size))

    def refuse(self, rank: int, text: str) -> None:
        """Keeps why a member was refused, for those of its world that come later."""
        if self.refusals or self.world_is_waiting():
            self.tried.add(rank)
            if len(self.refusals) < _REFUSALS:
                self.refusals.append(text)

    def enter_world(self, peer: Peer) -> list[str]:
        """Notes a member of the fixed world; returns whom of it the broker has refused.

        Those who were told so may have left before the last have come.  The world was begun
        anew when a rank comes again of which nobody is left.
        """
        alone = all(other is peer or not other.world_size for other in self)
        if not self.world_is_waiting() or (alone and peer.info.id in self.tried):
            self.refusals, self.tried = [], set()
        self.tried.add(peer.info.id)
        return self.refusals

    def free_rank(self) -> int:
        """Returns the lowest rank that nobody has or will claim as a world's member."""
        rank = self.world_size
        while rank in self.by_id:
            rank += 1
        return rank

    def free_rankless_id(self) -> int:
        """Returns the highest negative id that nobody has."""
        number = FIRST_RANKLESS_ID
        while number in self.by_id:
            number -= 1
        return number

    def remember(self, departure: Departure) -> None:
        """Keeps a departure for a while."""
        self.departed[departure.peer.incarnation] = departure
        if len(self.departed) > _DEPARTED:
            del self.departed[next(iter(self.departed))]


class Registry:
    """The peers of all namespaces; keeps every table in step."""

    def __init__(self) -> None:
        self.namespaces: dict[str, Namespace] = {}
        self._failed: dict[str, Namespace] = {}
        self.by_identity: dict[bytes, Peer] = {}
        self.away: set[Peer] = set()

    def __len__(self) -> int:
        return len(self.by_identity) + len(self.away)

    def namespace(self, name: str) -> Namespace:
        """Returns the namespace of that name; one without peers is not kept."""
        return self.namespaces.get(name) or self._failed.get(name) or Namespace(name)

    def add(self, peer: Peer) -> None:
        """Enters a peer whose name, id, incarnation and connection nobody has."""
        namespace = peer.namespace
        self.namespaces[namespace.name] = namespace
        self._failed.pop(namespace.name, None)
        namespace.by_name[peer.info.name] = peer
        namespace.by_id[peer.info.id] = peer
        namespace.by_incarnation[peer.info.incarnation] = peer
        namespace.departed.pop(peer.info.incarnation, None)
        assert peer.identity is not None
        self.by_identity[peer.identity] = peer

    def remove(self, peer: Peer) -> None:
        """Takes a peer out; a namespace ends with its last one."""
        namespace = peer.namespace
        del namespace.by_name[peer.info.name]
        del namespace.by_id[peer.info.id]
        del namespace.by_incarnation[peer.info.incarnation]
        self._disconnect(peer)
        if not namespace.by_incarnation:
            del self.namespaces[namespace.name]
            if namespace.refusals:
                self._failed[namespace.name] = namespace
                if len(self._failed) > _FAILED:
                    del self._failed[next(iter(self._failed))]

    def move(self, peer: Peer, identity: bytes) -> None:
        """Notes that a peer is reached by another connection now."""
        self._disconnect(peer)
        peer.identity = identity
        peer.gone_at, peer.away = float("inf"), ""
        self.by_identity[identity] = peer

    def send_away(self, peer: Peer, reason: str, gone_at: float) -> None:
        """Notes that a peer cannot be reached, and when it counts as lost."""
        self._disconnect(peer)
        peer.gone_at, peer.away = gone_at, reason
        self.away.add(peer)

    def _disconnect(self, peer: Peer) -> None:
        self.away.discard(peer)
        if peer.identity is not None:
            del self.by_identity[peer.identity]
            peer.identity = None
