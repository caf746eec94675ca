"""The order in which a peer's messages may go."""

from __future__ import annotations

from tensorplay.protocol import wire
from tensorplay.protocol.chunks import decode_position
from tensorplay.protocol.messages import CHUNK_BYTES, Kind, Route
from tensorplay.protocol.outbox import Frames, Outbox


def request(dst: int, id: int, size: int) -> Route:
    return Route(Kind.REQUEST, dst, 1, id, size)


def take_all(outbox: Outbox) -> list[Frames]:
    taken = []
    while (frames := outbox.take()) is not None:
        taken.append(frames)
    return taken


def route_of(frames: Frames) -> Route:
    route = wire.decode(frames[0])
    assert isinstance(route, Route)
    return route


def post(outbox: Outbox, dst: int, id: int, size: int) -> None:
    payload = [b"x" * size]
    if size <= CHUNK_BYTES:
        outbox.post(request(dst, id, size), b"h", *payload)
    else:
        outbox.post_stream(request(dst, id, size), b"h", [memoryview(payload[0])])


def test_control_goes_first() -> None:
    outbox = Outbox(1 << 20)
    post(outbox, 2, 1, 10)
    outbox.post_control(b"urgent")
    assert outbox.take() == (b"urgent",)


def test_messages_to_one_receiver_keep_their_order() -> None:
    outbox = Outbox(1 << 20)
    for id in range(5):
        post(outbox, 2, id, 10)
    assert [route_of(frames).id for frames in take_all(outbox)] == list(range(5))


def test_receivers_take_turns() -> None:
    outbox = Outbox(1 << 20)
    for id in range(3):
        post(outbox, 2, id, 10)
    for id in range(3):
        post(outbox, 3, id, 10)
    assert [route_of(frames).dst for frames in take_all(outbox)] == [2, 3, 2, 3, 2, 3]


def test_a_large_payload_goes_in_chunks_behind_its_header() -> None:
    outbox = Outbox(1 << 30)
    post(outbox, 2, 7, 2 * CHUNK_BYTES + 1)
    taken = take_all(outbox)
    assert [route_of(frames).kind for frames in taken] == [Kind.REQUEST] + [Kind.CHUNK] * 3
    assert [route_of(frames).size for frames in taken[1:]] == [CHUNK_BYTES, CHUNK_BYTES, 1]
    positions = [decode_position(frames[1]) for frames in taken[1:]]
    assert [position.offset for position in positions] == [0, CHUNK_BYTES, 2 * CHUNK_BYTES]
    assert {position.kind for position in positions} == {Kind.REQUEST}


def test_small_messages_overtake_chunks() -> None:
    outbox = Outbox(1 << 30)
    post(outbox, 2, 7, 8 * CHUNK_BYTES)
    assert route_of(outbox.take() or ()).kind == Kind.REQUEST
    assert route_of(outbox.take() or ()).kind == Kind.CHUNK
    post(outbox, 2, 8, 10)
    assert route_of(outbox.take() or ()).id == 8


def test_small_messages_do_not_starve_chunks() -> None:
    outbox = Outbox(1 << 30)
    post(outbox, 2, 7, 2 * CHUNK_BYTES)
    for id in range(1000):
        post(outbox, 2, 100 + id, 1)
    kinds = [route_of(frames).kind for frames in take_all(outbox)]
    assert kinds.index(Kind.CHUNK) < 100


def test_two_large_payloads_take_turns() -> None:
    outbox = Outbox(1 << 30)
    post(outbox, 2, 7, 3 * CHUNK_BYTES)
    post(outbox, 2, 8, 3 * CHUNK_BYTES)
    chunks = [route_of(f).id for f in take_all(outbox) if route_of(f).kind == Kind.CHUNK]
    assert chunks == [7, 8, 7, 8, 7, 8]


def test_a_receiver_that_does_not_consume_gets_no_more_than_its_window() -> None:
    outbox = Outbox(100)
    for id in range(10):
        post(outbox, 2, id, 40)
    assert len(take_all(outbox)) == 2
    outbox.credit(2, 40)
    assert len(take_all(outbox)) == 1
    assert outbox.queued_bytes() == {2: 80}


def test_a_slow_receiver_holds_up_nobody_else() -> None:
    outbox = Outbox(100)
    for id in range(10):
        post(outbox, 2, id, 90)
        post(outbox, 3, id, 1)
    assert [route_of(frames).dst for frames in take_all(outbox)].count(3) == 10


def test_a_message_larger_than_the_window_still_goes() -> None:
    outbox = Outbox(CHUNK_BYTES // 2)
    post(outbox, 2, 7, 2 * CHUNK_BYTES)
    assert [route_of(f).kind for f in take_all(outbox)] == [Kind.REQUEST, Kind.CHUNK]
    outbox.credit(2, CHUNK_BYTES)
    assert [route_of(f).kind for f in take_all(outbox)] == [Kind.CHUNK]


def test_nothing_is_kept_for_a_receiver_that_is_gone() -> None:
    outbox = Outbox(100)
    post(outbox, 2, 1, 3 * CHUNK_BYTES)
    outbox.drop(2)
    assert outbox.empty
    assert outbox.take() is None
    outbox.credit(2, 10)  # late credit is ignored
    assert outbox.take() is None
