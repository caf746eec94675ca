"""The broker's loop, with real sockets in one process."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import zmq

from tensorplay.broker import Broker, BrokerConfig
from tensorplay.errors import BrokerError
from tensorplay.protocol import wire
from tensorplay.protocol.messages import (
    CHUNK_BYTES,
    Farewell,
    Goodbye,
    Heartbeat,
    Kind,
    Refused,
    Role,
    Roster,
    Route,
    Stranger,
    Undeliverable,
    Welcome,
)
from tests.broker.helpers import PATIENCE, Connect, Dial, RawPeer, hello


def drain_until(peer: RawPeer, kind: type[Any]) -> Any:
    """Returns the next message of a kind, whatever comes before it."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        message = wire.decode(peer.expect_frames()[0])
        if isinstance(message, kind):
            return message
    raise AssertionError(f"no {kind.__name__} came")


def test_peers_register_and_hear_of_each_other(connect: Connect) -> None:
    first, second = connect(), connect()
    assert first.register("worker0", 11).peer.id == 0
    welcome = second.register("worker1", 12)
    assert [peer.name for peer in welcome.roster] == ["worker0", "worker1"]
    assert [peer.name for peer in first.expect(Roster).joined] == ["worker1"]
    second.leave()
    second.expect(Farewell)
    (gone,) = first.expect(Roster).left
    assert (gone.peer.name, gone.clean) == ("worker1", True)


def test_frames_arrive_as_they_were_sent(connect: Connect) -> None:
    a, b = connect(), connect()
    a.register("a", 1)
    b.register("b", 2)
    frames = (b"header", b"", b"pickle" * 10, b"\0" * CHUNK_BYTES, b"")
    a.route(Kind.REQUEST, 2, 7, *frames)
    header, *received = b.expect_frames()
    assert wire.decode(header) == Route(Kind.REQUEST, 2, 1, 7, sum(map(len, frames)))
    assert tuple(received) == frames
    b.route(Kind.REPLY, 1, 7)
    a.expect(Roster)
    assert len(a.expect_frames()) == 1


def test_messages_of_one_sender_keep_their_order(connect: Connect) -> None:
    a, b = connect(), connect()
    a.register("a", 1)
    b.register("b", 2)
    for number in range(2000):
        a.route(Kind.REQUEST, 2, number, b"x" * (number % 7 * 1000))
    for number in range(2000):
        message = wire.decode(b.expect_frames()[0])
        assert isinstance(message, Route)
        assert message.id == number


def test_a_second_peer_of_a_name_is_refused_while_the_first_lives(connect: Connect) -> None:
    first, second = connect(), connect()
    first.register("worker0", 1)
    second.send(hello("worker0", 2))
    refused = second.expect(Refused)
    assert refused.code == "name-taken"
    assert "'worker0' is not unique" in refused.text


def test_a_name_is_free_as_soon_as_the_connection_of_its_holder_ends(connect: Connect) -> None:
    with connect() as dead:
        dead.register("worker0", 1)
    deadline = time.monotonic() + PATIENCE
    while True:  # the end of the first connection may reach the broker a moment later
        with connect() as successor:
            successor.send(hello("worker0", 2))
            message = wire.decode(successor.expect_frames()[0])
            if isinstance(message, Welcome):
                assert message.peer.id == 0
                return
            assert time.monotonic() < deadline


def test_a_peer_that_reconnects_stays_the_same(connect: Connect) -> None:
    watcher, before, after = connect(), connect(), connect()
    watcher.register("watcher", 1)
    welcome = before.register("worker0", 2)
    watcher.expect(Roster)
    before.socket.close()
    after.incarnation = 2
    after.send(hello("worker0", 2))
    answer = wire.decode(after.expect_frames()[0])
    if isinstance(answer, Stranger):  # the old connection's end was not known yet
        answer = after.expect(Welcome)
    assert isinstance(answer, Welcome)
    assert answer.peer == welcome.peer
    assert watcher.expect(Roster).joined == [welcome.peer]  # what was on its way may be lost
    watcher.route(Kind.REQUEST, 2, 5, b"x")
    assert len(after.expect_frames()) == 2
    watcher.expect_nothing()


def test_an_identity_is_not_taken_over_while_its_owner_lives(connect: Connect) -> None:
    watcher, owner, thief = connect(), connect(), connect()
    watcher.register("watcher", 1)
    owner.register("worker0", 2)
    watcher.expect(Roster)
    thief.send(hello("worker0", 2))
    assert "'worker0'" in thief.expect(Stranger).reason
    watcher.route(Kind.REQUEST, 2, 5, b"x")
    assert len(owner.expect_frames()) == 2
    thief.expect_nothing()
    watcher.expect_nothing()


