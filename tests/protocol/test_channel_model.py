"""Two channels over a network that loses, repeats, reorders and delays."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tensorplay.protocol import batch, wire
from tensorplay.protocol.chunks import Assembler
from tensorplay.protocol.messages import CHUNK_BYTES, Kind, Route
from tensorplay.protocol.outbox import Frames, Outbox, Verdict

WINDOW = 3 * CHUNK_BYTES
sides = st.sampled_from([0, 1])


class Side:
    """A peer: what it has sent, what has come."""

    def __init__(self, me: int, other: int) -> None:
        self.me, self.other = me, other
        self.outbox = Outbox(me, WINDOW)
        self.small: list[int] = []  # ids posted
        self.large: list[int] = []
        self.came: list[int] = []
        self.whole: list[int] = []
        self.partial: dict[int, Assembler] = {}
        self.wire: list[Frames] = []  # on its way from here

    def post(self, id: int, size: int) -> None:
        if size <= CHUNK_BYTES:
            self.small.append(id)
            self.outbox.post(self.other, Kind.REQUEST, id, size, (b"", bytes(size)))
        else:
            self.large.append(id)
            payload = [memoryview(bytes(size))]
            self.outbox.post_stream(self.other, Kind.REQUEST, id, size, b"h", payload)

    def flush(self, now: float) -> None:
        while (frames := self.outbox.take(now)) is not None:
            self.wire.append(frames)

    def receive(self, frames: Frames, now: float) -> None:
        route = wire.decode(bytes(frames[0]))
        assert isinstance(route, Route)
        verdict = self.outbox.receive(route, now)
        assert verdict is not Verdict.FORGOTTEN
        if verdict is not Verdict.HANDLE:
            return
        if route.kind == Kind.BATCH:
            for _, id, size, _ in batch.unpack(frames[1:]):
                self.take(id, size, now)
        elif route.kind == Kind.CHUNK:
            assembler = self.partial[route.id]
            assembler.add(assembler.received, [memoryview(frame) for frame in frames[2:]])
            self.outbox.consumed(self.other, route.size, now)
            if assembler.complete:
                self.whole.append(route.id)
                del self.partial[route.id]
        elif route.size > CHUNK_BYTES:
            self.partial[route.id] = Assembler([route.size], lambda n: memoryview(bytearray(n)))
        else:
            self.take(route.id, route.size, now)

    def take(self, id: int, size: int, now: float) -> None:
        self.came.append(id)
        self.outbox.consumed(self.other, size, now)


class ChannelModel(RuleBasedStateMachine):
    """Whatever the network does, everything arrives once, and in order, once it behaves."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.ids = 0
        self.sides = (Side(1, 2), Side(2, 1))

    @rule(side=sides, size=st.sampled_from([0, 10, 10, 9000, CHUNK_BYTES + 1, 5 * CHUNK_BYTES]))
    def post(self, side: int, size: int) -> None:
        self.ids += 1
        self.sides[side].post(self.ids, size)

    @rule(side=sides)
    def send(self, side: int) -> None:
        self.sides[side].flush(self.now)

    @rule(side=sides, count=st.integers(1, 20))
    def deliver(self, side: int, count: int) -> None:
        for _ in range(min(count, len(self.sides[side].wire))):
            self.sides[1 - side].receive(self.sides[side].wire.pop(0), self.now)

    @rule(side=sides, position=st.integers(0, 10), keep=st.booleans())
    def deliver_out_of_turn(self, side: int, position: int, keep: bool) -> None:
        way = self.sides[side].wire
        if way:
            position %= len(way)
            frames = way[position] if keep else way.pop(position)
            self.sides[1 - side].receive(frames, self.now)

    @rule(side=sides, count=st.integers(1, 5))
    def deliver_twice(self, side: int, count: int) -> None:
        here = self.sides[side]
        here.flush(self.now)
        first = here.wire[:count]
        del here.wire[:count]
        for frames in first * 2:
            self.sides[1 - side].receive(frames, self.now)

    @rule(side=sides, count=st.integers(1, 5))
    def lose(self, side: int, count: int) -> None:
        del self.sides[side].wire[:count]

    @rule(side=sides)
    def reconnect(self, side: int) -> None:
        self.sides[side].outbox.all_back(self.now)

    @rule(side=sides)
    def come_back(self, side: int) -> None:
        here = self.sides[side]
        here.outbox.back(here.other, self.now)

    @rule(side=sides)
    def go_away_and_come_back(self, side: int) -> None:
        here = self.sides[side]
        here.outbox.away(here.other)
        here.flush(self.now)
        here.outbox.back(here.other, self.now)

    @rule(side=sides)
    def be_refused(self, side: int) -> None:
        here = self.sides[side]
        here.outbox.full(here.other, self.now)

    @rule(seconds=st.sampled_from([0.01, 0.2, 1.5]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for side in self.sides:
            side.outbox.tick(self.now)

    @invariant()
    def small_ones_come_once_and_in_order(self) -> None:
        for here, there in (self.sides, self.sides[::-1]):
            assert there.came == here.small[: len(there.came)]
            assert len(set(there.whole)) == len(there.whole)

    def teardown(self) -> None:
        for _ in range(400):
            for here, there in (self.sides, self.sides[::-1]):
                here.flush(self.now)
                while here.wire:
                    there.receive(here.wire.pop(0), self.now)
            if all(side.outbox.tick(self.now) == float("inf") for side in self.sides) and all(
                side.outbox.empty for side in self.sides
            ):
                break
            self.now += 0.05
        for here, there in (self.sides, self.sides[::-1]):
            assert there.came == here.small
            assert sorted(there.whole) == sorted(here.large)
            assert here.outbox.empty
            assert here.outbox.queued_bytes() == {}
            assert here.outbox.tick(self.now) == float("inf")


ChannelModel.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestChannelModel = ChannelModel.TestCase
