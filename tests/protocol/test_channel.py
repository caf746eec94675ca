"""One channel: numbers, acknowledgements, and what is done about losses."""

from __future__ import annotations

import itertools

import pytest

from tensorplay.protocol import wire
from tensorplay.protocol.channel import (
    ACK_BYTES,
    ACK_MESSAGES,
    ACK_SECONDS,
    FULL_SECONDS,
    MAX_SYNC_SECONDS,
    MAX_UNACKNOWLEDGED,
    SYNC_SECONDS,
    TRANSIT,
    Channel,
    Frames,
)
from tensorplay.protocol.messages import CHUNK_BYTES, Kind, Route

WINDOW = 1 << 30
#: Too large for a batch.
ALONE = 10_000


def route_of(frames: Frames | None) -> Route:
    assert frames is not None
    return decoded(bytes(frames[0]))


def decoded(header: bytes | None) -> Route:
    assert header is not None
    route = wire.decode(header)
    assert isinstance(route, Route)
    return route


@pytest.fixture
def here() -> Channel:
    return Channel(1, 2, WINDOW)


@pytest.fixture
def there() -> Channel:
    return Channel(2, 1, WINDOW)


def post(channel: Channel, *ids: int) -> None:
    for id in ids:
        channel.post(Kind.REQUEST, id, ALONE, (b"x" * ALONE,))


def take(channel: Channel, now: float = 0.0) -> list[Route]:
    routes = []
    while (frames := channel.take(now)) is not None:
        routes.append(route_of(frames))
    return routes


def test_messages_are_numbered_and_taken_in_order_once(here: Channel, there: Channel) -> None:
    post(here, 10, 11)
    first, second = take(here)
    assert (first.seq, second.seq) == (1, 2)
    assert there.receive(first, 0.0) == (True, None)
    assert there.receive(first, 0.0) == (False, None)
    assert there.receive(second, 0.0) == (True, None)


def test_a_message_the_other_way_acknowledges(here: Channel, there: Channel) -> None:
    post(here, 10)
    (request,) = take(here)
    there.receive(request, 0.0)
    post(there, 10)
    (reply,) = take(there)
    assert reply.ack == 1
    here.receive(reply, 0.0)
    assert here.unacknowledged == 0
    assert here.next_tick() == ACK_SECONDS  # now this side owes one


def test_the_last_messages_are_acknowledged_after_a_while(here: Channel, there: Channel) -> None:
    post(here, 10)
    there.receive(take(here)[0], 5.0)
    assert there.next_tick() == 5.0 + ACK_SECONDS
    assert there.tick(5.0) == []
    (header,) = there.tick(5.0 + ACK_SECONDS)
    assert there.next_tick() == float("inf")
    here.receive(decoded(header), 5.2)
    assert here.unacknowledged == 0
    assert here.next_tick() == float("inf")


def test_many_messages_are_acknowledged_at_once(here: Channel, there: Channel) -> None:
    post(here, *range(ACK_MESSAGES))
    credits = [there.receive(route, 0.0)[1] for route in take(here)]
    assert credits[:-1] == [None] * (ACK_MESSAGES - 1)
    assert decoded(credits[-1]).ack == ACK_MESSAGES


def test_only_so_much_is_on_its_way_at_a_time(here: Channel, there: Channel) -> None:
    payload = [memoryview(bytes(3 * TRANSIT))]
    here.post_stream(Kind.REQUEST, 7, 3 * TRANSIT, b"h", payload)
    header, *chunks = take(here)
    assert sum(chunk.size for chunk in chunks) == TRANSIT
    there.receive(header, 0.0)
    credits = [there.receive(chunk, 0.0)[1] for chunk in chunks]
    told = [decoded(header) for header in credits if header is not None]
    assert len(told) >= TRANSIT // ACK_BYTES
    here.receive(told[0], 0.0)  # nothing has been consumed, but so much has arrived
    assert sum(chunk.size for chunk in take(here)) == ACK_BYTES


def test_a_gap_is_reported_once_and_filled(here: Channel, there: Channel) -> None:
    post(here, 10, 11, 12)
    _, second, third = take(here)
    handled, header = there.receive(second, 0.0)
    assert not handled
    assert there.receive(third, 0.0) == (False, None)
    here.receive(decoded(header), 0.0)
    again = take(here)
    assert [(route.seq, route.id) for route in again] == [(1, 10), (2, 11), (3, 12)]
    assert [there.receive(route, 0.0)[0] for route in again] == [True] * 3


def test_a_second_report_of_the_same_gap_sends_nothing_again(here: Channel) -> None:
    post(here, 10, 11)
    take(here)
    report = Route(Kind.CREDIT, 1, 2, 2, 0, 0, 0)
    here.receive(report, 0.0)
    assert len(take(here)) == 2
    here.receive(report, 0.1)
    assert take(here) == []
    here.receive(report, SYNC_SECONDS)  # by now it must have been lost again
    assert len(take(here)) == 2


def test_what_is_acknowledged_meanwhile_is_not_sent_again(here: Channel) -> None:
    post(here, 10, 11)
    take(here)
    here.receive(Route(Kind.CREDIT, 1, 2, 2, 0, 0, 0), 0.0)
    here.receive(Route(Kind.CREDIT, 1, 2, 0, 0, 0, 1), 0.0)
    assert [route.seq for route in take(here)] == [2]