def test_requests_to_nobody_come_back(connect: Connect) -> None:
    peer = connect()
    peer.register("a", 1)
    peer.route(Kind.REQUEST, 99, 7, b"x")
    report = peer.expect(Undeliverable)
    assert (report.kind, report.dst, report.id, report.code) == (Kind.REQUEST, 99, 7, "gone")


def test_a_message_to_another_namespace_reaches_nobody(connect: Connect) -> None:
    here, there = connect(), connect()
    here.register("a", 1)
    there.register("a", 2, namespace="elsewhere")
    here.route(Kind.REQUEST, 2, 7, b"x")
    assert here.expect(Undeliverable).code == "gone"
    there.expect_nothing()


def test_a_forged_sender_is_dropped(connect: Connect) -> None:
    victim, liar, receiver = connect(), connect(), connect()
    victim.register("victim", 1)
    liar.register("liar", 2)
    receiver.register("receiver", 3)
    liar.route(Kind.REQUEST, 3, 7, b"x", src=1)
    assert drain_until(liar, Undeliverable).code == "malformed"
    receiver.expect_nothing()
    assert receiver.status()["counters"]["forged"] == 1


def test_a_message_beyond_the_limit_comes_back(dial: Dial) -> None:
    config = BrokerConfig(bind=("tcp://127.0.0.1:0",), max_message_bytes=1000)
    with Broker(config) as broker, dial(broker.address) as peer:
        peer.register("a", 1)
        peer.route(Kind.REQUEST, 1, 7, b"x" * 1001)
        report = peer.expect(Undeliverable)
        assert report.code == "too-large"
        assert "1001" in report.text
        assert "1000" in report.text
        peer.route(Kind.REQUEST, 1, 8, b"x", size=2000)  # the rest would follow in chunks
        assert peer.expect(Undeliverable).id == 8
        peer.route(Kind.REQUEST, 1, 9, b"x" * 1001, size=0)  # a lie
        assert peer.expect(Undeliverable).id == 9
        peer.route(Kind.REQUEST, 1, 10, b"x" * 1000)
        assert len(peer.expect_frames()) == 2


def test_a_frame_beyond_the_limit_ends_the_connection_and_nothing_else(
    connect: Connect,
) -> None:
    good, bad = connect(), connect()
    good.register("good", 1)
    bad.register("bad", 2)
    good.expect(Roster)
    bad.route(Kind.REQUEST, 1, 7, b"x" * (17 * CHUNK_BYTES))
    (gone,) = good.expect(Roster).left
    assert (gone.peer.name, gone.clean) == ("bad", False)
    good.expect_nothing()


def test_a_broker_that_restarts_is_told_again(dial: Dial, tmp_path: Path) -> None:
    config = BrokerConfig(bind=(f"ipc://{tmp_path}/broker",))
    with Broker(config) as broker:
        peer = dial(broker.address)
        worker = peer.register("worker", 1, rank=3)
        client = dial(broker.address)
        before = client.register("client", 2, role=Role.CLIENT)
    with Broker(config) as broker:
        peer.send(Heartbeat(sent=0.0))
        drain_until(peer, Stranger)
        after = peer.register("worker", 1, rank=worker.peer.id)
        assert after.peer == worker.peer
        assert after.broker != worker.broker
        dial(broker.address).register("other", 3, role=Role.CLIENT, rank=-5)
        client.route(Kind.REQUEST, 1, 7, b"x")
        drain_until(client, Stranger)
        again = client.register("client", 2, role=Role.CLIENT, rank=before.peer.id)
        assert again.peer == before.peer


def test_strangers_are_answered_only_now_and_then(connect: Connect) -> None:
    peer = connect()
    for _ in range(100):
        peer.route(Kind.REQUEST, 1, 1, b"x")
    peer.expect(Stranger)
    peer.expect_nothing()


def test_a_goodbye_of_a_stranger_is_answered(connect: Connect) -> None:
    peer = connect()
    peer.send(Goodbye())
    peer.expect(Farewell)


