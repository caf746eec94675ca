"""Traces of calls: where their time goes, over all processes that take part.

The file is in Chrome's trace format, which https://ui.perfetto.dev and ``chrome://tracing``
show.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tensorplay.distributed import rpc
from tensorplay.distributed.rpc import tracing
from tensorplay.protocol.calls import Span

__all__ = ["Profile", "Span", "profile"]

#: Stages in which a thread is at work; in the others a call waits.
_OF_THREADS = frozenset({"serialise", "execute", "serialise result", "read reply"})


class Profile:
    """What was recorded.

    Attributes:
        spans: The parts of the calls' lives, in no order.  The stages of a call are
            ``"serialise"``, ``"caller queue"``, ``"broker"``, ``"callee queue"``, ``"execute"``,
            ``"serialise result"``, ``"reply"`` and ``"read reply"``; ``"call"`` is the whole as
            its caller sees it and ``"serve"`` as its callee does.  ``start`` and ``end`` are in
            seconds of the broker's clock.
    """

    def __init__(self, spans: list[Span]) -> None:
        self.spans = spans

    def seconds(self) -> dict[str, float]:
        """Returns the seconds that all calls together spent in each stage."""
        sums: dict[str, float] = {}
        for span in self.spans:
            sums[span.stage] = sums.get(span.stage, 0.0) + span.end - span.start
        return sums

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the spans as a trace in Chrome's format."""
        Path(path).write_text(json.dumps({"traceEvents": _events(self.spans)}))


@contextmanager
def profile(path: str | os.PathLike[str] | None = None) -> Iterator[Profile]:
    """Records the life of each call that this process makes within it, in all processes.

    Calls that callees make to serve them are recorded, too.  A call whose reply has not come
    by the end is left out.

    Args:
        path: Where a trace in Chrome's format is written at the end; none if not given.

    Raises:
        NotInitializedError: If ``init_rpc`` has not been called in this process.
        RuntimeError: If calls are being recorded already.

    Example:
        >>> with tensorplay.profile("trace.json") as profile:  # doctest: +SKIP
        ...     model(inputs).sum().backward()
        >>> profile.seconds()["execute"]  # doctest: +SKIP
    """
    recorder = tracing.Recorder(rpc.get_worker_info().name)
    with tracing.recording(recorder):
        yield (recorded := Profile(recorder.spans))
    if path is not None:
        recorded.save(path)


def _events(spans: list[Span]) -> list[dict[str, Any]]:
    processes: dict[str, int] = {}
    threads: dict[tuple[str, str], int] = {}
    events: list[dict[str, Any]] = []
    start = min((span.start for span in spans), default=0.0)
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        pid = processes.setdefault(span.process, len(processes) + 1)
        tid = threads.setdefault((span.process, span.thread), len(threads) + 1)
        event = {
            "name": span.name if span.stage in ("call", "serve") else span.stage,
            "cat": span.stage,
            "ts": (span.start - start) * 1e6,
            "pid": pid,
            "tid": tid,
            "args": {"call": span.name, "id": span.id},
        }
        if span.stage in _OF_THREADS:
            events.append({"ph": "X", "dur": (span.end - span.start) * 1e6, **event})
        else:  # calls overlap, so that their parts are no stack
            number = f"{span.name} {span.id}"
            events.append({"ph": "b", "id": number, **event})
            end = (span.end - start) * 1e6
            events.append({"ph": "e", "id": number, **event, "ts": end})
    names = [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": process}}
        for process, pid in processes.items()
    ] + [
        {
            "ph": "M",
            "name": "thread_name",
            "pid": processes[process],
            "tid": tid,
            "args": {"name": thread},
        }
        for (process, thread), tid in threads.items()
    ]
    return names + events
