"""The broker's status as metrics for Prometheus, in its text format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

Status: TypeAlias = dict[str, Any]

#: Of what ``render`` returns.
CONTENT_TYPE = CONTENT_TYPE_LATEST

_LABELS = ("namespace", "peer")
#: Gauges of a peer: name, help, and where its heartbeat has the value.
_GAUGES = (
    ("calls_in_flight", "Calls that the peer has made and that are not answered."),
    ("requests_in_progress", "Calls of others that the peer has and has not answered."),
    ("requests_queued", "Calls of others that wait for a thread of the peer."),
    ("threads", "Threads that run calls."),
    ("rrefs_owned", "Objects that the peer holds for others."),
    ("rrefs_used", "Objects of others that the peer refers to."),
    ("modules", "Modules that the peer holds for others."),
    ("memory_bytes", "Resident memory of the peer's process."),
    ("cuda_memory_bytes", "CUDA memory that tensors of the peer take."),
)
#: Counters of a peer, likewise, without their ending "_total".
_COUNTERS = (
    ("calls_made", "calls_made", "Calls that the peer made and that were answered."),
    ("calls_served", "calls_served", "Calls of others that the peer answered."),
    ("calls_failed", "calls_failed", "Calls of others that raised."),
    ("cpu_seconds", "cpu_seconds", "Processor time of the peer's process."),
)
#: Histograms of a peer: name, prefix of the values in its heartbeat, help.
_HISTOGRAMS = (
    ("call_duration_seconds", "made", "Time from sending a call to the arrival of its reply."),
    ("served_duration_seconds", "served", "Time from the arrival of a call to its reply."),
)


def render(status: Status) -> bytes:
    """Returns a status, as ``broker.status`` makes it, in Prometheus's text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(status))
    return generate_latest(registry)


class _Collector(Collector):
    def __init__(self, status: Status) -> None:
        self._status = status

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        yield from _of_broker(self._status)
        yield from _of_peers(self._status)


def _of_broker(status: Status) -> Iterator[Metric]:
    health = status["health"]
    yield InfoMetricFamily("tensorplay_broker", "Versions of the broker.", value=status["versions"])
    for name, text, value in (
        ("uptime_seconds", "Time since the broker started.", status["uptime"]),
        (
            "loop_latency_seconds",
            "Longest turn of the routing loop in the last interval.",
            health["loop_latency"],
        ),
        ("busy_ratio", "Share of the time that the routing loop computes.", health["busy"]),
        ("memory_bytes", "Resident memory of the broker's process.", health["memory_bytes"]),
        ("warnings", "Things that somebody should look at.", len(status["warnings"])),
    ):
        yield GaugeMetricFamily(f"tensorplay_broker_{name}", text, value=value)
    peers = GaugeMetricFamily(
        "tensorplay_broker_peers", "Registered peers.", labels=("namespace", "role")
    )
    for namespace, told in status["namespaces"].items():
        for role in ("worker", "client"):
            number = sum(peer["role"] == role for peer in told["peers"])
            peers.add_metric((namespace, role), number)
    yield peers
    events = CounterMetricFamily(
        "tensorplay_broker_events", "What has happened since the start.", labels=("event",)
    )
    for name, number in sorted(status["counters"].items()):
        events.add_metric((name,), number)
    yield events


def _of_peers(status: Status) -> Iterator[Metric]:
    peers = [
        ((namespace, peer["name"]), peer)
        for namespace, told in sorted(status["namespaces"].items())
        for peer in told["peers"]
    ]
    yield _gauge("up", "1 if the peer is connected, 0 if it is away.", peers, _up)
    for key, name, text in (
        ("registered_for", "registered_seconds", "Time since the peer registered."),
        ("silent_for", "silent_seconds", "Time since its last message."),
        ("queued_bytes", "queued_bytes", "Bytes that wait in the broker for the peer."),
    ):
        yield _gauge(name, text, peers, lambda peer, key=key: peer[key])
    for direction, verb in (("received", "sent by"), ("sent", "passed on to")):
        for unit in ("messages", "bytes"):
            family = CounterMetricFamily(
                f"tensorplay_peer_{direction}_{unit}",
                f"Routed {unit} {verb} the peer, through the broker.",
                labels=_LABELS,
            )
            for labels, peer in peers:
                family.add_metric(labels, peer[direction][unit])
            yield family
    for name, text in _GAUGES:
        yield _gauge(name, text, peers, lambda peer, name=name: peer["stats"].get(name))
    for name, key, text in _COUNTERS:
        family = CounterMetricFamily(f"tensorplay_peer_{name}", text, labels=_LABELS)
        for labels, peer in peers:
            if key in peer["stats"]:
                family.add_metric(labels, peer["stats"][key])
        yield family
    for name, prefix, text in _HISTOGRAMS:
        yield _histogram(name, prefix, text, peers)


def _up(peer: dict[str, Any]) -> float:
    return float(not peer["away"])


def _gauge(name: str, text: str, peers: list[Any], value: Any) -> Metric:
    family = GaugeMetricFamily(f"tensorplay_peer_{name}", text, labels=_LABELS)
    for labels, peer in peers:
        number = value(peer)
        if number is not None:
            family.add_metric(labels, number)
    return family


def _histogram(name: str, prefix: str, text: str, peers: list[Any]) -> Metric:
    family = HistogramMetricFamily(f"tensorplay_peer_{name}", text, labels=_LABELS)
    start = f"{prefix}_le_"
    for labels, peer in peers:
        stats = peer["stats"]
        bounds = sorted(float(key.removeprefix(start)) for key in stats if key.startswith(start))
        if not bounds:
            continue
        buckets = [(f"{bound:g}", stats[f"{start}{bound:g}"]) for bound in bounds]
        buckets.append(("+Inf", stats[f"calls_{prefix}"]))
        family.add_metric(labels, buckets, sum_value=stats[f"{prefix}_seconds"])
    return family
