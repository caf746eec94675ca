"""What the broker knows, and how it answers: no socket, no clock.

Rule 1: everything that changes the state is here.  The server feeds in events with the
time and does what the returned commands say, in order.

Rule 2: a connection is not a peer.  A peer is known by its name and incarnation; HELLO
ties it to the connection it came by, and the same incarnation by another connection is
the same peer, which has reconnected: it moves there, and the others are told, because
what was on its way to it may be lost.

Rule 3: whether a peer is alive is decided by its connection, never by its silence: a
process that computes for minutes says nothing, but its ZeroMQ thread answers ZeroMQ's own
heartbeats.  The broker probes every connection each interval.  A peer whose connection
does not stand any more is away; one that is not back in time is lost.

Rule 4: a name or rank is refused only if its holder's connection was found standing after
it was asked for.  Until then the newcomer is a claim.  A holder that is away loses it.
The same holds for an incarnation, which others know, unless its key tells whose it is.

Rule 5: where keys are asked for, a peer is bound to the key that its HELLO came with.  A
message that comes by its connection with another key is not its own, and a peer whose key
is revoked is removed at the next beat.  The key of a message is what ZeroMQ's handshake
has shown, never what the message says.
"""

from __future__ import annotations

import logging
import math
import platform
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

from tensorplay.broker import admission
from tensorplay.broker.config import BrokerConfig
from tensorplay.broker.events import (
    Command,
    Event,
    Forget,
    Forward,
    Overflowed,
    Probe,
    Reachable,
    Received,
    Send,
    Unreachable,
)
from tensorplay.broker.health import Health
from tensorplay.broker.history import History
from tensorplay.broker.operators import Operators
from tensorplay.broker.registry import Namespace, Peer, Registry, Traffic
from tensorplay.broker.rights import Rights
from tensorplay.broker.sampling import sample
from tensorplay.broker.status import snapshot
from tensorplay.errors import ProtocolError
from tensorplay.keys import Grant
from tensorplay.protocol import wire
from tensorplay.protocol.messages import (
    PROTOCOL_VERSION,
    Answer,
    Ask,
    Control,
    Departure,
    Farewell,
    Goodbye,
    Heartbeat,
    Hello,
    Kind,
    PeerInfo,
    Refused,
    Roster,
    Route,
    Status,
    StatusRequest,
    Stranger,
    Undeliverable,
    Welcome,
)
from tensorplay.version import __version__

_log = logging.getLogger(__name__)

#: A peer's own headers are small; what they hold is kept, and sent to everybody.
MAX_PEER_HEADER = 16 << 10
#: Kinds that nobody waits for: what is lost of them is asked for again.
_UNNUMBERED = frozenset({Kind.CREDIT, Kind.SYNC})
#: Seconds between two answers to a connection that is unknown or sends rubbish.
COMPLAINT_SECONDS = 0.5
#: Connections that may wait for another one of their peer to be gone.
_MAX_WAITING = 8
#: Failed calls that are taken from one heartbeat.
_MAX_ERRORS = 16
#: Unknown connections of which it is remembered that they were told so.
_MAX_STRANGERS = 4096


