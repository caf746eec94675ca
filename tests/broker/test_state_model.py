"""The broker's state against a model of what every peer must have been told."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

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
    Tick,
    Unreachable,
)
from tensorplay.broker.state import BrokerState
from tensorplay.protocol import wire
from tensorplay.protocol.messages import (
    Farewell,
    Goodbye,
    Heartbeat,
    Kind,
    Refused,
    Role,
    Roster,
    Route,
    Status,
    StatusRequest,
    Stranger,
    Undeliverable,
    Welcome,
)
from tests.broker.helpers import hello

#: Few of everything, so that all of it collides.
CONNECTIONS = 4

connections = st.sampled_from([b"c%d" % number for number in range(CONNECTIONS)])
names = st.sampled_from(["w0", "w1"])
namespaces = st.sampled_from(["default", "default", "other"])
incarnations = st.integers(1, 5)


@dataclass
class Seen:
    """What a registered peer has been told."""

    namespace: str
    incarnation: int
    peers: set[int] = field(default_factory=set)


class BrokerModel(RuleBasedStateMachine):
    """Connections that come, talk, lie and die in any order.

    The model believes only what is sent: a connection is registered from its WELCOME to its
    FAREWELL or death, and knows the peers that WELCOME and ROSTER told it of.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.state = BrokerState(BrokerConfig(max_peers=3), incarnation=1, now=0.0)
        self.dead: set[bytes] = set()
        self.seen: dict[bytes, Seen] = {}

    # What the server does.

    def happen(self, event: Event, *, overflow: bool = False) -> None:
        todo = list(self.state.handle(event, self.now))
        while todo:
            command = todo.pop(0)
            outcome = self.do(command, overflow)
            if outcome is not None:
                todo += self.state.handle(outcome, self.now)

    def do(self, command: Command, overflow: bool) -> Event | None:
        if isinstance(command, Forget):
            self.seen.pop(command.identity, None)
            return None
        if command.identity in self.dead:
            return Unreachable(command.identity)
        if isinstance(command, Probe):
            return Reachable(command.identity)
        if isinstance(command, Forward):
            here, there = self.seen[command.sender], self.seen[command.identity]
            assert here.namespace == there.namespace
            assert here.incarnation == command.route.src
            assert there.incarnation == command.route.dst
            return Overflowed(command) if overflow else None
        self.deliver(command)
        return None

    def deliver(self, command: Send) -> None:
        message = wire.decode(command.header)
        if isinstance(message, Welcome):
            namespace = self.state.registry.by_identity[command.identity].namespace.name
            self.seen[command.identity] = Seen(
                namespace,
                message.peer.incarnation,
                {peer.incarnation for peer in message.roster},
            )
        elif isinstance(message, Roster):
            seen = self.seen[command.identity]
            for peer in message.joined:  # known ones are back
                seen.peers.add(peer.incarnation)
            for departure in message.left:
                seen.peers.remove(departure.peer.incarnation)
        elif isinstance(message, Farewell):
            self.seen.pop(command.identity, None)
        else:
            assert isinstance(message, Refused | Stranger | Undeliverable | Status)

    # What may happen.

    @rule(
        connection=connections,
        name=names,
        namespace=namespaces,
        incarnation=incarnations,
        rank=st.integers(-4, 3),
        role=st.sampled_from(Role),
        world_size=st.sampled_from([0, 0, 0, 2, 3]),
    )
    def say_hello(
        self,
        connection: bytes,
        name: str,
        namespace: str,
        incarnation: int,
        rank: int,
        role: Role,
        world_size: int,
    ) -> None:
        if connection in self.dead:
            return
        message = hello(
            name,
            incarnation,
            namespace=namespace,
            rank=rank,
            role=role,
            world_size=world_size,
        )
        self.happen(Received(connection, wire.encode(message)))

    @rule(connection=connections, silently=st.booleans())
    def leave(self, connection: bytes, silently: bool) -> None:
        if silently:
            self.dead.add(connection)
        elif connection not in self.dead:
            self.happen(Received(connection, wire.encode(Goodbye())))

    @rule(connection=connections)
    def come_alive(self, connection: bytes) -> None:
        """A connection of the same identity never comes back; the model reuses its letter."""
        if connection in self.dead:
            self.happen(Unreachable(connection))
            self.dead.remove(connection)

    @rule(
        connection=connections,
        kind=st.sampled_from([kind for kind in Kind if kind >= Kind.REQUEST]),
        src=incarnations,
        dst=incarnations,
        overflow=st.booleans(),
    )
    def talk(self, connection: bytes, kind: Kind, src: int, dst: int, overflow: bool) -> None:
        if connection not in self.dead:
            header = wire.encode(Route(kind, dst, src, 1, 10))
            self.happen(Received(connection, header, 10), overflow=overflow)

    @rule(connection=connections, message=st.sampled_from([Heartbeat(0.0), StatusRequest()]))
    def say(self, connection: bytes, message: Heartbeat | StatusRequest) -> None:
        if connection not in self.dead:
            self.happen(Received(connection, wire.encode(message)))

    @rule(connection=connections, header=st.binary(max_size=20), size=st.integers(0, 5))
    def babble(self, connection: bytes, header: bytes, size: int) -> None:
        if connection not in self.dead:
            self.happen(Received(connection, header, size))

    @rule(seconds=st.floats(0.0, 3.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.happen(Tick())
        assert self.now < self.state.next_tick()

    # What must hold.

    @invariant()
    def tables_are_in_step(self) -> None:
        registry = self.state.registry
        count = 0
        for name, namespace in registry.namespaces.items():
            peers = list(namespace)
            assert peers
            count += len(peers)
            for peer in peers:
                assert peer.namespace is namespace
                if peer.identity is None:
                    assert peer in registry.away
                    assert self.now < peer.gone_at
                else:
                    assert registry.by_identity[peer.identity] is peer
                assert namespace.by_name[peer.info.name] is peer
                assert namespace.by_id[peer.info.id] is peer
                assert peer.info.id != -1
            assert len(namespace.by_name) == len(namespace.by_id) == len(peers)
            assert len({peer.world_size for peer in peers} - {0}) <= 1
            assert namespace.name == name
        assert count == len(registry) <= 3

    @invariant()
    def every_registered_peer_knows_its_namespace(self) -> None:
        for identity, peer in self.state.registry.by_identity.items():
            if identity not in self.dead:
                assert self.seen[identity].peers == set(peer.namespace.by_incarnation)

    @invariant()
    def nobody_else_is_told_anything(self) -> None:
        registered = self.state.registry.by_identity.keys()
        assert self.seen.keys() <= registered

    @invariant()
    def no_claim_is_left_undecided(self) -> None:
        assert self.state._claims == {}
        assert self.state._waiting.keys() <= self.state.registry.by_identity.keys()

    def teardown(self) -> None:
        # A claim may move a peer to a connection that has died meanwhile; it is probed, too.
        self.dead = {b"c%d" % number for number in range(CONNECTIONS)}
        for identity in self.dead:
            self.happen(Unreachable(identity))
        for _ in range(3):
            self.now += 10.0
            self.happen(Tick())
        assert len(self.state.registry) == 0
        assert self.state.registry.away == set()
        assert self.state.registry.namespaces == {}
        assert self.state._strangers == {}


BrokerModel.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestBrokerModel = BrokerModel.TestCase
