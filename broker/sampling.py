"""Takes the samples of which the rates are made, once every heartbeat."""

from __future__ import annotations

from tensorplay.broker.history import Counts, History
from tensorplay.broker.registry import Registry


def sample(registry: Registry, history: History, loop: float, now: float) -> None:
    """Samples what every peer has done so far, and adds up the rates.

    Args:
        registry: The peers.
        history: What remembers the sums.
        loop: The longest turn of the broker's loop since the last time, in seconds.
        now: The time.
    """
    peers = [peer for namespace in registry.namespaces.values() for peer in namespace]
    for peer in peers:
        peer.forget_the_gone()
        came, went, stats = peer.received, peer.sent, peer.stats
        peer.rates.add(
            now,
            Counts(
                came.messages,
                came.bytes,
                went.messages,
                went.bytes,
                stats.get("calls_made", 0.0),
                stats.get("calls_served", 0.0),
            ),
        )
    history.sample(now, ((peer.rates, peer.stats) for peer in peers), loop)
