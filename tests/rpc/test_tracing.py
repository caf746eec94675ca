"""Traces of calls, from all processes on one time line."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import tensorplay
from tensorplay.cluster import LocalCluster
from tensorplay.distributed import rpc
from tensorplay.distributed.rpc import tracing
from tensorplay.errors import NotInitializedError
from tensorplay.protocol.calls import Span
from tests.rpc import helpers

#: The stages of a call in the order in which they follow each other.
STAGES = [
    "serialise",
    "caller queue",
    "broker",
    "callee queue",
    "execute",
    "serialise result",
    "reply",
    "read reply",
]


def test_a_profile_needs_an_agent() -> None:  # before the cluster starts
    with pytest.raises(NotInitializedError), tensorplay.profile():
        pass


def of_call(spans: list[Span], id: int, process: str) -> dict[str, Span]:
    """Returns the spans of a call by stage; ``process`` is its caller or its callee."""
    return {span.stage: span for span in spans if span.id == id and process in span.name}


def test_a_call_is_seen_in_all_its_stages_one_after_the_other(cluster: LocalCluster) -> None:
    with tensorplay.profile() as profile:
        rpc.rpc_sync("worker0", helpers.spin, (0.05,))
    (call,) = [span for span in profile.spans if span.stage == "call"]
    assert call.name == "spin on worker0"
    assert call.process == "client"
    stages = of_call(profile.spans, call.id, "worker0")
    assert set(stages) == {*STAGES, "call", "serve"}
    assert stages["execute"].process == "worker0"
    assert stages["execute"].end - stages["execute"].start >= 0.05
    # On one host the clocks are the same; what is left is the way of a heartbeat.
    times = [time for stage in STAGES for time in (stages[stage].start, stages[stage].end)]
    assert all(later - earlier > -0.02 for earlier, later in pairwise(times))
    assert profile.seconds()["execute"] >= 0.05


def test_calls_that_the_callee_makes_are_seen_too(cluster: LocalCluster) -> None:
    with tensorplay.profile() as profile:
        rpc.rpc_sync("worker0", helpers.nest, (["worker1", "worker2"], 3))
    served = sorted(span.process for span in profile.spans if span.stage == "serve")
    assert served == ["worker0", "worker1", "worker2", "worker2"]


def test_every_call_within_is_seen_and_none_outside(cluster: LocalCluster) -> None:
    rpc.rpc_sync("worker0", helpers.who)
    with tensorplay.profile() as profile:
        futures = [rpc.rpc_async("worker0", helpers.who) for _ in range(50)]
        for future in futures:
            future.wait()
        with pytest.raises(ValueError, match="boom"):
            rpc.rpc_sync("worker1", helpers.fail, ("boom",))
        rpc.remote("worker2", torch.ones, (3,)).to_here()
    rpc.rpc_sync("worker0", helpers.who)
    names = [span.name for span in profile.spans if span.stage == "call"]
    assert names.count("who on worker0") == 50
    assert "fail on worker1" in names
    assert "to_here() on worker2" in names


def test_the_file_is_a_trace_in_chromes_format(cluster: LocalCluster, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with tensorplay.profile(path):
        rpc.rpc_sync("worker0", helpers.who)
    events = json.loads(path.read_text())["traceEvents"]
    processes = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert processes == {"client", "broker", "worker0"}
    execute = next(event for event in events if event["name"] == "execute")
    assert execute["ph"] == "X"
    assert execute["dur"] >= 0
    begun = [event["id"] for event in events if event["ph"] == "b"]
    ended = [event["id"] for event in events if event["ph"] == "e"]
    assert sorted(begun) == sorted(ended)


def test_nothing_is_looked_at_when_nothing_is_traced(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "_telemetry", None)
    seen = []
    with tensorplay.profile():
        seen.append(tracing.active)
    seen.append(tracing.active)
    assert seen == [True, False]
    monkeypatch.setattr(tracing, "begin", None)  # would raise
    assert rpc.rpc_sync("worker0", helpers.who) == "worker0"


def test_profiles_are_not_nested(cluster: LocalCluster) -> None:
    with (
        tensorplay.profile(),
        pytest.raises(RuntimeError, match="cannot be nested"),
        tensorplay.profile(),
    ):
        pass


def test_torchs_profiler_shows_calls_as_ranges(cluster: LocalCluster) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        rpc.rpc_sync("worker0", helpers.spin, (0.02,))
    (event,) = [event for event in profile.events() if event.name.startswith("tensorplay: ")]
    assert event.name == "tensorplay: spin on worker0"
    assert event.time_range.elapsed_us() >= 20_000


def test_the_clock_is_that_of_the_quickest_heartbeat() -> None:
    clock = tracing.Clock()
    for sent, came in ((100.0, 1.5), (101.0, 2.1), (102.0, 3.9)):
        clock.heard(sent, came)
    assert clock.offset == pytest.approx(98.9)
    clock.restart()
    clock.heard(7.0, 6.0)
    assert clock.offset == 1.0


class Telemetry(ModuleType):
    """As much of OpenTelemetry's API as is used."""

    def __init__(self) -> None:
        super().__init__("opentelemetry")
        self.current: dict[str, str] = {"traceparent": "00-1"}

    def inject(self, carrier: dict[str, str]) -> None:
        carrier.update(self.current)

    def extract(self, carrier: dict[str, str]) -> dict[str, str]:
        return dict(carrier)

    def get_current(self) -> dict[str, str]:
        return self.current

    def attach(self, context: dict[str, str]) -> dict[str, str]:
        before, self.current = self.current, context
        return before

    def detach(self, token: dict[str, str]) -> None:
        self.current = token


@pytest.fixture
def telemetry(monkeypatch: pytest.MonkeyPatch) -> Telemetry:
    fake = Telemetry()
    monkeypatch.setattr(tracing, "_telemetry", fake)
    monkeypatch.setattr(tracing, "_contexts", fake)
    monkeypatch.setattr(tracing, "active", True)
    return fake


def test_a_context_of_opentelemetry_is_passed_on(telemetry: Telemetry) -> None:
    carrier: Any = tracing.context()
    assert carrier == {"traceparent": "00-1"}
    telemetry.current = {"traceparent": "mine"}
    with tracing.in_context(carrier):
        assert tracing.context() == carrier
    assert telemetry.current == {"traceparent": "mine"}
    telemetry.current = {}
    assert tracing.context() == {}


def test_the_real_api_carries_a_span_from_one_process_to_the_other() -> None:
    trace = pytest.importorskip("opentelemetry.trace")
    tracing.find_telemetry()
    span = trace.NonRecordingSpan(
        trace.SpanContext(0x1234, 0x56, is_remote=False, trace_flags=trace.TraceFlags(1))
    )
    with trace.use_span(span):
        carrier = tracing.context()
    assert tracing.context() == {}
    with tracing.in_context(carrier):
        assert trace.get_current_span().get_span_context().trace_id == 0x1234


def test_requests_carry_it_and_those_who_know_no_telemetry_ignore_it(
    cluster: LocalCluster, telemetry: Telemetry
) -> None:
    assert rpc.rpc_sync("worker0", helpers.who) == "worker0"
