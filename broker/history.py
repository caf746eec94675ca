"""What has happened lately, and how the rates went: the memory behind status and dashboard."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec

#: Happenings that are remembered.
MAX_HAPPENINGS = 200
#: Samples of the rates that are kept: five minutes at one a second.
MAX_SAMPLES = 300
#: Samples over which a peer's rates are taken.
_WINDOW = 5
#: The latest happenings among which a repetition is looked for.
_RECENT = 16


class Happening(msgspec.Struct):
    """Something worth telling.

    Attributes:
        time: When it happened last, by the broker's clock.
        kind: ``"joined"``, ``"left"``, ``"lost"``, ``"refused"``, ``"error"``, ``"malformed"``
            or ``"full"``.
        namespace: Where.
        peer: Name of the peer.
        text: One sentence.
        count: How often it has happened.
    """

    time: float
    kind: str
    namespace: str
    peer: str
    text: str
    count: int = 1


class Sample(msgspec.Struct, frozen=True, gc=False):
    """The rates of all peers together at a time.

    Attributes:
        time: By the broker's clock, in seconds.
        peers: How many were registered.
        messages: Routed messages a second.
        bytes: Routed bytes a second.
        calls: Answered calls a second.
        p50: Median duration of a call in seconds, weighted by how many each peer made.
        p99: The largest 99th percentile of a peer, in seconds.
        loop: The longest turn of the broker's loop, in seconds.
    """

    time: float
    peers: int
    messages: float
    bytes: float
    calls: float
    p50: float
    p99: float
    loop: float


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts of a peer that only grow; the rates are their differences."""

    messages_in: float = 0
    bytes_in: float = 0
    messages_out: float = 0
    bytes_out: float = 0
    calls_made: float = 0
    calls_served: float = 0

    def since(self, before: Counts, seconds: float) -> Counts:
        """Returns the growth a second since other counts."""
        if seconds <= 0:
            return Counts()
        return Counts(
            max(0.0, self.messages_in - before.messages_in) / seconds,
            max(0.0, self.bytes_in - before.bytes_in) / seconds,
            max(0.0, self.messages_out - before.messages_out) / seconds,
            max(0.0, self.bytes_out - before.bytes_out) / seconds,
            max(0.0, self.calls_made - before.calls_made) / seconds,
            max(0.0, self.calls_served - before.calls_served) / seconds,
        )


class Rates:
    """What a peer does a second, over the last few samples of its counts."""

    __slots__ = ("_samples",)

    def __init__(self) -> None:
        self._samples: deque[tuple[float, Counts]] = deque(maxlen=_WINDOW + 1)

    def add(self, now: float, counts: Counts) -> None:
        """Takes a sample."""
        self._samples.append((now, counts))

    def now(self) -> Counts:
        """Returns the rates over the window."""
        return self._between(0)

    def last(self) -> Counts:
        """Returns the rates between the last two samples."""
        return self._between(-2)

    def _between(self, first: int) -> Counts:
        if len(self._samples) < 2:
            return Counts()
        (began, before), (ended, after) = self._samples[first], self._samples[-1]
        return after.since(before, ended - began)


class History:
    """The latest happenings and samples."""

    def __init__(self) -> None:
        self.happenings: deque[Happening] = deque(maxlen=MAX_HAPPENINGS)
        self.samples: deque[Sample] = deque(maxlen=MAX_SAMPLES)

    def note(self, now: float, kind: str, namespace: str, peer: str, text: str) -> None:
        """Remembers what has happened; what happens again and again counts as one."""
        for happening in self._recent():
            if (happening.kind, happening.namespace, happening.peer, happening.text) == (
                kind,
                namespace,
                peer,
                text,
            ):
                happening.time = now
                happening.count += 1
                return
        self.happenings.append(Happening(now, kind, namespace, peer, text))

    def sample(
        self, now: float, peers: Iterable[tuple[Rates, dict[str, float]]], loop: float
    ) -> None:
        """Adds up the rates of the peers, given with what each told in its heartbeat."""
        messages = size = calls = weighted = p99 = 0.0
        number = 0
        for rates, stats in peers:
            last = rates.last()
            number += 1
            messages += last.messages_in
            size += last.bytes_in
            calls += last.calls_made
            weighted += last.calls_made * stats.get("call_p50", 0.0)
            if last.calls_made:
                p99 = max(p99, stats.get("call_p99", 0.0))
        p50 = weighted / calls if calls else 0.0
        self.samples.append(Sample(now, number, messages, size, calls, p50, p99, loop))

    def _recent(self) -> Iterator[Happening]:
        for index in range(1, min(_RECENT, len(self.happenings)) + 1):
            yield self.happenings[-index]