class BrokerState:
    """The peers, and what happens to them.

    Args:
        config: The options.
        incarnation: A random number; tells this broker from the one before a restart.
        now: The time, in seconds of any steady clock.
        queued_bytes: Gives the bytes that wait for a connection, for the status.
        grants: Gives what the keys may do at this moment, by public key; None asks for none.
    """

    def __init__(
        self,
        config: BrokerConfig,
        incarnation: int,
        now: float,
        queued_bytes: Callable[[bytes], int] = lambda identity: 0,
        grants: Callable[[], Mapping[str, Grant]] | None = None,
    ) -> None:
        self.config = config
        self.incarnation = incarnation
        self.started = now
        self.queued_bytes = queued_bytes
        self.rights = Rights(grants)
        self.addresses: tuple[str, ...] = ()
        self.registry = Registry()
        self.operators = Operators(self.registry)
        self.history = History()
        self.health = Health()
        self.counters: Counter[str] = Counter()
        self.versions = {"tensorplay": __version__, "python": platform.python_version()}
        self._next_beat = now + config.heartbeat_interval
        self._strangers: dict[bytes, float] = {}  # when each may be told again
        # By the holder's connection, then the claimant's: what was asked for, with which key.
        self._claims: dict[bytes, dict[bytes, tuple[Hello, str]]] = {}
        self._waiting: dict[bytes, dict[bytes, tuple[Hello, str]]] = {}  # for it to be gone

    def handle(self, event: Event, now: float) -> list[Command]:
        """Takes an event and returns what is to be done about it."""
        if isinstance(event, Received):
            return self._received(event, now)
        if isinstance(event, Unreachable):
            return self._unreachable(event, now)
        if isinstance(event, Reachable):
            return self._settle(event.identity, now)
        if isinstance(event, Overflowed):
            return self._overflowed(event.forward, now)
        return self._tick(now)

    def next_tick(self) -> float:
        """Returns the time at which a Tick has something to do."""
        return min(self._next_beat, *(peer.gone_at for peer in self.registry.away), math.inf)

    # Messages.

    def _received(self, event: Received, now: float) -> list[Command]:
        identity = event.identity
        peer = self.registry.by_identity.get(identity)
        if peer is not None and peer.key != event.key:
            self.counters["forged"] += 1
            return self._stranger(identity, now, "this connection has another key than its peer")
        if peer is not None:
            peer.last_heard = now
        try:
            if len(event.header) > MAX_PEER_HEADER:
                raise ProtocolError(f"a peer's header has {len(event.header)} bytes")
            message = wire.decode(event.header)
            if isinstance(message, Route):
                return self._route(identity, peer, message, event.size, now)
            if event.size:
                raise ProtocolError(f"{event.size} bytes follow a control message")
        except ProtocolError as error:
            return self._malformed(event, peer, str(error), now)
        if isinstance(message, Hello):
            return self._hello(identity, message, event.key, now)
        if peer is None and not self.rights.may_speak(event.key):
            return self._stranger(identity, now, "the key of this connection is not allowed")
        if isinstance(message, StatusRequest):
            return [_send(identity, Status(snapshot(self, now, self.rights.sees(event.key))))]
        if isinstance(message, Goodbye):
            return self._goodbye(identity, peer, message, now)
        if isinstance(message, Heartbeat):
            if peer is None:
                return self._stranger(identity, now)
            self._beat(peer, message, now)
            return []
        if isinstance(message, Ask):
            return self._ask(identity, message, event.key, now)
        if isinstance(message, Answer):
            return [] if peer is None else self.operators.answered(peer, message)
        return self._malformed(event, peer, f"{type(message).__name__} is not for a broker", now)

    def _route(
        self, identity: bytes, peer: Peer | None, route: Route, size: int, now: float
    ) -> list[Command]:
        if peer is None:
            return self._stranger(identity, now)
        if route.src != peer.info.incarnation:
            self.counters["forged"] += 1
            return self._complain(
                peer, f"a message claimed to be from {route.src}, which {peer} is not", now
            )
        receiver = peer.namespace.by_incarnation.get(route.dst)
        if receiver is None:
            return self._gone(peer, route)
        total = max(size, route.size)
        if total > self.config.max_message_bytes:
            self.counters["too-large"] += 1
            text = (
                f"a message of {total} bytes to {receiver.info.name!r} is larger than the "
                f"broker's limit of {self.config.max_message_bytes} (--max-message-bytes)"
            )
            return [_undeliverable(identity, route, "too-large", text)]
        if receiver.identity is None:
            return self._away(identity, receiver, route)
        peer.received.add(size)
        receiver.sent.add(size)
        traffic = peer.sent_to.get(route.dst)
        if traffic is None:
            traffic = peer.sent_to[route.dst] = Traffic()
        traffic.add(size)
        return [Forward(receiver.identity, identity, route, size)]

    def _gone(self, sender: Peer, route: Route) -> list[Command]:
        self.counters["gone"] += 1
        if route.kind in _UNNUMBERED or sender.identity is None:
            return []
        departure = sender.namespace.departed.get(route.dst)
        if departure is None:
            text = f"no peer {route.dst} is registered in namespace {sender.namespace.name!r}"
        else:
            text = f"peer {departure.peer.name!r} is gone: {departure.reason}"
        return [_undeliverable(sender.identity, route, "gone", text)]

    def _away(self, sender: bytes, receiver: Peer, route: Route) -> list[Command]:
        self.counters["away"] += 1
        if route.kind in _UNNUMBERED:
            return []
        text = f"peer {receiver.info.name!r} is away: {receiver.away}"
        return [_undeliverable(sender, route, "away", text)]

    def _overflowed(self, forward: Forward, now: float) -> list[Command]:
        self.counters["full"] += 1
        sender = self.registry.by_identity.get(forward.sender)
        receiver = self.registry.by_identity.get(forward.identity)
        if receiver is not None:
            receiver.sent.messages -= 1
            receiver.sent.bytes -= forward.size
        if sender is None or forward.route.kind == Kind.CREDIT:
            return []
        name = receiver.info.name if receiver is not None else "?"
        text = (
            f"peer {name!r} reads too slowly: {self.config.queue_bytes} bytes (--queue-bytes) "
            "wait for it in the broker already"
        )
        self._note(now, "full", sender, text)
        return [_undeliverable(forward.sender, forward.route, "full", text)]

    def _malformed(
        self, event: Received, peer: Peer | None, text: str, now: float
    ) -> list[Command]:
        self.counters["malformed"] += 1
        version = wire.hello_protocol(event.header[:MAX_PEER_HEADER])
        if version is not None:
            refusal = (
                admission.refused("invalid", f"the HELLO is malformed: {text}")
                if version == PROTOCOL_VERSION
                else admission.wrong_protocol(version)
            )
            self.counters["refused"] += 1
            return [_send(event.identity, refusal)]
        if peer is None:
            return self._stranger(event.identity, now, f"a message was malformed: {text}")
        return self._complain(peer, f"a message was malformed: {text}", now)

    def _complain(self, peer: Peer, text: str, now: float) -> list[Command]:
        """Tells a peer of its mistake, and the log of its first one."""
        if now < peer.next_complaint or peer.identity is None:
            return []
        if peer.next_complaint == float("-inf"):
            _log.warning("dropped a message of peer %s: %s", peer, text)
        self._note(now, "malformed", peer, text)
        peer.next_complaint = now + COMPLAINT_SECONDS
        return [_send(peer.identity, Undeliverable(0, 0, 0, "malformed", text))]

    def _stranger(self, identity: bytes, now: float, reason: str = "") -> list[Command]:
        self.counters["stranger"] += 1
        if now < self._strangers.get(identity, now):
            return []
        if identity not in self._strangers:
            if len(self._strangers) >= _MAX_STRANGERS:
                return []
            if reason:
                _log.warning("dropped a message of an unknown connection: %s", reason)
        self._strangers[identity] = now + COMPLAINT_SECONDS
        return [_send(identity, Stranger(reason or "not registered here"))]

    # Coming.

    def _hello(self, identity: bytes, hello: Hello, key: str, now: float) -> list[Command]:
        refusal = admission.check(hello) or self.rights.check(hello, key)
        if refusal is not None:
            return self._refuse(identity, hello, refusal, now)
        namespace = self.registry.namespace(hello.namespace)
        known = namespace.by_incarnation.get(hello.incarnation)
        current = self.registry.by_identity.get(identity)
        if current is not None and current is not known:
            text = f"this connection is registered as {current}; say GOODBYE first"
            return self._refuse(identity, hello, admission.refused("invalid", text), now)
        if known is not None:
            return self._resume(identity, hello, known, key, now)
        refusal = admission.check_world(hello, namespace)
        if refusal is not None:
            return self._refuse(identity, hello, refusal, now)
        holder = admission.holder(hello, namespace)
        if holder is not None and holder.identity is None:
            departure = Departure(holder.info, clean=False, reason=holder.away)
            return [*self._remove(holder, departure, now), *self._hello(identity, hello, key, now)]
        if holder is not None:
            return self._claim(identity, hello, key, holder, now)
        return self._register(identity, hello, namespace, key, now)

    def _claim(
        self, identity: bytes, hello: Hello, key: str, holder: Peer, now: float
    ) -> list[Command]:
        """Finds out whether a peer is there whose name, rank or incarnation is asked for."""
        assert holder.identity is not None
        self._claims.setdefault(holder.identity, {})[identity] = hello, key
        return [Probe(holder.identity, self._heartbeat(now))]

    def _resume(
        self, identity: bytes, hello: Hello, peer: Peer, key: str, now: float
    ) -> list[Command]:
        if hello.name != peer.info.name or key != peer.key:
            text = f"incarnation {hello.incarnation} is registered as {peer}"
            return self._refuse(identity, hello, admission.refused("invalid", text), now)
        if peer.identity not in (identity, None) and not key:
            # Everybody in the namespace knows its incarnation.
            return self._claim(identity, hello, key, peer, now)
        commands: list[Command] = []
        if identity != peer.identity:
            self.counters["resumed"] += 1
            if peer.identity is not None:
                commands.append(Forget(peer.identity))
            self.registry.move(peer, identity)
            self._strangers.pop(identity, None)
            others = (key for key in _reachable(peer.namespace) if key != identity)
            commands += _send_all(others, Roster(joined=[peer.info]))
        peer.last_heard = now
        return [self._welcome(peer, hello), *commands]

    def _register(
        self, identity: bytes, hello: Hello, namespace: Namespace, key: str, now: float
    ) -> list[Command]:
        if len(self.registry) >= self.config.max_peers:
            text = f"the broker has its limit of {self.config.max_peers} peers (--max-peers)"
            return self._refuse(identity, hello, admission.refused("full", text), now)
        number = admission.choose_id(hello, namespace)
        if number is None:
            text = f"all ranks of the world of size {hello.world_size} are taken"
            return self._refuse(identity, hello, admission.refused("world-size", text), now)
        info = PeerInfo(
            hello.name,
            number,
            hello.incarnation,
            hello.role,
            hello.host,
            hello.pid,
            hello.device,
            hello.versions,
            *self.rights.of(key),
        )
        peer = Peer(info, namespace, identity, hello.world_size, since=now, last_heard=now, key=key)
        others = list(_reachable(namespace))
        self.registry.add(peer)
        self._strangers.pop(identity, None)
        self.counters["joined"] += 1
        self._note(now, "joined", peer, f"joined from {info.host or '?'}, pid {info.pid}")
        _log.info("peer %s joined namespace %r", peer, namespace.name)
        refusals = namespace.enter_world(peer) if hello.world_size else []
        late = [identity] if refusals else []
        return [
            self._welcome(peer, hello),
            *_send_all(late, Roster(refused=refusals)),
            *_send_all(others, Roster(joined=[info])),
        ]

    def _welcome(self, peer: Peer, hello: Hello) -> Command:
        assert peer.identity is not None
        others = [other for other in peer.namespace if other is not peer]
        return _send(
            peer.identity,
            Welcome(
                PROTOCOL_VERSION,
                self.incarnation,
                peer.info,
                [other.info for other in peer.namespace],
                self.config.heartbeat_interval,
                self.config.heartbeat_timeout,
                self.config.max_message_bytes,
                self.versions,
                admission.version_warnings(hello, self.versions, others),
            ),
        )

    def _refuse(self, identity: bytes, hello: Hello, refusal: Refused, now: float) -> list[Command]:
        self.counters["refused"] += 1
        name, where = hello.name[: admission.MAX_NAME], hello.namespace[: admission.MAX_NAME]
        self.history.note(
            now, "refused", _printable(where), _printable(name), _printable(refusal.text)
        )
        _log.warning("refused %r: %s", hello.name[: admission.MAX_NAME], refusal.text)
        waiting = []
        if hello.world_size:
            namespace = self.registry.namespace(hello.namespace)
            namespace.refuse(hello.rank, refusal.text)
            waiting = [
                peer.identity for peer in namespace if peer.world_size and peer.identity is not None
            ]
        return [
            _send(identity, refusal),
            *_send_all(waiting, Roster(refused=[refusal.text])),
        ]

    def _cut_off(self, now: float) -> list[Command]:
        """Removes the peers whose keys do not let them be what they are any more."""
        reason = "its key was revoked, or does not allow any more what it did"
        commands: list[Command] = []
        for peer in self.rights.revoked(self.registry):
            if peer.identity is not None:
                refusal = admission.refused("key", f"{peer} was removed: {reason}")
                commands.append(_send(peer.identity, refusal))
            departure = Departure(peer.info, clean=False, reason=reason)
            commands += self._remove(peer, departure, now)
        return commands

    def _settle(self, identity: bytes, now: float) -> list[Command]:
        """Decides the claims on the peer of a connection that has just been probed."""
        commands: list[Command] = []
        claims = self._claims.pop(identity, {})
        if identity not in self.registry.by_identity:
            claims = {**self._waiting.pop(identity, {}), **claims}
        for claimant, (hello, key) in claims.items():
            namespace = self.registry.namespace(hello.namespace)
            holder = admission.holder(hello, namespace)
            if holder is None or holder.identity != identity:
                commands += self._hello(claimant, hello, key, now)
            elif holder.info.incarnation == hello.incarnation:
                # If it is the peer itself, its old connection will be found to be gone.
                self.counters["taken-over"] += 1
                waiting = self._waiting.setdefault(identity, {})
                if len(waiting) < _MAX_WAITING:
                    waiting[claimant] = hello, key
                commands += self._stranger(claimant, now, f"{holder} has another connection")
            else:
                commands += self._refuse(claimant, hello, admission.taken(hello, holder), now)
        return commands

    # Operators, and what is told to them.

    def _ask(self, identity: bytes, ask: Ask, key: str, now: float) -> list[Command]:
        refusal = self.rights.check_ask(ask, key, self.registry)
        if refusal:
            return [_send(identity, Answer(ask.id, error=refusal))]
        commands, peer = self.operators.ask(identity, ask, now)
        if peer is not None and ask.what == "kill":
            departure = Departure(peer.info, clean=False, reason="killed by an operator")
            commands += self._remove(peer, departure, now)
        return commands

    def _beat(self, peer: Peer, heartbeat: Heartbeat, now: float) -> None:
        if heartbeat.stats:  # none go with errors, which wait for no beat
            peer.stats = heartbeat.stats
        for text in heartbeat.errors[:_MAX_ERRORS]:
            self._note(now, "error", peer, _printable(text))

    def _note(self, now: float, kind: str, peer: Peer, text: str) -> None:
        self.history.note(now, kind, peer.namespace.name, peer.info.name, text)

    # Going.

    def _goodbye(
        self, identity: bytes, peer: Peer | None, goodbye: Goodbye, now: float
    ) -> list[Command]:
        if peer is None:
            return [_send(identity, Farewell())]
        departure = Departure(peer.info, clean=True, reason=_printable(goodbye.reason))
        return [_send(identity, Farewell()), *self._remove(peer, departure, now)]

    def _unreachable(self, event: Unreachable, now: float) -> list[Command]:
        self._strangers.pop(event.identity, None)
        commands: list[Command] = [Forget(event.identity)]
        peer = self.registry.by_identity.get(event.identity)
        if peer is not None:
            silent = now - peer.last_heard
            reason = event.reason or f"connection lost, last heard of {silent:.1f} s ago"
            self.registry.send_away(peer, reason, now + self.config.reconnect_grace)
        return commands + self._settle(event.identity, now) + self._expire(now)

    def _expire(self, now: float) -> list[Command]:
        """Removes the peers that were away for too long."""
        commands: list[Command] = []
        for peer in [peer for peer in self.registry.away if now >= peer.gone_at]:
            departure = Departure(peer.info, clean=False, reason=peer.away)
            commands += self._remove(peer, departure, now)
        return commands

    def _remove(self, peer: Peer, departure: Departure, now: float) -> list[Command]:
        how = "left" if departure.clean else "lost"
        self.counters[how] += 1
        self._note(now, how, peer, departure.reason)
        _log.log(
            logging.INFO if departure.clean else logging.WARNING,
            "peer %s left namespace %r: %s",
            peer,
            peer.namespace.name,
            departure.reason,
        )
        if peer.identity is not None:
            self._waiting.pop(peer.identity, None)
        self.registry.remove(peer)
        peer.namespace.remember(departure)
        return [
            *_send_all(_reachable(peer.namespace), Roster(left=[departure])),
            *self.operators.lost(peer, departure.reason),
        ]

    # Time.

    def _tick(self, now: float) -> list[Command]:
        if now < self._next_beat:
            return self._expire(now)
        self._next_beat = now + self.config.heartbeat_interval
        self._strangers = {key: until for key, until in self._strangers.items() if now < until}
        sample(self.registry, self.history, self.health.loop_latency, now)
        header = self._heartbeat(now)
        probes = [Probe(identity, header) for identity in self.registry.by_identity]
        return [*self._expire(now), *self._cut_off(now), *probes]

    def _heartbeat(self, now: float) -> bytes:
        return wire.encode(Heartbeat(sent=now))


def _reachable(namespace: Namespace) -> Iterator[bytes]:
    """Yields the connections of a namespace's peers."""
    return (peer.identity for peer in namespace if peer.identity is not None)


def _send(identity: bytes, message: Control) -> Send:
    return Send(identity, wire.encode(message))


def _send_all(identities: Iterable[bytes], message: Control) -> list[Command]:
    header = wire.encode(message)
    return [Send(identity, header) for identity in identities]


def _printable(text: str) -> str:
    """Returns what may be logged of a peer's own words."""
    return "".join(letter if letter.isprintable() else " " for letter in text[: admission.MAX_TEXT])


def _undeliverable(identity: bytes, route: Route, code: str, text: str) -> Send:
    return _send(identity, Undeliverable(route.kind, route.dst, route.id, code, text))
