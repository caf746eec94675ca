"""The order in which a peer's messages may go."""

from __future__ import annotations

from tensorplay.protocol import batch, wire
from tensorplay.protocol.chunks import decode_position
from tensorplay.protocol.messages import CHUNK_BYTES, Kind, Route
from tensorplay.protocol.outbox import Frames, Outbox, Verdict

ME = 1
#: Bytes of a small message that is too large for a batch.
ALONE = batch.MESSAGE_BYTES + 1


def take_all(outbox: Outbox) -> list[Frames]:
    taken = []
    while (frames := outbox.take(0.0)) is not None:
        taken.append(frames)
    return taken


def route_of(frames: Frames | None) -> Route:
    assert frames is not None
    route = wire.decode(frames[0])
    assert isinstance(route, Route)
    return route


def post(outbox: Outbox, dst: int, id: int, size: int) -> None:
    payload = b"x" * size
    if size <= CHUNK_BYTES:
        outbox.post(dst, Kind.REQUEST, id, size, (b"h", payload))
    else:
        outbox.post_stream(dst, Kind.REQUEST, id, size, b"h", [memoryview(payload)])


def credit(outbox: Outbox, src: int, consumed: int, ack: int = 0) -> None:
    """Receives a CREDIT."""
    outbox.receive(Route(Kind.CREDIT, ME, src, 0, consumed, 0, ack), 0.0)


def test_control_goes_first() -> None:
    outbox = Outbox(ME, 1 << 20)
    post(outbox, 2, 1, 10)
    outbox.post_control(b"urgent")
    assert outbox.take(0.0) == (b"urgent",)


def test_messages_to_one_receiver_keep_their_order() -> None:
    outbox = Outbox(ME, 1 << 20)
    for id in range(5):
        post(outbox, 2, id, ALONE)
    assert [route_of(frames).id for frames in take_all(outbox)] == list(range(5))


def test_receivers_take_turns() -> None:
    outbox = Outbox(ME, 1 << 20)
    for id in range(3):
        post(outbox, 2, id, ALONE)
    for id in range(3):
        post(outbox, 3, id, ALONE)
    assert [route_of(frames).dst for frames in take_all(outbox)] == [2, 3, 2, 3, 2, 3]


def test_a_large_payload_goes_in_chunks_behind_its_header() -> None:
    outbox = Outbox(ME, 1 << 30)
    post(outbox, 2, 7, 2 * CHUNK_BYTES + 1)
    taken = take_all(outbox)
    assert [route_of(frames).kind for frames in taken] == [Kind.REQUEST] + [Kind.CHUNK] * 3
    assert [route_of(frames).size for frames in taken[1:]] == [CHUNK_BYTES, CHUNK_BYTES, 1]
    positions = [decode_position(frames[1]) for frames in taken[1:]]
    assert [position.offset for position in positions] == [0, CHUNK_BYTES, 2 * CHUNK_BYTES]
    assert {position.kind for position in positions} == {Kind.REQUEST}


def test_small_messages_overtake_chunks() -> None:
    outbox = Outbox(ME, 1 << 30)
    post(outbox, 2, 7, 8 * CHUNK_BYTES)
    assert route_of(outbox.take(0.0)).kind == Kind.REQUEST
    assert route_of(outbox.take(0.0)).kind == Kind.CHUNK
    post(outbox, 2, 8, 10)
    assert route_of(outbox.take(0.0)).id == 8


def test_small_messages_do_not_starve_chunks() -> None:
    outbox = Outbox(ME, 1 << 30)
    post(outbox, 2, 7, 2 * CHUNK_BYTES)
    for id in range(1000):
        post(outbox, 2, 100 + id, 1)
    kinds = [route_of(frames).kind for frames in take_all(outbox)]
    assert kinds.index(Kind.CHUNK) < 100


