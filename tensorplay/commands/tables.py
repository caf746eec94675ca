"""The broker's status as text: tables of peers, and what is to be said of the broker."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tensorplay.commands import figures

#: Happenings that are worth a line of the status.
_BAD = frozenset({"lost", "error", "refused", "malformed", "full"})
#: Such lines.
_LINES = 8


def processes(status: dict[str, Any]) -> RenderableType:
    """Returns one line for each peer: what and where it is, and since when."""
    table = _table("NAME", "RANK", "ROLE", "HOST", "PID", "DEVICE", "UP", "STATE")
    several = len(status["namespaces"]) > 1
    for namespace, peer in _peers(status):
        table.add_row(
            f"{namespace}/{peer['name']}" if several else peer["name"],
            _rank(peer),
            peer["role"],
            peer["host"],
            str(peer["pid"]),
            peer["device"],
            figures.seconds(peer["registered_for"]),
            _state(peer, status),
        )
    return table if table.row_count else Text("no peers")


def overview(status: dict[str, Any], now: datetime) -> RenderableType:
    """Returns all that the status tells, for a terminal or a pipe."""
    parts: list[RenderableType] = [_broker(status)]
    parts += [Text(f"! {warning}", style="yellow") for warning in status["warnings"]]
    for namespace, told in sorted(status["namespaces"].items()):
        parts += [Text(), _namespace(namespace, told, status)]
    if not status["namespaces"]:
        parts += [Text(), Text("no peers")]
    events = [event for event in status["happenings"] if event["kind"] in _BAD][-_LINES:]
    if events:
        parts += [Text(), Text("Recent errors and lost peers", style="bold")]
        parts += [_event(event, status, now) for event in events]
    return Group(*parts)


def _broker(status: dict[str, Any]) -> Text:
    health, counters = status["health"], status["counters"]
    peers = sum(len(told["peers"]) for told in status["namespaces"].values())
    text = Text("broker ", style="bold")
    text.append(", ".join(status["addresses"]))
    text.append(
        f"\n{status['versions']['tensorplay']}, up {figures.seconds(status['uptime'])}, "
        f"{peers} {'peer' if peers == 1 else 'peers'}, "
        f"loop {figures.seconds(health['loop_latency'])}, busy {health['busy']:.1%}, "
        f"memory {figures.size(health['memory_bytes'])}",
        style="not bold",
    )
    if counters:
        told = ", ".join(f"{name} {number}" for name, number in sorted(counters.items()))
        text.append(f"\nsince the start: {told}", style="not bold dim")
    return text


def _namespace(name: str, told: dict[str, Any], status: dict[str, Any]) -> Table:
    table = _table(
        "NAME",
        "RANK",
        "HOST:PID",
        "DEVICE",
        "UP",
        "HEARD",
        "MODULES",
        "RREFS",
        "IN FLIGHT",
        "QUEUED",
        "CALLS/s",
        "BYTES/s",
        "p50",
        "p99",
        title=f"namespace {name}",
    )
    for peer in sorted(told["peers"], key=_order):
        stats, rates = peer["stats"], peer["rates"]
        state = _state(peer, status)
        table.add_row(
            Text(peer["name"], style=state.style),
            _rank(peer),
            f"{peer['host']}:{peer['pid']}",
            peer["device"],
            figures.seconds(peer["registered_for"]),
            state if peer["away"] else figures.seconds(peer["silent_for"]),
            figures.count(stats.get("modules", 0)),
            f"{stats.get('rrefs_owned', 0):.0f}+{stats.get('rrefs_used', 0):.0f}",
            figures.count(stats.get("calls_in_flight", 0) + stats.get("requests_in_progress", 0)),
            figures.size(peer["queued_bytes"]),
            figures.rate(rates["calls_made"] + rates["calls_served"]),
            figures.size(rates["bytes_received"] + rates["bytes_sent"]),
            _latency(stats, "p50"),
            _latency(stats, "p99"),
        )
    return table


def _latency(stats: dict[str, float], which: str) -> str:
    """Returns how long calls took: those that the peer made, else those that it served."""
    value = stats.get(f"call_{which}") or stats.get(f"served_{which}")
    return figures.seconds(value) if value else "-"


def _event(event: dict[str, Any], status: dict[str, Any], now: datetime) -> Text:
    ago = status["time"] - event["time"]
    when = datetime.fromtimestamp(now.timestamp() - ago).strftime("%H:%M:%S")
    text = Text(f"{when} ", style="dim")
    text.append(event["kind"], style="red" if event["kind"] in ("lost", "error") else "yellow")
    text.append(f" {event['namespace']}/{event['peer']}: {event['text']}")
    if event["count"] > 1:
        text.append(f" ({event['count']} times)", style="dim")
    return text


def _table(*columns: str, title: str | None = None) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False, show_edge=False
    )
    for column in columns:
        text = column in ("NAME", "ROLE", "HOST", "HOST:PID", "DEVICE", "STATE")
        # A name must never be cut: it is what other commands are given.
        table.add_column(column, justify="left" if text else "right", no_wrap=True, overflow="fold")
    return table


def _peers(status: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for namespace, told in sorted(status["namespaces"].items()):
        for peer in sorted(told["peers"], key=_order):
            yield namespace, peer


def _order(peer: dict[str, Any]) -> tuple[bool, int, str]:
    return peer["id"] < 0, abs(peer["id"]), peer["name"]


def _rank(peer: dict[str, Any]) -> str:
    return str(peer["id"]) if peer["id"] >= 0 else "-"


def _state(peer: dict[str, Any], status: dict[str, Any]) -> Text:
    if peer["away"]:
        return Text("away", style="red")
    if peer["silent_for"] > status["config"]["heartbeat_timeout"]:
        return Text("silent", style="yellow")
    return Text("well", style="green")
