"""The broker's state, driven without clock or socket."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import msgspec
import pytest

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
from tensorplay.broker.state import MAX_PEER_HEADER, BrokerState
from tensorplay.keys import Grant
from tensorplay.protocol import wire
from tensorplay.protocol.messages import (
    FIRST_RANKLESS_ID,
    PROTOCOL_VERSION,
    Control,
    Departure,
    Farewell,
    Goodbye,
    Heartbeat,
    Hello,
    Kind,
    PeerInfo,
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

Grants: TypeAlias = Mapping[str, Grant]


class Driver:
    """Feeds a state and reads its commands; connections are named by letters.

    Connections in ``dead`` are found gone when they are probed.
    """

    def __init__(self, grants: Callable[[], Grants] | None = None, **config: Any) -> None:
        self.now = 100.0
        self.dead: set[str] = set()
        self.state = BrokerState(
            BrokerConfig(**config), incarnation=77, now=self.now, grants=grants
        )

    def handle(self, event: Event) -> list[Command]:
        return self.state.handle(event, self.now)

    def send(self, connection: str, message: Control | Route | bytes, size: int = 0) -> Sent:
        """Lets a message come, answers the probes that follow, and returns what is sent."""
        header = message if isinstance(message, bytes) else wire.encode(message)
        return self.settle(self.handle(Received(connection.encode(), header, size)))

    def settle(self, commands: Iterable[Command]) -> Sent:
        todo, sent = list(commands), Sent()
        while todo:
            command = todo.pop(0)
            if isinstance(command, Probe):
                gone = command.identity.decode() in self.dead
                answer = Unreachable if gone else Reachable
                todo += self.handle(answer(command.identity))
            elif isinstance(command, Send):
                sent.append((command.identity.decode(), wire.decode(command.header)))
        return sent

    def join(self, connection: str, name: str, incarnation: int, **changes: Any) -> Welcome:
        sent = self.send(connection, hello(name, incarnation, **changes))
        welcome = sent.to(connection)[0]
        assert isinstance(welcome, Welcome), welcome
        return welcome

    def refuse(self, connection: str, message: Hello) -> Refused:
        (refused,) = self.send(connection, message).to(connection)
        assert isinstance(refused, Refused), refused
        return refused


class Sent(list[tuple[str, Any]]):
    """Messages sent, with the connections they went to."""

    def to(self, connection: str) -> list[Any]:
        return [message for receiver, message in self if receiver == connection]


@pytest.fixture
def driver() -> Driver:
    return Driver()


# Coming.


def test_the_first_worker_is_welcomed(driver: Driver) -> None:
    info = PeerInfo("w", 0, 1, Role.WORKER, "host", 5, "cuda:0", {"torch": "2.13"})
    welcome = driver.join(
        "a", "w", 1, host="host", pid=5, device="cuda:0", versions={"torch": "2.13"}
    )
    assert welcome.peer == info
    assert welcome.roster == [info]
    assert (welcome.protocol, welcome.broker) == (PROTOCOL_VERSION, 77)
    assert (welcome.heartbeat_interval, welcome.heartbeat_timeout) == (1.0, 5.0)
    assert welcome.warnings == []


def test_everybody_in_the_namespace_hears_of_a_newcomer(driver: Driver) -> None:
    driver.join("a", "w0", 1)
    driver.join("b", "w1", 2)
    driver.join("x", "w0", 3, namespace="other")
    sent = driver.send("c", hello("w2", 4))
    assert [peer.name for peer in sent.to("c")[0].roster] == ["w0", "w1", "w2"]
    assert sent.to("a") == sent.to("b") == [Roster(joined=[sent.to("c")[0].peer])]
    assert sent.to("x") == []


def test_workers_get_the_lowest_free_rank_and_clients_none(driver: Driver) -> None:
    assert driver.join("a", "w0", 1).peer.id == 0
    assert driver.join("b", "c0", 2, role=Role.CLIENT).peer.id == FIRST_RANKLESS_ID
    assert driver.join("c", "w2", 3, rank=2).peer.id == 2
    assert driver.join("d", "c1", 4, role=Role.CLIENT).peer.id == FIRST_RANKLESS_ID - 1
    assert driver.join("e", "w1", 5).peer.id == 1
    assert driver.join("f", "w3", 6).peer.id == 3
    assert driver.join("g", "c9", 7, role=Role.CLIENT, rank=9).peer.id == 9
    driver.send("b", Goodbye())
    driver.send("a", Goodbye())
    assert driver.join("h", "c2", 8, role=Role.CLIENT).peer.id == FIRST_RANKLESS_ID
    assert driver.join("i", "w4", 9).peer.id == 0


def test_a_client_gets_its_former_id_back_if_it_is_free(driver: Driver) -> None:
    assert driver.join("a", "c0", 1, role=Role.CLIENT, rank=-7).peer.id == -7
    assert driver.join("b", "c1", 2, role=Role.CLIENT, rank=-7).peer.id == FIRST_RANKLESS_ID


def test_names_are_unique_among_the_living(driver: Driver) -> None:
    driver.join("a", "worker0", 1, host="here", pid=5)
    refused = driver.refuse("b", hello("worker0", 2))
    assert refused.code == "name-taken"
    assert refused.text == (
        "name 'worker0' is not unique in namespace 'default': it belongs to a live peer "
        "(id 0, host here, pid 5); choose another name"
    )
    driver.join("c", "worker0", 3, namespace="other")
    driver.send("a", Goodbye())
    driver.join("b", "worker0", 2)


def test_ranks_are_unique_among_the_living(driver: Driver) -> None:
    driver.join("a", "w", 1, rank=1)
    refused = driver.refuse("b", hello("v", 2, rank=1))
    assert refused.code == "rank-taken"
    assert "rank 1" in refused.text
    assert "is not unique in namespace 'default'" in refused.text
    assert "'w'" in refused.text
    driver.send("a", Goodbye())
    driver.join("b", "v", 2, rank=1)


def test_a_name_is_refused_only_after_its_holder_was_probed(driver: Driver) -> None:
    driver.join("a", "w", 1)
    driver.join("z", "watcher", 9)
    commands = driver.handle(Received(b"b", wire.encode(hello("w", 2))))
    assert [(type(command), command.identity) for command in commands] == [(Probe, b"a")]
    sent = driver.settle(driver.handle(Unreachable(b"a")))
    assert isinstance(sent.to("b")[0], Welcome)
    left, joined = sent.to("z")
    assert left.left[0].peer.incarnation == 1
    assert joined.joined[0].incarnation == 2


def test_of_several_claims_on_a_dead_peers_name_one_succeeds(driver: Driver) -> None:
    driver.join("a", "w", 1)
    for connection, incarnation in (("b", 2), ("c", 3)):
        driver.handle(Received(connection.encode(), wire.encode(hello("w", incarnation))))
    driver.dead.add("a")
    sent = driver.settle(driver.handle(Unreachable(b"a")))
    assert isinstance(sent.to("b")[0], Welcome)
    assert isinstance(sent.to("c")[0], Refused)


def test_a_claim_on_a_name_and_on_anothers_rank_needs_both_to_be_gone(driver: Driver) -> None:
    driver.join("a", "w", 1, rank=0)
    driver.join("b", "v", 2, rank=1)
    driver.dead.add("a")
    assert driver.refuse("c", hello("w", 3, rank=1)).code == "rank-taken"
    driver.dead.add("b")
    assert driver.join("c", "w", 3, rank=1).peer.id == 1


def test_a_repeated_hello_is_welcomed_again_and_nobody_told(driver: Driver) -> None:
    driver.join("a", "w", 1)
    driver.join("b", "v", 2)
    sent = driver.send("a", hello("w", 1))
    assert [connection for connection, _ in sent] == ["a"]
    assert sent.to("a")[0].peer.id == 0


def test_the_same_incarnation_by_another_connection_is_the_same_peer(driver: Driver) -> None:
    before = driver.join("a", "w", 1)
    driver.join("b", "v", 2)
    (probe,) = driver.handle(Received(b"c", wire.encode(hello("w", 1, rank=5))))
    assert isinstance(probe, Probe)
    forget, welcome, news = driver.handle(Unreachable(b"a"))
    assert forget == Forget(b"a")
    assert news == Send(b"b", wire.encode(Roster(joined=[before.peer])))
    assert isinstance(welcome, Send)
    assert wire.decode(welcome.header) == msgspec.structs.replace(
        before, roster=[before.peer, driver.state.registry.by_identity[b"b"].info]
    )
    (forward,) = driver.handle(Received(b"b", wire.encode(Route(Kind.REQUEST, 1, 2, 5))))
    assert isinstance(forward, Forward)
    assert forward.identity == b"c"
    assert driver.send("a", Heartbeat(0.0)).to("a") == [Stranger("not registered here")]


def test_an_incarnation_is_not_taken_over_while_its_owner_lives(driver: Driver) -> None:
    driver.join("a", "w", 1)
    sent = driver.send("thief", hello("w", 1))
    assert sent.to("thief") == [Stranger("'w' (id 0, host ?, pid 0) has another connection")]
    driver.join("b", "v", 2)
    (forward,) = driver.handle(Received(b"b", wire.encode(Route(Kind.REQUEST, 1, 2, 5))))
    assert isinstance(forward, Forward)
    assert forward.identity == b"a"
    assert driver.state.counters["taken-over"] == 1
    # Once the owner's connection is found to be gone, the other is believed to be the owner.
    sent = driver.settle(driver.handle(Unreachable(b"a")))
    assert isinstance(sent.to("thief")[0], Welcome)


def test_with_keys_an_incarnation_moves_at_once_but_only_by_its_own_key() -> None:
    grants = {key: Grant(key, key, ("*",)) for key in ("K", "L")}
    driver = Driver(lambda: grants)

    def come(connection: bytes, key: str) -> Sent:
        event = Received(connection, wire.encode(hello("w", 1)), 0, key)
        return driver.settle(driver.handle(event))

    assert isinstance(come(b"a", "K").to("a")[0], Welcome)
    (refused,) = come(b"thief", "L").to("thief")
    assert isinstance(refused, Refused)
    assert isinstance(come(b"c", "K").to("c")[0], Welcome)
    assert driver.state.registry.by_identity[b"c"].key == "K"


def test_a_message_with_another_key_is_not_its_peers() -> None:
    grants = {key: Grant(key, key, ("*",)) for key in ("K", "L")}
    driver = Driver(lambda: grants)
    driver.handle(Received(b"a", wire.encode(hello("w", 1)), 0, "K"))
    for message in (Goodbye(), Heartbeat(0.0), Route(Kind.REQUEST, 1, 1, 5)):
        driver.now += 1
        (answer,) = driver.handle(Received(b"a", wire.encode(message), 0, "L"))
        assert isinstance(answer, Send)
        assert isinstance(wire.decode(answer.header), Stranger)
    assert driver.state.counters["forged"] == 3
    assert b"a" in driver.state.registry.by_identity


def test_peers_whose_keys_are_revoked_are_removed_at_the_next_beat() -> None:
    grants = {"K": Grant("K", "K", ("w", "v"))}
    driver = Driver(lambda: grants, heartbeat_interval=1.0)
    for connection, name, incarnation in ((b"a", "w", 1), (b"b", "v", 2)):
        driver.handle(Received(connection, wire.encode(hello(name, incarnation)), 0, "K"))
    driver.handle(Unreachable(b"b"))  # away; it must not come back either
    del grants["K"]
    driver.now += 1.0
    sent = driver.settle(driver.handle(Tick()))
    assert Refused in [type(message) for message in sent.to("a")]
    assert not driver.state.registry.namespaces
    assert len(driver.state.registry) == 0


def test_a_connection_is_one_peer(driver: Driver) -> None:
    driver.join("a", "w", 1)
    assert driver.refuse("a", hello("v", 2)).code == "invalid"
    assert driver.refuse("b", hello("v", 1)).code == "invalid"  # another's incarnation


def test_a_fixed_world_has_one_size(driver: Driver) -> None:
    driver.join("a", "w0", 1, rank=0, world_size=3)
    refused = driver.refuse("b", hello("w1", 2, rank=1, world_size=2))
    assert refused.code == "world-size"
    assert "size 2" in refused.text
    assert "size 3" in refused.text
    assert driver.refuse("c", hello("w3", 3, rank=3, world_size=3)).code == "world-size"
    # Without a rank: the free ones of the world, then none.
    assert driver.join("b", "w1", 2, world_size=3).peer.id == 1
    assert driver.join("c", "w2", 3, world_size=3).peer.id == 2
    assert driver.refuse("d", hello("w9", 4, world_size=3)).code == "world-size"
    # Who joins elastically takes no rank of the world's.
    assert driver.join("e", "extra", 5).peer.id == 3
    assert driver.join("f", "client", 6, role=Role.CLIENT).peer.id == FIRST_RANKLESS_ID


def test_an_elastic_worker_leaves_the_worlds_ranks_alone(driver: Driver) -> None:
    driver.join("a", "w1", 1, rank=1, world_size=2)
    assert driver.join("b", "extra", 2).peer.id == 2
    assert driver.join("c", "w0", 3, rank=0, world_size=2).peer.id == 0


def test_a_world_that_waits_is_told_why_a_member_was_refused(driver: Driver) -> None:
    driver.join("a", "w0", 1, rank=0, world_size=2)
    driver.join("b", "elastic", 2)
    sent = driver.send("c", hello("w0", 3, rank=1, world_size=2))
    (refused,) = sent.to("c")
    assert sent.to("a") == [Roster(refused=[refused.text])]
    assert sent.to("b") == []
    assert driver.send("d", hello("w0", 4)).to("a") == []  # no member of the world


def test_a_late_member_of_a_world_is_told_who_was_refused_before(driver: Driver) -> None:
    driver.join("a", "w0", 1, rank=0, world_size=3)
    refused = driver.refuse("b", hello("w0", 2, rank=1, world_size=3))
    late = driver.send("c", hello("w2", 3, rank=2, world_size=3)).to("c")
    assert isinstance(late[0], Welcome)
    assert late[1:] == [Roster(refused=[refused.text])]
    assert len(driver.send("d", hello("elastic", 4)).to("d")) == 1


def test_refusals_are_forgotten_when_the_world_is_complete(driver: Driver) -> None:
    driver.join("a", "w0", 1, rank=0, world_size=2)
    driver.refuse("b", hello("w0", 2, rank=1, world_size=2))
    assert len(driver.send("b", hello("w1", 3, rank=1, world_size=2)).to("b")) == 1
    driver.send("b", Goodbye())
    assert len(driver.send("c", hello("w1", 4, rank=1, world_size=2)).to("c")) == 1


def test_a_late_member_is_told_though_those_before_have_left(driver: Driver) -> None:
    driver.join("e", "elastic", 1, role=Role.CLIENT)
    driver.join("a", "w0", 2, rank=0, world_size=3)
    for attempt in range(20):
        refused = driver.refuse("b", hello("w0", 3 + attempt, rank=1, world_size=3))
    driver.send("a", Goodbye())
    driver.send("e", Goodbye())
    late = driver.send("c", hello("w2", 50, rank=2, world_size=3)).to("c")
    assert refused.text in late[1].refused
    assert len(late[1].refused) < 20
    driver.send("c", Goodbye())
    # Whoever comes a second time begins the world anew.
    assert len(driver.send("a", hello("w0", 60, rank=0, world_size=3)).to("a")) == 1
    assert len(driver.send("b", hello("w1", 61, rank=1, world_size=3)).to("b")) == 1
    assert len(driver.send("c", hello("w2", 62, rank=2, world_size=3)).to("c")) == 1


def test_worlds_that_failed_are_not_remembered_without_bound(driver: Driver) -> None:
    for number in range(200):
        place = f"n{number}"
        driver.join("a", "w0", 2, rank=0, world_size=3, namespace=place)
        driver.refuse("b", hello("w0", 3, rank=1, world_size=3, namespace=place))
        driver.send("a", Goodbye())
    assert len(driver.state.registry._failed) < 100


def test_another_protocol_version_is_refused_with_both(driver: Driver) -> None:
    refused = driver.refuse("a", hello("w", 1, protocol=9, versions={"tensorplay": "7.1"}))
    assert refused.code == "protocol"
    assert f"version {PROTOCOL_VERSION}" in refused.text
    assert "version 9" in refused.text
    assert "7.1" in refused.text


def test_a_hello_of_a_future_protocol_is_refused_though_its_fields_differ(
    driver: Driver,
) -> None:
    header = msgspec.msgpack.encode([int(Kind.HELLO), 9, {"name": "w"}])
    (refused,) = driver.send("a", header).to("a")
    assert refused.code == "protocol"
    assert "version 9" in refused.text


def test_differing_versions_are_warned_of(driver: Driver) -> None:
    versions = {"tensorplay": "0.1.0", "python": "3.11.7", "torch": "2.13.0"}
    driver.state.versions = versions
    driver.join("a", "w0", 1, versions=versions)
    driver.join("b", "w1", 2, versions=versions)
    patch = versions | {"torch": "2.13.1+cu128", "python": "3.11.9", "tensorplay": "0.1.9"}
    assert driver.join("c", "w2", 3, versions=patch).warnings == []
    other = {"tensorplay": "0.2.0", "python": "3.12.1", "torch": "2.6.0"}
    warnings = driver.join("d", "w3", 4, versions=other).warnings
    assert len(warnings) == 4  # of tensorplay at the broker and at w0, and two at w0
    assert "tensorplay 0.2.0 here, 0.1.0 at the broker" in warnings
    assert any("torch 2.6.0 here, 2.13.0 at peer 'w0'" in text for text in warnings)
    assert any("python 3.12.1 here, 3.11.7 at peer 'w0'" in text for text in warnings)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"name": ""}, "name"),
        ({"name": "x" * 129}, "name"),
        ({"name": "a\nb"}, "name"),
        ({"namespace": ""}, "namespace"),
        ({"host": "a\nb"}, "host"),
        ({"device": "x" * 257}, "device"),
        ({"incarnation": 0}, "incarnation"),
        ({"incarnation": 1 << 63}, "incarnation"),
        ({"rank": 1 << 40}, "rank"),
        ({"world_size": -1}, "world"),
    ],
)
def test_impossible_hellos_are_refused(driver: Driver, changes: dict[str, Any], said: str) -> None:
    refused = driver.refuse("a", msgspec.structs.replace(hello("w", 1), **changes))
    assert refused.code == "invalid"
    assert said in refused.text
    assert not driver.state.registry


def test_a_malformed_hello_is_refused(driver: Driver) -> None:
    header = msgspec.msgpack.encode([int(Kind.HELLO), PROTOCOL_VERSION, 5])
    (refused,) = driver.send("a", header).to("a")
    assert refused.code == "invalid"


def test_a_full_broker_refuses() -> None:
    driver = Driver(max_peers=1)
    driver.join("a", "w", 1)
    refused = driver.refuse("b", hello("v", 2))
    assert refused.code == "full"
    assert "--max-peers" in refused.text


# Going.


def test_a_goodbye_is_answered_and_told(driver: Driver) -> None:
    peer = driver.join("a", "w", 1).peer
    driver.join("b", "v", 2)
    sent = driver.send("a", Goodbye("done"))
    assert sent.to("a") == [Farewell()]
    assert sent.to("b") == [Roster(left=[Departure(peer, clean=True, reason="done")])]


def test_last_words_are_made_fit_for_a_log(driver: Driver) -> None:
    driver.join("a", "w", 1)
    driver.join("b", "v", 2)
    (roster,) = driver.send("a", Goodbye("a\nb" + "x" * 1000)).to("b")
    assert roster.left[0].reason == "a b" + "x" * 253


def test_a_peer_that_is_away_for_too_long_is_lost(driver: Driver) -> None:
    peer = driver.join("a", "w", 1).peer
    driver.join("b", "v", 2)
    driver.now += 3.0
    assert driver.settle(driver.handle(Unreachable(b"a"))) == []
    assert driver.state.next_tick() <= driver.now + 1.0
    driver.now += 1.0
    sent = driver.settle(driver.handle(Tick()))
    reason = "connection lost, last heard of 3.0 s ago"
    assert sent == [("b", Roster(left=[Departure(peer, clean=False, reason=reason)]))]


def test_a_peer_that_comes_back_in_time_was_only_away(driver: Driver) -> None:
    peer = driver.join("a", "w", 1).peer
    driver.join("b", "v", 2)
    driver.settle(driver.handle(Unreachable(b"a")))
    (report,) = driver.send("b", Route(Kind.REQUEST, 1, 2, 5)).to("b")
    assert (report.code, report.id) == ("away", 5)
    assert driver.send("b", Route(Kind.SYNC, 1, 2, 5)) == []  # is asked again
    driver.now += 0.5
    sent = driver.send("c", hello("w", 1))
    assert sent.to("b") == [Roster(joined=[peer])]
    assert sent.to("c")[0].peer == peer
    driver.now += 10.0
    assert driver.settle(driver.handle(Tick())) == []


def test_a_peer_that_is_away_loses_its_name_to_a_newcomer(driver: Driver) -> None:
    peer = driver.join("a", "w", 1).peer
    driver.join("b", "v", 2)
    driver.settle(driver.handle(Unreachable(b"a")))
    sent = driver.send("c", hello("w", 3))
    left, joined = sent.to("b")
    assert [gone.peer for gone in left.left] == [peer]
    assert [new.incarnation for new in joined.joined] == [3]


def test_silence_alone_ends_nobody(driver: Driver) -> None:
    driver.join("a", "w", 1)
    driver.join("b", "v", 2)
    for _ in range(100):
        driver.now += 1.0
        assert driver.settle(driver.handle(Tick())) == []
    assert len(driver.state.registry) == 2


def test_every_peer_is_probed_each_interval(driver: Driver) -> None:
    driver.join("a", "w", 1)
    driver.join("b", "v", 2)
    assert driver.handle(Tick()) == []
    driver.now = driver.state.next_tick()
    probes = driver.handle(Tick())
    assert [(type(probe), probe.identity) for probe in probes] == [(Probe, b"a"), (Probe, b"b")]
    assert driver.state.next_tick() == driver.now + 1.0


def test_the_last_peer_takes_its_namespace_along(driver: Driver) -> None:
    driver.join("a", "w", 1, namespace="n", rank=0, world_size=2)
    driver.send("a", Goodbye())
    assert driver.state.registry.namespaces == {}
    driver.join("a", "w", 2, namespace="n", rank=3, world_size=5)


# Routing.


def test_a_message_is_forwarded_to_the_connection_of_its_receiver(driver: Driver) -> None:
    driver.join("a", "w", 1)
    driver.join("b", "v", 2)
    for kind in (Kind.REQUEST, Kind.REPLY, Kind.CHUNK, Kind.CREDIT, Kind.CANCEL):
        route = Route(kind, 2, 1, 5, 10)
        assert driver.handle(Received(b"a", wire.encode(route), 10)) == [
            Forward(b"b", b"a", route, 10)
        ]


def test_a_request_to_nobody_comes_back_and_says_who_is_gone(driver: Driver) -> None:
    driver.join("a", "w", 1)
    (report,) = driver.send("a", Route(Kind.REQUEST, 9, 1, 5)).to("a")
    assert report == Undeliverable(
        Kind.REQUEST, 9, 5, "gone", "no peer 9 is registered in namespace 'default'"
    )
    driver.join("b", "v", 2)
    driver.send("b", Goodbye("done"))
    (report,) = driver.send("a", Route(Kind.REQUEST, 2, 1, 5)).to("a")
    assert report.text == "peer 'v' is gone: done"
    for kind in (Kind.CREDIT, Kind.SYNC):  # nobody waits for these
        assert driver.send("a", Route(kind, 2, 1, 5)) == []
    for kind in (Kind.REPLY, Kind.CHUNK, Kind.CANCEL, Kind.BATCH):
        (report,) = driver.send("a", Route(kind, 2, 1, 5)).to("a")
        assert (report.code, report.kind) == ("gone", kind)
    assert driver.state.counters["gone"] == 8


def test_a_forged_sender_is_dropped_and_counted(driver: Driver) -> None:
    driver.join("a", "w", 1)
    driver.join("b", "v", 2)
    sent = driver.send("a", Route(Kind.REQUEST, 2, 2, 5))
    assert [connection for connection, _ in sent] == ["a"]
    assert driver.send("a", Route(Kind.REQUEST, 2, 2, 6)) == []  # said once, not each time
    assert driver.state.counters["forged"] == 2


def test_namespaces_do_not_see_each_other(driver: Driver) -> None:
    driver.join("a", "w", 1)
    driver.join("b", "w", 2, namespace="other")
    (report,) = driver.send("a", Route(Kind.REQUEST, 2, 1, 5)).to("a")
    assert report.code == "gone"
    assert "default" in report.text


def test_the_announced_size_counts_as_the_real_one(driver: Driver) -> None:
    driver = Driver(max_message_bytes=100)
    driver.join("a", "w", 1)
    for announced, real in ((101, 0), (0, 101)):
        (report,) = driver.send("a", Route(Kind.REQUEST, 1, 1, 5, announced), real).to("a")
        assert report.code == "too-large"
        assert "101" in report.text


def test_an_overflow_is_told_to_the_sender(driver: Driver) -> None:
    driver.join("a", "w", 1)
    driver.join("b", "v", 2)
    for kind in (Kind.REQUEST, Kind.REPLY, Kind.CHUNK):
        (forward,) = driver.handle(Received(b"a", wire.encode(Route(kind, 2, 1, 5)), 10))
        assert isinstance(forward, Forward)
        (report,) = driver.settle(driver.handle(Overflowed(forward))).to("a")
        assert (report.kind, report.id, report.code) == (kind, 5, "full")
        assert "'v'" in report.text
    receiver = driver.state.registry.by_identity[b"b"]
    assert (receiver.sent.messages, receiver.sent.bytes) == (0, 0)


# Strangers and rubbish.


def test_strangers_are_told_so_at_most_twice_a_second(driver: Driver) -> None:
    assert driver.send("a", Heartbeat(0.0)).to("a") == [Stranger("not registered here")]
    assert driver.send("a", Route(Kind.REQUEST, 1, 1, 5)) == []
    driver.now += 0.6
    assert len(driver.send("a", Heartbeat(0.0)).to("a")) == 1


def test_strangers_are_forgotten(driver: Driver) -> None:
    for number in range(10_000):
        driver.send(f"s{number}", Heartbeat(0.0))
    assert len(driver.state._strangers) <= 4096
    driver.now += 2.0
    driver.handle(Tick())
    assert driver.state._strangers == {}


def test_a_stranger_may_leave(driver: Driver) -> None:
    assert driver.send("a", Goodbye()) == [("a", Farewell())]


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"x",
        b"\x92\x63\x01",
        wire.encode(Farewell()),
        wire.encode(Stranger()),
        b"\x93\x05\xcb\x00",
        wire.encode(Goodbye("x" * MAX_PEER_HEADER)),
    ],
)
def test_rubbish_is_counted_and_told_once(driver: Driver, header: bytes) -> None:
    driver.join("a", "w", 1)
    (report,) = driver.send("a", header).to("a")
    assert isinstance(report, Undeliverable)
    assert report.code == "malformed"
    assert driver.send("a", header) == []
    assert driver.state.counters["malformed"] == 2
    assert len(driver.state.registry) == 1


def test_a_control_message_has_one_frame(driver: Driver) -> None:
    driver.send("a", hello("w", 1), size=5)
    assert not driver.state.registry


def test_rubbish_is_logged_once_for_each_peer(
    driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    driver.join("a", "w", 1)
    for _ in range(5):
        driver.now += 1.0
        driver.send("a", b"rubbish")
    assert len([record for record in caplog.records if "malformed" in record.message]) == 1


# Status.


def test_status_is_told_to_anybody(driver: Driver) -> None:
    driver.join("a", "w", 1, namespace="n", host="h")
    driver.now += 2.0
    driver.send("a", Heartbeat(0.0, {"calls": 2.0}))
    driver.now += 3.0
    (status,) = driver.send("z", StatusRequest()).to("z")
    assert isinstance(status, Status)
    told = msgspec.json.decode(status.json)
    assert told["uptime"] == 5.0
    assert told["config"]["heartbeat_timeout"] == 5.0
    (peer,) = told["namespaces"]["n"]["peers"]
    assert (peer["name"], peer["id"], peer["role"], peer["host"]) == ("w", 0, "worker", "h")
    assert (peer["registered_for"], peer["silent_for"]) == (5.0, 3.0)
    assert peer["stats"] == {"calls": 2.0}
    assert peer["queued_bytes"] == 0
