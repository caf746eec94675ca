"""Counting of references among several processes on a network that delays and reorders.

The network keeps one promise only: between two processes no message overtakes a report of
counts that was sent before it.  Reports overtake reports (one was lost and sent again) and
messages (cut into chunks), messages overtake each other, and between different pairs
everything can overtake everything.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tensorplay.protocol.refs import RefCounts, RefToken, RRefKey


@dataclass
class Parcel:
    """Something under way from ``src`` to ``dst``."""

    kind: str  # "report", "ack", "message", "remote" or "left"
    src: int
    dst: int
    content: Any = None
    kept: list[RRefKey] = field(default_factory=list)

    @property
    def is_report(self) -> bool:
        return self.kind in ("report", "ack")


class Process:
    """One process: its counts, and its RRef objects by key."""

    def __init__(self, me: int) -> None:
        self.me = me
        self.counts = RefCounts(me)
        self.objects: Counter[RRefKey] = Counter()
        self.arrived: list[Parcel] = []
        self.running: list[RRefKey] = []
        self.alive = True
        self.number = 0

    def new_key(self) -> RRefKey:
        self.number += 1
        return RRefKey(self.me, self.number)


class Network(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.processes: list[Process] = []
        self.parcels: list[Parcel] = []
        self.owners: dict[RRefKey, int] = {}
        self.made: set[RRefKey] = set()

    @initialize(size=st.integers(3, 4))
    def start(self, size: int) -> None:
        """Every process owns an object that the next one made there."""
        self.processes = [Process(me) for me in range(size)]
        for owner, creator in zip(
            self.processes, [*self.processes[1:], self.processes[0]], strict=True
        ):
            self.create(creator, owner)
        self.settle_down()

    # Choosing.

    def pick(self, data: st.DataObject, options: list[Any]) -> Any:
        return data.draw(st.sampled_from(options)) if options else None

    def living(self) -> list[Process]:
        return [process for process in self.processes if process.alive]

    def held(self, process: Process) -> list[RRefKey]:
        return sorted((key for key, n in process.objects.items() if n), key=repr)

    def spare(self, process: Process, key: RRefKey) -> int:
        """Returns how many objects are not kept for requests under way."""
        kept = sum(parcel.kept.count(key) for parcel in self.parcels if parcel.src == process.me)
        return process.objects[key] - kept

    def deliverable(self) -> list[Parcel]:
        result = []
        pairs: dict[tuple[int, int], list[Parcel]] = {}
        for parcel in self.parcels:
            before = pairs.setdefault((parcel.src, parcel.dst), [])
            if parcel.kind == "left":
                blocked = bool(before)
            else:
                blocked = not parcel.is_report and any(earlier.is_report for earlier in before)
            if not blocked:
                result.append(parcel)
            before.append(parcel)
        return result

    # What a process does.

    def flush(self, process: Process) -> None:
        for owner, adds, releases in process.counts.used.drain():
            self.parcels.append(Parcel("report", process.me, owner, (adds, releases)))

    def drop_object(self, process: Process, key: RRefKey) -> None:
        process.objects[key] -= 1
        if self.owners[key] != process.me:
            process.counts.used.drop(key)

    @rule(data=st.data())
    def own(self, data: st.DataObject) -> None:
        process = self.pick(data, self.living())
        key = process.new_key()
        self.owners[key] = process.me
        self.made.add(key)
        process.objects[key] += 1

    @rule(data=st.data())
    def remote(self, data: st.DataObject) -> None:
        self.create(self.pick(data, self.living()), self.pick(data, self.living()))

    def create(self, creator: Process, owner: Process) -> None:
        key = creator.new_key()
        self.owners[key] = owner.me
        if creator is owner:
            owner.counts.expect(key, owner.me)
            owner.running.append(key)
            self.made.add(key)
        else:
            self.flush(creator)
            self.parcels.append(Parcel("remote", creator.me, owner.me, key))
            creator.counts.used.receive(key, owner.me)
        creator.objects[key] += 1

    @rule(
        data=st.data(),
        is_request=st.booleans(),
        fails=st.sampled_from([False, False, False, True]),
        hands_over=st.booleans(),
    )
    def send(self, data: st.DataObject, is_request: bool, fails: bool, hands_over: bool) -> None:
        src = self.pick(data, [p for p in self.living() if self.held(p)])
        if src is None:
            return
        others = [process for process in self.living() if process is not src]
        dst = self.pick(data, [*others, *others, src])
        keys = data.draw(st.lists(st.sampled_from(self.held(src)), min_size=1, unique=True))
        tokens = [src.counts.export(key, self.owners[key], dst.me, kept=is_request) for key in keys]
        if fails:
            for token in tokens:
                src.counts.unexport(token, dst.me)
            return
        self.flush(src)
        parcel = Parcel("message", src.me, dst.me, tokens)
        if is_request:  # the caller keeps its references until the reply
            parcel.kept = keys
            for key in keys:
                src.objects[key] += 1
                if self.owners[key] != src.me:
                    src.counts.used.use(key)
        self.parcels.append(parcel)
        if hands_over:
            for key in keys:
                while self.spare(src, key):
                    self.drop_object(src, key)
            self.flush(src)

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        process = self.pick(data, [p for p in self.living() if self.held(p)])
        if process is not None:
            key = self.pick(data, [key for key in self.held(process) if self.spare(process, key)])
            if key is not None:
                self.drop_object(process, key)

    @rule(data=st.data())
    def send_reports(self, data: st.DataObject) -> None:
        self.flush(self.pick(data, self.living()))

    @rule(data=st.data())
    def run_function(self, data: st.DataObject) -> None:
        process = self.pick(data, [p for p in self.living() if p.running])
        if process is not None:
            process.counts.made(process.running.pop(0))

    @rule(data=st.data(), objects=st.integers(0, 2))
    def unpack(self, data: st.DataObject, objects: int) -> None:
        process = self.pick(data, [p for p in self.living() if p.arrived])
        if process is not None:
            self.settle(process, process.arrived.pop(0), objects)

    def settle(self, process: Process, parcel: Parcel, objects: int) -> None:
        for token in parcel.content:
            for _ in range(objects):
                process.objects[token.key] += 1
                if token.owner != process.me:
                    process.counts.used.use(token.key)
            process.counts.settle(token)

    @rule(data=st.data(), count=st.integers(1, 4))
    def deliver_some(self, data: st.DataObject, count: int) -> None:
        for _ in range(count):
            options = self.deliverable()
            if options:
                self.deliver(options[data.draw(st.integers(0, len(options) - 1))])
                self.never_freed_while_needed()

    def deliver(self, parcel: Parcel) -> None:
        self.parcels = [other for other in self.parcels if other is not parcel]
        sender, receiver = self.processes[parcel.src], self.processes[parcel.dst]
        if not receiver.alive:
            return
        if parcel.kind == "report":
            adds, releases = parcel.content
            receiver.counts.owned.apply(parcel.src, adds, releases)
            if adds and sender.alive:
                self.parcels.append(Parcel("ack", parcel.dst, parcel.src))
        elif parcel.kind == "ack":
            receiver.counts.used.acknowledged(parcel.src)
        elif parcel.kind == "remote":
            receiver.counts.expect(parcel.content, parcel.src)
            receiver.running.append(parcel.content)
            self.made.add(parcel.content)
        elif parcel.kind == "left":
            receiver.counts.leave(parcel.src)
        else:
            for token in parcel.content:
                receiver.counts.receive(token, parcel.src)
            receiver.arrived.append(parcel)
            if sender.alive:
                for key in parcel.kept:
                    self.drop_object(sender, key)
                parcel.kept = []

    @precondition(lambda self: len(self.living()) > 2)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        process = self.pick(data, self.living())
        process.alive = False
        process.objects.clear()
        for parcel in self.parcels:
            if parcel.src == process.me:
                parcel.kept = []
        # Requests of its that were addressed to itself, and what nobody will receive, go.
        self.parcels = [parcel for parcel in self.parcels if parcel.dst != process.me]
        for other in self.living():
            self.parcels.append(Parcel("left", process.me, other.me))

    # What must hold.

    def needed(self, key: RRefKey) -> bool:
        """Whether somebody but the owner's own objects still counts on the reference."""
        owner = self.owners[key]
        tokens: list[RefToken] = [
            token
            for parcel in self.parcels
            if parcel.kind == "message" and self.processes[parcel.dst].alive
            for token in parcel.content
        ]
        tokens += [token for p in self.living() for parcel in p.arrived for token in parcel.content]
        return any(p.objects[key] for p in self.living() if p.me != owner) or any(
            token.key == key for token in tokens
        )

    @invariant()
    def never_freed_while_needed(self) -> None:
        for key in self.made:
            owner = self.processes[self.owners[key]]
            if owner.alive and self.needed(key):
                assert key in owner.counts.owned, f"{key} was freed too early"

    def teardown(self) -> None:
        if not self.processes:
            return
        self.settle_down()
        self.never_freed_while_needed()
        for process in self.living():
            for key in list(process.objects):
                while process.objects[key]:
                    self.drop_object(process, key)
        self.settle_down()
        for process in self.living():
            assert len(process.counts.owned) == 0, "an object was not freed"
            assert len(process.counts.used) == 0
            assert process.counts.used.settled

    def settle_down(self) -> None:
        """Lets everything under way arrive, without anything new being started."""
        while True:
            for process in self.living():
                while process.arrived:
                    self.settle(process, process.arrived.pop(0), 0)
                while process.running:
                    process.counts.made(process.running.pop(0))
                self.flush(process)
            options = self.deliverable()
            if not options:
                assert not self.parcels, "something can never be delivered"
                return
            self.deliver(options[-1])
            self.never_freed_while_needed()


Network.TestCase.settings = settings(max_examples=200, stateful_step_count=60, deadline=None)
TestNetwork = Network.TestCase