def test_a_lost_last_message_is_asked_for_in_time(here: Channel, there: Channel) -> None:
    post(here, 10)
    take(here, 5.0)  # lost
    assert here.next_tick() == 5.0 + SYNC_SECONDS
    (header,) = here.tick(5.0 + SYNC_SECONDS)
    sync = decoded(header)
    assert (sync.kind, sync.id) == (Kind.SYNC, 1)
    _, answer = there.receive(sync, 6.0)
    here.receive(decoded(answer), 6.0)
    assert [route.seq for route in take(here, 6.0)] == [1]


def test_questions_that_are_not_answered_become_rarer(here: Channel) -> None:
    post(here, 10)
    take(here)
    now, times = 0.0, []
    for _ in range(6):
        now = here.next_tick()
        times.append(now)
        assert len(here.tick(now)) == 1
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert gaps == [1.0, 2.0, 4.0, 8.0, MAX_SYNC_SECONDS]


def test_a_receiver_that_is_only_slow_is_sent_nothing_twice(here: Channel, there: Channel) -> None:
    post(here, 10, 11)
    first, second = take(here)
    (header,) = here.tick(SYNC_SECONDS)
    # The question arrives behind all that was sent before it.
    there.receive(first, 1.0)
    there.receive(second, 1.0)
    _, answer = there.receive(decoded(header), 1.0)
    here.receive(decoded(answer), 1.0)
    assert take(here, 1.0) == []
    assert here.unacknowledged == 0


def test_after_a_reconnect_nothing_goes_before_the_question_is_answered(
    here: Channel, there: Channel
) -> None:
    post(here, 10, 11)
    first, _ = take(here)
    there.receive(first, 0.0)
    here.back(3.0)
    post(here, 12)
    assert take(here, 3.0) == []
    sync, credit = map(decoded, here.tick(3.0))
    assert (sync.kind, credit.kind) == (Kind.SYNC, Kind.CREDIT)
    _, answer = there.receive(sync, 3.0)
    here.receive(decoded(answer), 3.0)
    assert [route.seq for route in take(here, 3.0)] == [2, 3]


def test_a_peer_that_is_away_gets_nothing_until_it_is_back(here: Channel) -> None:
    post(here, 10)
    take(here)
    here.away()
    post(here, 11)
    assert take(here) == []
    assert here.next_tick() == float("inf")
    assert here.tick(100.0) == []
    here.back(100.0)
    assert [decoded(header).kind for header in here.tick(100.0)] == [Kind.SYNC, Kind.CREDIT]


def test_a_full_queue_in_the_broker_is_tried_again_soon(here: Channel, there: Channel) -> None:
    post(here, 10, 11)
    take(here)  # both refused
    here.full(2.0)
    post(here, 12)
    assert take(here, 2.0) == []
    assert here.next_tick() == 2.0 + FULL_SECONDS
    (header,) = here.tick(2.0 + FULL_SECONDS)
    _, answer = there.receive(decoded(header), 2.1)
    here.receive(decoded(answer), 2.1)
    assert [route.seq for route in take(here, 2.1)] == [1, 2, 3]


def test_credit_counts_from_the_beginning_so_that_one_may_be_lost() -> None:
    here, there = Channel(1, 2, 3 * ALONE), Channel(2, 1, 3 * ALONE)
    post(here, *range(6))
    for route in take(here):
        there.receive(route, 0.0)
    assert here.outstanding == 3 * ALONE
    assert there.consumed(ALONE, 0.0) is not None  # lost
    credit = there.consumed(ALONE, 0.0)
    here.receive(decoded(credit), 0.0)
    assert here.outstanding == ALONE
    assert len(take(here)) == 2


def test_a_sender_whose_last_credit_was_lost_asks() -> None:
    here, there = Channel(1, 2, ALONE), Channel(2, 1, ALONE)
    post(here, 10)
    (route,) = take(here)
    there.receive(route, 0.0)
    here.receive(Route(Kind.CREDIT, 1, 2, 0, 0, 0, 1), 0.0)  # has arrived, is not consumed
    there.consumed(ALONE, 0.0)  # lost
    post(here, 11)
    assert take(here, 7.0) == []
    (header,) = here.tick(here.next_tick())
    _, answer = there.receive(decoded(header), 8.0)
    here.receive(decoded(answer), 8.0)
    assert [route.id for route in take(here, 8.0)] == [11]


def test_messages_of_no_size_are_limited_in_number(here: Channel) -> None:
    for id in range(MAX_UNACKNOWLEDGED + 100):
        here.post(Kind.REPLY, id, 0, (b"x" * ALONE,))
    here._window = 0
    taken = 0
    while here.take(0.0) is not None:
        taken += 1
    assert taken <= MAX_UNACKNOWLEDGED


def test_the_rest_of_a_cancelled_payload_is_not_sent(here: Channel) -> None:
    here.post_stream(Kind.REQUEST, 7, 4 * CHUNK_BYTES, b"h", [memoryview(bytes(4 * CHUNK_BYTES))])
    kinds = [route_of(here.take(0.0)).kind for _ in range(2)]
    assert kinds == [Kind.REQUEST, Kind.CHUNK]
    here.post(Kind.CANCEL, 7, 0, ())
    assert [route.kind for route in take(here)] == [Kind.CANCEL]


def test_a_message_that_was_given_up_leaves_its_number(here: Channel, there: Channel) -> None:
    post(here, 10, 11)
    take(here)
    outstanding = here.outstanding
    here.void(10)
    assert here.outstanding == outstanding - ALONE
    here.receive(Route(Kind.CREDIT, 1, 2, 2, 0, 0, 0), 0.0)
    again = take(here)
    assert [(route.kind, route.seq) for route in again] == [(Kind.VOID, 1), (Kind.REQUEST, 2)]
    assert [there.receive(route, 0.0)[0] for route in again] == [True, True]
