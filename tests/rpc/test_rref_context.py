"""The references of an agent, with agents that hand each other what is to be sent."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tensorplay.distributed.rpc.rref_context import Hold, RRefContext
from tensorplay.errors import NotInitializedError, RRefError, WorkerLostError
from tensorplay.protocol.messages import PeerInfo
from tensorplay.protocol.refs import RefToken, RRefKey


class FakeAgent:
    """An agent whose reports of counts arrive when the test says so."""

    rpc_timeout = 60.0

    def __init__(self, peers: dict[int, FakeAgent], incarnation: int) -> None:
        self.peers = peers
        self.incarnation = incarnation
        self.info = PeerInfo(f"peer{incarnation}", incarnation, incarnation)
        self.wakes = 0
        self.submitted: list[tuple[Callable[..., object], tuple[Any, ...]]] = []
        self.rrefs = RRefContext(self, lambda fn, *args: self.submitted.append((fn, args)))
        peers[incarnation] = self

    def peer_by_incarnation(self, incarnation: int) -> PeerInfo | None:
        peer = self.peers.get(incarnation)
        return None if peer is None else peer.info

    def call(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("nothing is called here")

    def wake(self) -> None:
        self.wakes += 1

    def flush(self) -> int:
        """Delivers the reports that are due and their acknowledgements."""
        due = self.rrefs.drain()
        for owner, adds, releases in due:
            self.peers[owner].rrefs.apply(self.incarnation, adds, releases)
            if adds:
                self.rrefs.acknowledged(owner)
        return len(due)

    def send(self, key: RRefKey, owner: int, dst: FakeAgent, **options: Any) -> list[RefToken]:
        """Sends a message with one reference; it has arrived, and is not unpacked."""
        exporter = self.rrefs.exporter(dst.incarnation, **options)
        entry = self.rrefs.lookup(key) if owner == self.incarnation else None
        exporter.add(None, key, owner, entry)  # type: ignore[arg-type]
        self.flush()
        dst.rrefs.received(exporter.tokens, self.incarnation)
        return exporter.tokens

    def run_submitted(self) -> None:
        for function, args in self.submitted:
            function(*args)
        self.submitted.clear()


@pytest.fixture
def agents() -> list[FakeAgent]:
    peers: dict[int, FakeAgent] = {}
    return [FakeAgent(peers, n) for n in range(3)]


def make(owner: FakeAgent, user: FakeAgent, value: object = "value") -> tuple[RRefKey, Hold]:
    """Has ``owner`` make an object for ``user``."""
    key = user.rrefs.new_key()
    hold = user.rrefs.hold(key, owner.incarnation, new=True)
    owner.rrefs.expect(key, user.incarnation)
    owner.rrefs.fulfil(key, value)
    return key, hold


def are_empty(agents: list[FakeAgent]) -> bool:
    for agent in agents:
        agent.flush()
    return not any(int(n) for agent in agents for n in agent.rrefs.debug_info().values())


def test_an_object_is_freed_when_its_user_drops_it(agents: list[FakeAgent]) -> None:
    owner, user, _ = agents
    key, hold = make(owner, user)
    assert owner.rrefs.entry_future(key).wait() == "value"
    assert owner.rrefs.debug_info()["num_owner_rrefs"] == "1"
    del hold
    assert user.wakes == 1, "the finalizer only wakes the agent"
    assert owner.rrefs.debug_info()["num_owner_rrefs"] == "1"
    user.flush()
    assert len(owner.submitted) == 1, "the object is dropped where user code may run"
    assert are_empty(agents)


def test_many_drops_wake_once(agents: list[FakeAgent]) -> None:
    owner, user, _ = agents
    holds = [make(owner, user)[1] for _ in range(10)]
    holds.clear()
    assert user.wakes == 1
    assert user.flush() == 1, "in one report"
    assert are_empty([owner])


def test_a_request_to_fetch_may_come_first(agents: list[FakeAgent]) -> None:
    owner, user, third = agents
    key = user.rrefs.new_key()
    waiting = owner.rrefs.entry_future(key, third.incarnation)
    assert not waiting.done()
    owner.rrefs.expect(key, user.incarnation)
    owner.rrefs.fulfil(key, 5)
    assert waiting.wait() == 5


def test_what_never_comes_fails_when_its_maker_leaves(agents: list[FakeAgent]) -> None:
    owner, user, _ = agents
    waiting = owner.rrefs.entry_future(user.rrefs.new_key())
    del owner.peers[user.incarnation]
    owner.rrefs.peer_left(user.incarnation)
    assert not waiting.done(), "callbacks do not run in the agent's own thread"
    owner.run_submitted()
    with pytest.raises(WorkerLostError, match="the process that made it has left"):
        waiting.wait()
    with pytest.raises(WorkerLostError):
        owner.rrefs.entry_future(user.rrefs.new_key()).wait()


def test_what_was_freed_is_an_error(agents: list[FakeAgent]) -> None:
    owner, user, _ = agents
    key = owner.rrefs.own(1).key  # nobody has been sent it
    with pytest.raises(RRefError, match="is not on worker 'peer0' any more"):
        owner.rrefs.entry_future(key, user.incarnation).wait()
    with pytest.raises(RRefError, match="is not on worker 'peer0' any more"):
        owner.rrefs.lookup(key)


def test_one_who_was_thought_dead_is_told_so(agents: list[FakeAgent]) -> None:
    owner, user, third = agents
    key, hold = make(owner, third)
    tokens = third.send(key, owner.incarnation, user)
    held = user.rrefs.hold(key, owner.incarnation)
    user.rrefs.settle(tokens)
    owner.rrefs.peer_left(user.incarnation)
    del hold
    third.flush()
    owner.rrefs.received([], user.incarnation)
    owner.rrefs.apply(user.incarnation, [], [])  # it is back
    with pytest.raises(RRefError, match="thought dead"):
        owner.rrefs.entry_future(key, user.incarnation).wait()
    del held
    user.flush()


def test_an_error_is_kept_for_who_fetches(agents: list[FakeAgent]) -> None:
    owner, user, _ = agents
    key = user.rrefs.new_key()
    owner.rrefs.expect(key, user.incarnation)
    owner.rrefs.fail(key, ValueError("bad"))
    owner.rrefs.fulfil(key, "too late")
    with pytest.raises(ValueError, match="bad"):
        owner.rrefs.entry_future(key).wait()


def test_an_unfinished_object_outlives_its_users(agents: list[FakeAgent]) -> None:
    owner, user, _ = agents
    key = user.rrefs.new_key()
    hold = user.rrefs.hold(key, owner.incarnation, new=True)
    entry = owner.rrefs.expect(key, user.incarnation)
    del hold
    user.flush()
    owner.rrefs.fulfil(key, 3)
    assert entry.future.wait() == 3
    assert are_empty([owner])


def test_a_message_holds_what_it_contains_until_it_is_unpacked(agents: list[FakeAgent]) -> None:
    owner, user, third = agents
    key, hold = make(owner, user)
    tokens = user.send(key, owner.incarnation, third)
    del hold
    user.flush()
    assert owner.rrefs.entry_future(key).wait() == "value"
    held = third.rrefs.hold(key, owner.incarnation)
    third.rrefs.settle(tokens)
    assert third.flush() == 0
    del held
    third.flush()
    assert are_empty(agents)


def test_a_message_that_is_thrown_away_releases_what_it_contains(agents: list[FakeAgent]) -> None:
    owner, user, third = agents
    key, hold = make(owner, user)
    tokens = user.send(key, owner.incarnation, third)
    third.rrefs.settle(tokens)
    assert third.wakes == 1
    del hold
    user.flush()
    assert are_empty(agents)


@pytest.mark.parametrize("kept", [True, False])
def test_a_reference_comes_home(agents: list[FakeAgent], kept: bool) -> None:
    owner, user, _ = agents
    key, hold = make(owner, user)
    tokens = user.send(key, owner.incarnation, owner, kept=kept)
    del hold
    user.flush()
    assert owner.rrefs.lookup(key).future.wait() == "value"
    owner.rrefs.settle(tokens)
    assert are_empty(agents)


def test_a_message_that_was_not_sent_is_taken_back(agents: list[FakeAgent]) -> None:
    owner, user, third = agents
    entry = owner.rrefs.own("value")
    exporter = owner.rrefs.exporter(third.incarnation)
    for _ in range(2):
        exporter.add(None, entry.key, owner.incarnation, entry)  # type: ignore[arg-type]
    assert len(exporter.tokens) == 1
    exporter.undo()
    exporter.undo()
    key, hold = make(owner, user)
    exporter = user.rrefs.exporter(third.incarnation)
    exporter.add(None, key, owner.incarnation, None)  # type: ignore[arg-type]
    exporter.undo()
    del hold
    user.flush()
    assert are_empty(agents)


def test_only_what_arrived_can_be_held(agents: list[FakeAgent]) -> None:
    owner, user, third = agents
    key, _hold = make(owner, user)
    with pytest.raises(RRefError, match="did not arrive in a message"):
        third.rrefs.hold(key, owner.incarnation)


def test_letting_go_of_everything_voids_what_is_held(agents: list[FakeAgent]) -> None:
    owner, user, _ = agents
    _key, hold = make(owner, user)
    user.rrefs.release_all()
    assert hold.epoch != user.rrefs.epoch
    assert are_empty([user])
    assert are_empty([owner])
    del hold
    assert user.flush() == 0, "it was released already"


def test_who_waits_is_told_of_the_shutdown(agents: list[FakeAgent]) -> None:
    owner, user, _ = agents
    _key, hold = make(owner, user)
    unmade = user.rrefs.new_key()
    waiting = owner.rrefs.expect(unmade, user.incarnation).future
    owner.rrefs.close()
    with pytest.raises(NotInitializedError, match="RPC was shut down"):
        waiting.wait()
    owner.rrefs.fulfil(unmade, 1)
    user.rrefs.close()
    wakes = user.wakes
    del hold
    assert user.wakes == wakes, "a closed agent is left alone"


def test_a_finalizer_may_run_while_the_context_works(agents: list[FakeAgent]) -> None:
    """Threads count, while others drop references in cycles and collect garbage."""
    owner, user, third = agents
    stop = threading.Event()

    def collect() -> None:
        while not stop.is_set():
            gc.collect()

    def churn() -> None:
        for _ in range(200):
            key, hold = make(owner, user)
            cycle: list[Any] = [hold]
            cycle.append(cycle)
            exporter = user.rrefs.exporter(third.incarnation)
            exporter.add(None, key, owner.incarnation, None)  # type: ignore[arg-type]
            exporter.undo()

    collector = threading.Thread(target=collect)
    workers = [threading.Thread(target=churn) for _ in range(3)]
    for thread in (collector, *workers):
        thread.start()
    for thread in workers:
        thread.join(60)
    stop.set()
    collector.join(60)
    gc.collect()
    assert are_empty(agents)