def test_heartbeats_come_every_interval(connect: Connect) -> None:
    peer = connect()
    peer.register("a", 1)
    peer.expect(Heartbeat)
    start = time.monotonic()
    for _ in range(5):
        peer.expect(Heartbeat)
    assert 0.5 < time.monotonic() - start < 3.0


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"x"],
        [b"rubbish" * 100],
        [b"\x92\x01\x01"],  # a HELLO cut short
        [b"\x95\x20\x09\x09\x03\x04", b"payload"],  # a request from and to nobody
        [b"\x95\xcc\xff\x01\x02\x03\x04", b"payload"],  # a kind that does not exist
        [b"", b"", b""],
        [b"\xdd\xff\xff\xff\xff"],  # an array that claims four thousand million elements
        [b"\x91" * 60_000],  # nested beyond any stack
    ],
)
def test_rubbish_disturbs_nobody(connect: Connect, frames: list[bytes]) -> None:
    good, bad, registered = connect(), connect(), connect()
    good.register("good", 1)
    registered.register("registered", 2)
    good.expect(Roster)
    for _ in range(50):
        bad.socket.send_multipart(frames)
        registered.socket.send_multipart(frames)
    good.route(Kind.REQUEST, 2, 7, b"x")
    assert drain_until(registered, Route).id == 7
    good.expect_nothing()
    assert good.status()["counters"]


def test_a_peer_that_never_reads_stalls_nobody_and_its_queue_is_bounded(dial: Dial) -> None:
    config = BrokerConfig(bind=("tcp://127.0.0.1:0",), queue_bytes=16 * CHUNK_BYTES)
    with Broker(config) as broker:
        deaf = dial(broker.address, {zmq.RCVHWM: 2, zmq.RCVBUF: 1 << 16})
        deaf.register("deaf", 1)
        talker = dial(broker.address)
        talker.register("talker", 2)
        other = dial(broker.address)
        other.register("other", 3)
        talker.expect(Roster)
        chunk = b"x" * CHUNK_BYTES
        for number in range(120):
            talker.route(Kind.CHUNK, 1, number, chunk)
        report = talker.expect(Undeliverable)
        assert (report.code, report.dst, report.kind) == ("full", 1, Kind.CHUNK)
        assert "'deaf'" in report.text
        start = time.monotonic()
        for number in range(100):
            talker.route(Kind.REQUEST, 3, number, b"ping")
            assert drain_until(other, Route).id == number
        assert time.monotonic() - start < 2.0
        (status,) = [
            peer
            for peer in other.status()["namespaces"]["default"]["peers"]
            if peer["name"] == "deaf"
        ]
        assert 8 * CHUNK_BYTES < status["queued_bytes"] <= 17 * CHUNK_BYTES
        # Those that were kept come, in order, once it reads.
        numbers = [drain_until(deaf, Route).id for _ in range(status["sent"]["messages"])]
        assert numbers == sorted(numbers)
        assert len(numbers) < 120


def test_a_queue_dies_with_its_connection(dial: Dial) -> None:
    config = BrokerConfig(
        bind=("tcp://127.0.0.1:0",), heartbeat_interval=0.2, heartbeat_timeout=1.0
    )
    with Broker(config) as broker, dial(broker.address) as talker:
        talker.register("talker", 2)
        with dial(broker.address, {zmq.RCVHWM: 2}) as deaf:
            deaf.register("deaf", 1)
            for number in range(100):
                talker.route(Kind.CHUNK, 1, number, b"x" * CHUNK_BYTES)
            talker.status()  # answered behind them all
        while not (roster := drain_until(talker, Roster)).left:
            pass
        assert roster.left[0].peer.name == "deaf"
        assert len(broker._outbound) == 0


def test_many_peers_register_at_once(connect: Connect) -> None:
    peers = [connect() for _ in range(50)]
    start = time.monotonic()
    for number, peer in enumerate(peers):
        peer.send(hello(f"worker{number}", number + 1))
    ranks = {peer.expect(Welcome).peer.id for peer in peers}
    assert ranks == set(range(50))
    assert time.monotonic() - start < 5.0
    # Each hears of all others, by its welcome or the rosters after it.
    assert len(peers[0].status()["namespaces"]["default"]["peers"]) == 50


def test_peers_that_connect_and_vanish_leave_nothing_behind(
    connect: Connect, broker: Broker
) -> None:
    watcher = connect()
    watcher.register("watcher", 1)
    for number in range(200):
        with connect() as peer:
            if number % 2:
                peer.register(f"worker{number}", number + 2)
            else:
                peer.send(b"rubbish")
    left = 0
    while left < 100:
        left += len(watcher.expect(Roster).left)
    (peers,) = watcher.status()["namespaces"].values()
    assert [peer["name"] for peer in peers["peers"]] == ["watcher"]
    assert len(broker._outbound) == 0


