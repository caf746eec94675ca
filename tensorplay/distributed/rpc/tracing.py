"""Where the time of calls goes: spans of their lives, from all processes on one time line.

Within ``profile`` every call that this process makes is traced: its request says so, the
callee takes the times of its part, and of the calls that it makes meanwhile, and returns
them with the reply.  Times are those of the broker's clock, to which each process knows
its own clock's offset from the heartbeats.

A request also carries the OpenTelemetry context of its caller where that API is installed.

When nothing is traced, a call costs one look at ``active``.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import msgspec

from tensorplay.protocol.calls import Span

if TYPE_CHECKING:
    from tensorplay.distributed.rpc.calls import PendingCall

#: Heartbeats of the broker from which the offset of its clock is taken.
_HEARTBEATS = 64
#: Spans that a reply carries at most; those of further nested calls are left out.
_MOST_SPANS = 4096

#: Whether calls have to look whether they are traced.
active = False


class Clock:
    """The broker's clock, as far as its heartbeats tell.

    A heartbeat says when it was sent, and arrives later: the shortest way of the last ones
    bounds the error.
    """

    def __init__(self) -> None:
        self._seen: deque[float] = deque(maxlen=_HEARTBEATS)
        self.offset = 0.0

    def heard(self, sent: float, now: float) -> None:
        """Takes a heartbeat: when it was sent, by the broker's clock, and when it came."""
        self._seen.append(sent - now)
        self.offset = max(self._seen)

    def restart(self) -> None:
        """Forgets what was heard: the broker is another one."""
        self._seen.clear()


clock = Clock()


class Recorder:
    """Collects spans.

    Args:
        process: Name of this process.
    """

    def __init__(self, process: str) -> None:
        self.process = process
        self.spans: list[Span] = []

    def add(self, stage: str, name: str, id: int, start: float, end: float) -> None:
        """Records a span of this thread; times are of this process's monotonic clock."""
        thread = threading.current_thread().name
        self.spans.append(self.span(stage, name, id, start, end, thread))

    def span(self, stage: str, name: str, id: int, start: float, end: float, thread: str) -> Span:
        """Returns a span; times are of this process's monotonic clock."""
        offset = clock.offset
        return Span(stage, name, id, start + offset, end + offset, self.process, thread)


class Trace:
    """The caller's part of a traced call: when its stages ended.

    Args:
        recorder: Where the spans go.
        name: What is called, and where.
        id: The request's number.
        began: When the call was made.
    """

    def __init__(self, recorder: Recorder, name: str, id: int, began: float) -> None:
        self._recorder = recorder
        self._name = name
        self._id = id
        self._began = began
        self._packed = self._sent = self._arrived = time.monotonic()

    def sent(self) -> None:
        """Notes that the link has taken the request."""
        self._sent = time.monotonic()

    def arrived(self) -> None:
        """Notes that the reply has come."""
        self._arrived = time.monotonic()

    def done(self, spans: Sequence[Span]) -> None:
        """Takes the callee's spans, the first of which is its whole part."""
        recorder, name, id, now = self._recorder, self._name, self._id, time.monotonic()
        recorder.add("call", name, id, self._began, now)
        recorder.add("serialise", name, id, self._began, self._packed)
        recorder.add("caller queue", name, id, self._packed, self._sent)
        if spans:
            sent, arrived = self._sent + clock.offset, self._arrived + clock.offset
            whole = spans[0]
            recorder.spans += [
                Span("broker", name, id, sent, max(sent, whole.start), "broker", "requests"),
                Span("reply", name, id, min(whole.end, arrived), arrived, "broker", "replies"),
            ]
            recorder.spans += [
                span if span.name else msgspec.structs.replace(span, name=name) for span in spans
            ]
        recorder.add("read reply", name, id, self._arrived, now)


class Service:
    """The callee's part of a traced call.

    Args:
        process: Name of this process.
        id: The request's number.
        arrived: When the request came.
    """

    def __init__(self, process: str, id: int, arrived: float) -> None:
        self.recorder = Recorder(process)
        self._id = id
        self._arrived = self._began = arrived
        self._ran: float | None = None

    def began(self) -> None:
        """Notes that a thread has taken the request."""
        self._began = time.monotonic()

    def ran(self) -> None:
        """Notes that the function has returned or raised."""
        self._ran = time.monotonic()

    def spans(self) -> list[Span]:
        """Returns the spans, with those of the calls made meanwhile; the caller names them."""
        now = time.monotonic()
        ran = now if self._ran is None else self._ran
        stages = (
            ("serve", self._arrived, now),
            ("callee queue", self._arrived, self._began),
            ("execute", self._began, ran),
            ("serialise result", ran, now),
        )
        recorder, id = self.recorder, self._id
        thread = threading.current_thread().name
        own = [recorder.span(stage, "", id, start, end, thread) for stage, start, end in stages]
        return own + recorder.spans[: _MOST_SPANS - len(own)]


_local = threading.local()
_recorder: Recorder | None = None
_served = 0
_counting = threading.Lock()
_telemetry: Any = None  # opentelemetry.propagate
_contexts: Any = None  # opentelemetry.context


def begin(call: PendingCall) -> Trace | None:
    """Returns the trace of a call that this thread makes, or None if it is not traced."""
    recorder: Recorder | None = getattr(_local, "recorder", None) or _recorder
    if recorder is None:
        return None
    return Trace(recorder, f"{call.what} on {call.peer.name}", call.id, call.began)


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Has all calls of this process traced within it.

    Raises:
        RuntimeError: If they are already.
    """
    global _recorder
    if _recorder is not None:
        raise RuntimeError("calls are being recorded already: profiles cannot be nested")
    _recorder = recorder
    _update(0)
    try:
        yield
    finally:
        _recorder = None
        _update(0)


@contextmanager
def serving(service: Service) -> Iterator[None]:
    """Has the calls that this thread makes traced within it, for the caller whom it serves."""
    _local.recorder = service.recorder
    _update(1)
    try:
        yield
    finally:
        _local.recorder = None
        _update(-1)


def _update(served: int) -> None:
    global _served, active
    with _counting:
        _served += served
        active = _recorder is not None or _served > 0 or _telemetry is not None


def find_telemetry() -> None:
    """Looks whether the OpenTelemetry API is installed; an agent does when it starts."""
    global _telemetry, _contexts
    if _telemetry is None:
        with suppress(ImportError):
            _contexts = importlib.import_module("opentelemetry.context")
            _telemetry = importlib.import_module("opentelemetry.propagate")
            _update(0)


def context() -> dict[str, str]:
    """Returns this thread's OpenTelemetry context as headers; empty without that API."""
    carrier: dict[str, str] = {}
    if _telemetry is not None and _contexts.get_current():  # most threads have none
        _telemetry.inject(carrier)
    return carrier


@contextmanager
def in_context(carrier: dict[str, str]) -> Iterator[None]:
    """Has the OpenTelemetry context of a caller hold within it, where that API is installed."""
    if _telemetry is None or not carrier:
        yield
        return
    token = _contexts.attach(_telemetry.extract(carrier))
    try:
        yield
    finally:
        _contexts.detach(token)
