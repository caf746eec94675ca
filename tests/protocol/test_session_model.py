"""A session against brokers that restart, and a network that loses and repeats what it carries.

What is between the session and the broker keeps its order, as a connection does; when it is
lost, everything that was under way is.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from tensorplay.broker.config import BrokerConfig
from tensorplay.broker.events import Command as BrokerCommand
from tensorplay.broker.events import Forget, Probe, Reachable, Received, Tick, Unreachable
from tensorplay.broker.events import Send as BrokerSend
from tensorplay.broker.state import BrokerState
from tensorplay.protocol import wire
from tensorplay.protocol.messages import Goodbye, Hello, PeerInfo
from tensorplay.protocol.session import (
    Closed,
    Command,
    PeersChanged,
    PeerSession,
    Registered,
    Rejected,
    Send,
    State,
)
from tests.broker.helpers import hello

CONFIG = BrokerConfig(heartbeat_interval=1.0, heartbeat_timeout=5.0, reconnect_grace=1.0)
ME = 1
OTHERS = range(2, 5)


class SessionModel(RuleBasedStateMachine):
    """One session, the broker's own state at the other end, and raw peers beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.broker: BrokerState | None = BrokerState(CONFIG, incarnation=1, now=0.0)
        self.brokers = 1
        self.identity = b"me0"
        self.connections = 0
        self.to_me: list[bytes] = []
        self.session = PeerSession(hello("me", ME))
        #: What the owner of the session has been told.
        self.known: dict[int, PeerInfo] = {}
        self.closed = False
        self.do(self.session.start(self.now))

    # The session's shell.

    def do(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, Send):
                self.to_broker(self.identity, wire.encode(command.message))
            elif isinstance(command, PeersChanged):
                for peer in command.joined:
                    assert peer.incarnation not in self.known, "joined twice"
                    self.known[peer.incarnation] = peer
                for gone in command.left:
                    del self.known[gone.peer.incarnation]  # once, and only who was there
                for peer in command.back:
                    assert peer.incarnation in self.known, "back, but never there"
            elif isinstance(command, Registered):
                assert command.welcome.peer.incarnation == ME
            elif isinstance(command, Rejected | Closed):
                self.closed = True

    def to_broker(self, identity: bytes, header: bytes) -> None:
        if self.broker is not None:
            self.perform(self.broker.handle(Received(identity, header), self.now))

    def perform(self, commands: list[BrokerCommand]) -> None:
        assert self.broker is not None
        todo = list(commands)
        while todo:
            command = todo.pop(0)
            if isinstance(command, BrokerSend) and command.identity == self.identity:
                self.to_me.append(command.header)
            elif isinstance(command, Probe):
                stands = command.identity in self.standing()
                outcome = Reachable if stands else Unreachable
                todo += self.broker.handle(outcome(command.identity), self.now)
            else:
                assert isinstance(command, BrokerSend | Forget)

    def standing(self) -> set[bytes]:
        return {self.identity, *(b"other%d" % number for number in OTHERS)}

    # What may happen.

    @initialize(here=st.sets(st.sampled_from(list(OTHERS))))
    def begin(self, here: set[int]) -> None:
        """It is registered, and others are."""
        for number in sorted(here):
            self.other_comes(number)
        while self.to_me:
            self.arrive(1, False)

    @precondition(lambda self: self.to_me)
    @rule(count=st.integers(1, 5), twice=st.booleans())
    def arrive(self, count: int, twice: bool) -> None:
        """Control messages come, perhaps once more than they were sent."""
        headers, self.to_me = self.to_me[:count], self.to_me[count:]
        for header in headers:
            for _ in range(2 if twice and len(headers) == 1 else 1):
                message = wire.decode(header)
                self.do(self.session.receive(message, self.now))  # type: ignore[arg-type]

    @rule(seconds=st.sampled_from([0.01, 0.5, 1.1, 6.0, 11.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        if self.broker is not None:
            self.perform(self.broker.handle(Tick(), self.now))
        self.do(self.session.tick(self.now))

    @rule(arrived=st.booleans())
    def connect_again(self, arrived: bool) -> None:
        """The connection breaks, with what was under way, and is made anew."""
        self.to_me.clear()
        old, self.connections = self.identity, self.connections + 1
        self.identity = b"me%d" % self.connections
        if arrived and self.broker is not None:
            self.perform(self.broker.handle(Unreachable(old), self.now))
        self.do(self.session.connected(self.now))

    @precondition(lambda self: self.broker is not None)
    @rule()
    def broker_dies(self) -> None:
        self.broker = None
        self.to_me.clear()

    @precondition(lambda self: self.broker is None)
    @rule()
    def broker_starts(self) -> None:
        self.brokers += 1
        self.broker = BrokerState(CONFIG, incarnation=self.brokers, now=self.now)
        self.connections += 1
        self.identity = b"me%d" % self.connections
        self.do(self.session.connected(self.now))

    @rule(number=st.sampled_from(list(OTHERS)))
    def other_comes(self, number: int) -> None:
        message: Hello = hello(f"other{number}", number, rank=number)  # as it had before
        self.to_broker(b"other%d" % number, wire.encode(message))

    @rule(number=st.sampled_from(list(OTHERS)))
    def other_leaves(self, number: int) -> None:
        self.to_broker(b"other%d" % number, wire.encode(Goodbye()))

    # What holds.

    @invariant()
    def the_owner_knows_what_the_session_does(self) -> None:
        assert self.known == self.session.peers

    @invariant()
    def it_is_never_refused(self) -> None:
        assert not self.closed
        assert self.session.state in (State.REGISTERING, State.REGISTERED)

    def teardown(self) -> None:
        """In a quiet world it is registered soon, and knows exactly who is there."""
        if self.broker is None:
            self.broker_starts()
        assert self.broker is not None
        for _ in range(30):
            self.pass_time(1.0)
            while self.to_me:
                self.arrive(1, False)
        assert self.session.state is State.REGISTERED
        (namespace,) = self.broker.registry.namespaces.values()
        assert set(self.known) == set(namespace.by_incarnation)


SessionModel.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestSession = SessionModel.TestCase