def test_status_tells_of_peers_and_traffic(connect: Connect) -> None:
    a = connect()
    a.register("a", 1, host="here", pid=7)
    a.send(Heartbeat(sent=0.0, stats={"calls": 3.0}))
    a.route(Kind.REQUEST, 1, 7, b"12345")
    a.expect_frames()
    status = a.status()
    (peer,) = status["namespaces"]["default"]["peers"]
    assert peer["name"] == "a"
    assert peer["host"] == "here"
    assert peer["stats"] == {"calls": 3.0}
    assert peer["received"] == peer["sent"] == {"messages": 1, "bytes": 5}
    assert peer["silent_for"] < 5.0
    assert status["versions"]["tensorplay"]
    assert status["uptime"] > 0.0
    assert status["counters"]["joined"] == 1


def test_several_endpoints_lead_to_one_broker(dial: Dial, tmp_path: Path) -> None:
    config = BrokerConfig(bind=("tcp://127.0.0.1:0", f"ipc://{tmp_path}/b", "tcp://[::1]:0"))
    try:
        broker = Broker(config).start()
    except BrokerError as error:  # a host without IPv6
        pytest.skip(str(error))
    with broker:
        peers = [dial(address) for address in broker.addresses]
        for number, peer in enumerate(peers):
            peer.register(f"worker{number}", number + 1)
        peers[2].route(Kind.REQUEST, 2, 7, b"x")
        assert drain_until(peers[1], Route).id == 7
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:0", "ipc"])
def test_an_endpoint_in_use_is_an_error(endpoint: str, tmp_path: Path) -> None:
    if endpoint == "ipc":
        endpoint = f"ipc://{tmp_path}/broker"
    with Broker(BrokerConfig(bind=(endpoint,))) as first:
        second = Broker(BrokerConfig(bind=(first.address,)))
        with pytest.raises(BrokerError, match=f"cannot listen at {first.address}"):
            second.start()
        second.close()
        assert endpoint.startswith("tcp") or (tmp_path / "broker").exists()


def test_a_stale_ipc_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "broker").touch()
    with Broker(BrokerConfig(bind=(f"ipc://{tmp_path}/broker",))):
        pass


def test_drain_waits_for_the_last_peer(dial: Dial) -> None:
    broker = Broker(BrokerConfig(bind=("tcp://127.0.0.1:0",))).start()
    with dial(broker.address) as peer:
        peer.register("a", 1)
        broker.drain(PATIENCE)
        peer.send(hello("a", 1))
        peer.expect(Welcome)  # still served
        peer.leave()
        peer.expect(Farewell)
    start = time.monotonic()
    assert broker._thread is not None
    broker._thread.join(PATIENCE)
    assert time.monotonic() - start < 2.0
    broker.close()


def test_what_waits_for_a_slow_peer_goes_out_before_the_end(dial: Dial) -> None:
    with Broker(BrokerConfig(bind=("tcp://127.0.0.1:0",))) as broker:
        slow = dial(broker.address, {zmq.RCVHWM: 2, zmq.RCVBUF: 1 << 16})
        slow.register("slow", 1)
        talker = dial(broker.address)
        talker.register("talker", 2)
        for number in range(60):
            talker.route(Kind.CHUNK, 1, number, b"x" * CHUNK_BYTES)
        talker.status()  # answered behind them all
        assert len(broker._outbound) == 1
        broker.stop(PATIENCE)
        assert [drain_until(slow, Route).id for _ in range(60)] == list(range(60))
        assert broker._thread is not None
        broker._thread.join(PATIENCE)
        assert not broker._thread.is_alive()


def test_a_peer_that_never_reads_holds_up_the_end_no_longer_than_the_limit(dial: Dial) -> None:
    with Broker(BrokerConfig(bind=("tcp://127.0.0.1:0",))) as broker:
        dial(broker.address, {zmq.RCVHWM: 2, zmq.RCVBUF: 1 << 16}).register("deaf", 1)
        talker = dial(broker.address)
        talker.register("talker", 2)
        for number in range(60):
            talker.route(Kind.CHUNK, 1, number, b"x" * CHUNK_BYTES)
        talker.status()
        start = time.monotonic()
        broker.stop(0.5)
        assert broker._thread is not None
        broker._thread.join(PATIENCE)
        assert 0.5 <= time.monotonic() - start < 3.0