def test_two_large_payloads_take_turns() -> None:
    outbox = Outbox(ME, 1 << 30)
    post(outbox, 2, 7, 3 * CHUNK_BYTES)
    post(outbox, 2, 8, 3 * CHUNK_BYTES)
    chunks = [route_of(f).id for f in take_all(outbox) if route_of(f).kind == Kind.CHUNK]
    assert chunks == [7, 8, 7, 8, 7, 8]


def test_a_receiver_that_does_not_consume_gets_no_more_than_its_window() -> None:
    outbox = Outbox(ME, 5 * ALONE // 2)
    for id in range(10):
        post(outbox, 2, id, ALONE)
    assert len(take_all(outbox)) == 2
    credit(outbox, 2, ALONE)
    assert len(take_all(outbox)) == 1
    assert outbox.queued_bytes() == {2: 2 * ALONE}


def test_a_slow_receiver_holds_up_nobody_else() -> None:
    outbox = Outbox(ME, 20 * ALONE)
    for id in range(10):
        post(outbox, 2, id, 11 * ALONE)
        post(outbox, 3, id, ALONE)
    assert [route_of(frames).dst for frames in take_all(outbox)].count(3) == 10


def test_a_message_larger_than_the_window_still_goes() -> None:
    outbox = Outbox(ME, CHUNK_BYTES // 2)
    post(outbox, 2, 7, 2 * CHUNK_BYTES)
    assert [route_of(f).kind for f in take_all(outbox)] == [Kind.REQUEST, Kind.CHUNK]
    credit(outbox, 2, CHUNK_BYTES)
    assert [route_of(f).kind for f in take_all(outbox)] == [Kind.CHUNK]


def test_nothing_is_kept_for_a_receiver_that_is_gone() -> None:
    outbox = Outbox(ME, 100)
    post(outbox, 2, 1, 3 * CHUNK_BYTES)
    outbox.drop(2)
    assert outbox.empty
    assert outbox.take(0.0) is None
    credit(outbox, 2, 10)  # late news of the life before; the answer tells of the new one
    assert [route_of(frames).life for frames in take_all(outbox)] == [1]


def test_small_messages_that_wait_together_travel_together() -> None:
    outbox = Outbox(ME, 1 << 20)
    for id in range(5):
        post(outbox, 2, id, 10)
    (frames,) = take_all(outbox)
    route = route_of(frames)
    assert (route.kind, route.size, route.seq) == (Kind.BATCH, 50, 1)
    assert [entry[1] for entry in batch.unpack(frames[1:])] == list(range(5))


def test_a_batch_stays_in_the_window_and_in_its_own_limits() -> None:
    outbox = Outbox(ME, 100)
    for id in range(10):
        post(outbox, 2, id, 40)
    (frames,) = take_all(outbox)
    assert len(list(batch.unpack(frames[1:]))) == 2
    outbox = Outbox(ME, 1 << 30)
    for id in range(1000):
        post(outbox, 2, id, 1000)
    for frames in take_all(outbox):
        entries = list(batch.unpack(frames[1:]))
        assert len(entries) <= batch.BATCH_MESSAGES
        assert route_of(frames).size <= batch.BATCH_BYTES


def test_a_peer_that_was_given_up_learns_of_it() -> None:
    here, there = Outbox(1, 1 << 20), Outbox(2, 1 << 20)
    for _ in range(3):
        post(here, 2, 7, ALONE)
    for frames in take_all(here):
        assert there.receive(route_of(frames), 0.0) is Verdict.HANDLE
    there.drop(1)  # lost, as far as it knows
    there.post(1, Kind.REQUEST, 8, 0, ())
    (frames,) = take_all(there)
    assert here.receive(route_of(frames), 0.0) is Verdict.FORGOTTEN
    assert here.receive(route_of(frames), 0.0) is Verdict.HANDLE
    post(here, 2, 9, ALONE)
    (frames,) = take_all(here)
    assert (route_of(frames).seq, route_of(frames).ack, route_of(frames).life) == (1, 1, 1)
    assert there.receive(route_of(frames), 0.0) is Verdict.HANDLE
