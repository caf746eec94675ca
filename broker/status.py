"""The broker's state as JSON, for people and dashboards."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from tensorplay.protocol.messages import PROTOCOL_VERSION

if TYPE_CHECKING:
    from tensorplay.broker.registry import Peer, Traffic
    from tensorplay.broker.state import BrokerState


def snapshot(
    state: BrokerState, now: float, sees: Callable[[str], bool] = lambda namespace: True
) -> bytes:
    """Returns what the broker knows at ``now`` as JSON; times are in seconds.

    Args:
        state: The broker's state.
        now: The time.
        sees: Whether the asker may see a namespace.
    """
    namespaces = {
        namespace.name: {
            "world_size": namespace.world_size,
            "peers": [_peer(state, peer, now) for peer in namespace],
        }
        for namespace in state.registry.namespaces.values()
        if sees(namespace.name)
    }
    return msgspec.json.encode(
        {
            "versions": state.versions,
            "protocol": PROTOCOL_VERSION,
            "uptime": now - state.started,
            "addresses": state.addresses,
            "config": state.config,
            "counters": state.counters,
            "namespaces": namespaces,
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
        "stats": peer.stats,
    }


def _traffic(traffic: Traffic) -> dict[str, int]:
    return {"messages": traffic.messages, "bytes": traffic.bytes}
