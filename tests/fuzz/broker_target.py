"""Damaged messages for the broker's state, among peers that must notice nothing."""

from __future__ import annotations

import random
from collections import Counter

from tensorplay.broker.config import BrokerConfig
from tensorplay.broker.events import (
    Event,
    Forget,
    Forward,
    Overflowed,
    Probe,
    Reachable,
    Received,
    Send,
    Tick,
    Unreachable,
)
from tensorplay.broker.state import BrokerState
from tensorplay.protocol import wire
from tensorplay.protocol.messages import (
    PROTOCOL_VERSION,
    Goodbye,
    Heartbeat,
    Hello,
    Kind,
    Role,
    Roster,
    Route,
    StatusRequest,
    Undeliverable,
    Welcome,
)
from tests.fuzz.mutate import Mutator
from tests.protocol.test_messages import EXAMPLES

_FRIENDS = (b"friend0", b"friend1")
_MAX_PEERS = 40
#: Frames from one look at everything to the next.
_LOOK = 5000


class BrokerTarget:
    """The state of a broker with two friends who talk, and connections that send rubbish.

    Args:
        seed: Decides what is sent.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._mutator = Mutator(self._random)
        self._now = 0.0
        self._state = BrokerState(BrokerConfig(max_peers=_MAX_PEERS), incarnation=7, now=0.0)
        # Nobody can guess these; everybody else's are small numbers.
        self._incarnations = [self._random.randrange(1 << 40, 1 << 62) for _ in _FRIENDS]
        self._foes = [b"foe%d" % number for number in range(30)]
        self._samples = [wire.encode(example) for example in EXAMPLES]
        self.sent: Counter[str] = Counter()
        for number, identity in enumerate(_FRIENDS):
            incarnation = self._incarnations[number]
            hello = Hello(PROTOCOL_VERSION, f"friend{number}", "n", incarnation, Role.WORKER)
            self._handle(Received(identity, wire.encode(hello)))
        for number in range(8):
            for name in ("w", "friend0", f"foe{number}"):
                hello = Hello(PROTOCOL_VERSION, name, "n", number + 1, Role.WORKER, number)
                self._samples.append(wire.encode(hello))
            for kind in (Kind.REQUEST, Kind.REPLY, Kind.CHUNK, Kind.CREDIT, Kind.CANCEL):
                self._samples.append(wire.encode(Route(kind, number + 1, number, 5, 100)))
            self._samples.append(wire.encode(Goodbye("done")))
            self._samples.append(wire.encode(Heartbeat(1.0, {"calls": 1.0})))
        self._samples.append(wire.encode(StatusRequest()))

    def run(self, frames: int) -> None:
        """Sends so many damaged headers."""
        draw = self._random
        for number in range(frames):
            foe = draw.choice(self._foes)
            sample = self._sample(foe)
            if draw.random() < 0.7:
                sample = self._mutator.mutate(sample, draw.choice(self._samples))
            self._now += 0.001
            self._handle(Received(foe, sample, draw.choice((0, 0, 0, 9, 1 << 40))))
            if number % 100 == 0:
                self._handle(Tick())
                self._handle(Unreachable(draw.choice(self._foes)))
            if number % _LOOK == 0:
                self._look(number)
        self._look(frames)

    def _sample(self, foe: bytes) -> bytes:
        """Returns a valid header, often one that a registered foe may send."""
        draw = self._random
        peer = self._state.registry.by_identity.get(foe)
        if peer is None and draw.random() < 0.2:
            name = foe.decode()
            return wire.encode(
                Hello(PROTOCOL_VERSION, name, "n", 100 + self._foes.index(foe), Role.CLIENT)
            )
        if peer is None or draw.random() < 0.5:
            return draw.choice(self._samples)
        kind = draw.choice([kind for kind in Kind if kind >= Kind.REQUEST])
        dst = draw.choice([*peer.namespace.by_incarnation, 3])
        return wire.encode(Route(kind, dst, peer.info.incarnation, draw.randrange(99), 100))

    def _handle(self, event: Event) -> None:
        todo = [event]
        while todo:
            for command in self._state.handle(todo.pop(0), self._now):
                if command.identity in _FRIENDS:
                    self._check_friend(command)
                if isinstance(command, Probe):
                    dead = command.identity not in _FRIENDS and self._random.random() < 0.2
                    outcome = Unreachable if dead else Reachable
                    todo.append(outcome(command.identity))
                elif isinstance(command, Forward):
                    self.sent["forwarded"] += 1
                    if command.identity not in _FRIENDS and self._random.random() < 0.1:
                        todo.append(Overflowed(command))
                elif isinstance(command, Send):
                    self.sent["answered"] += 1

    def _check_friend(self, command: Send | Probe | Forward | Forget) -> None:
        """Fails unless a command concerns a friend in a way that it may."""
        assert not isinstance(command, Forget), "a friend was forgotten"
        if isinstance(command, Forward):
            sender = self._state.registry.by_identity[command.sender]
            assert command.route.src == sender.info.incarnation, "a forged sender got through"
        elif isinstance(command, Send):
            message = wire.decode(command.header)
            assert isinstance(message, Roster | Welcome | Undeliverable), message

    def _look(self, number: int) -> None:
        """Fails if a friend notices anything, or if something has grown."""
        state = self._state
        for position, identity in enumerate(_FRIENDS):
            peer = state.registry.by_identity[identity]
            assert (peer.info.name, peer.info.id) == (f"friend{position}", position)
            assert peer.info.incarnation == self._incarnations[position]
        here, there = self._incarnations
        header = wire.encode(Route(Kind.REQUEST, there, here, number, 3))
        (forward,) = state.handle(Received(_FRIENDS[0], header, 3), self._now)
        assert isinstance(forward, Forward)
        assert forward.identity == _FRIENDS[1]
        self.sent["peers"] = max(self.sent["peers"], len(state.registry))
        assert len(state.registry) <= _MAX_PEERS
        assert len(state.registry.namespaces) <= len(state.registry)
        assert len(state._strangers) <= 4096
        assert not state._claims, "a claim was never decided"
        for namespace in state.registry.namespaces.values():
            assert len(namespace.departed) <= 64
            assert len(namespace.refusals) <= 8
        assert len(state.counters) < 20, state.counters
