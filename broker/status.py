"""The broker's state as JSON, for people, programs and the dashboard."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from tensorplay.broker.warnings import warnings
from tensorplay.protocol.messages import PROTOCOL_VERSION

if TYPE_CHECKING:
    from tensorplay.broker.history import Counts
    from tensorplay.broker.registry import Namespace, Peer, Traffic
    from tensorplay.broker.state import BrokerState

#: Pairs of a namespace whose traffic is told: those with the most bytes.
MAX_PAIRS = 256


def snapshot(
    state: BrokerState,
    now: float,
    sees: Callable[[str], bool] = lambda namespace: True,
    *,
    samples: bool = False,
) -> bytes:
    """Returns what the broker knows at ``now`` as JSON.

    Times are in seconds: ``time`` and what happened at a time by the broker's own clock, all
    others as durations.

    Args:
        state: The broker's state.
        now: The time.
        sees: Whether the asker may see a namespace.
        samples: Whether the rates of the last minutes go with it.
    """
    health = state.health
    namespaces = [space for space in state.registry.namespaces.values() if sees(space.name)]
    return msgspec.json.encode(
        {
            "versions": state.versions,
            "protocol": PROTOCOL_VERSION,
            "time": now,
            "wall_time": now + health.wall_offset,
            "uptime": now - state.started,
            "incarnation": state.incarnation,
            "addresses": state.addresses,
            "config": state.config.public(),
            "counters": state.counters,
            "health": {
                "loop_latency": health.loop_latency,
                "busy": health.busy,
                "memory_bytes": health.memory,
            },
            "warnings": warnings(state, namespaces, now),
            "happenings": [event for event in state.history.happenings if sees(event.namespace)],
            "samples": list(state.history.samples) if samples else [],
            "namespaces": {
                namespace.name: {
                    "world_size": namespace.world_size,
                    "peers": [_peer(state, peer, now) for peer in namespace],
                    "traffic": _pairs(namespace),
                }
                for namespace in namespaces
            },
        }
    )


def _peer(state: BrokerState, peer: Peer, now: float) -> dict[str, Any]:
    info = peer.info
    return {
        "name": info.name,
        "id": info.id,
        "role": info.role.name.lower(),
        "incarnation": info.incarnation,
        "host": info.host,
        "pid": info.pid,
        "device": info.device,
        "versions": info.versions,
        "world_size": peer.world_size,
        "registered_for": now - peer.since,
        "silent_for": now - peer.last_heard,
        "away": peer.away,
        "queued_bytes": 0 if peer.identity is None else state.queued_bytes(peer.identity),
        "received": _traffic(peer.received),
        "sent": _traffic(peer.sent),
        "rates": _rates(peer.rates.now()),
        "stats": peer.stats,
    }


def _rates(counts: Counts) -> dict[str, float]:
    return {
        "calls_made": counts.calls_made,
        "calls_served": counts.calls_served,
        "messages_received": counts.messages_in,
        "messages_sent": counts.messages_out,
        "bytes_received": counts.bytes_in,
        "bytes_sent": counts.bytes_out,
    }


def _traffic(traffic: Traffic) -> dict[str, int]:
    return {"messages": traffic.messages, "bytes": traffic.bytes}


def _pairs(namespace: Namespace) -> list[dict[str, Any]]:
    """Returns who has sent how much to whom, the most first."""
    names = namespace.by_incarnation
    pairs = (
        (traffic.bytes, traffic.messages, peer.info.name, names[receiver].info.name)
        for peer in namespace
        for receiver, traffic in peer.sent_to.items()
        if receiver in names
    )
    return [
        {"from": sender, "to": receiver, "messages": messages, "bytes": size}
        for size, messages, sender, receiver in heapq.nlargest(MAX_PAIRS, pairs)
    ]
