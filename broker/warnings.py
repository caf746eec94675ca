"""What somebody should look at, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tensorplay.broker.registry import Namespace, Peer
    from tensorplay.broker.state import BrokerState

#: Share of a limit from which on it is warned of.
_NEAR = 0.8
#: Seconds of a turn of the loop from which on the broker counts as overloaded.
_SLOW_LOOP = 0.1
#: Seconds for which something that has happened is warned of.
_LATELY = 60.0
#: Heartbeats that a peer may leave out before it is worth a look.
_BEATS = 3
#: Peers of each kind that are named.
_NAMED = 5


def warnings(state: BrokerState, namespaces: Sequence[Namespace], now: float) -> list[str]:
    """Returns a sentence for each thing that is not as it should be at ``now``.

    Args:
        state: The broker's state.
        namespaces: Those whose peers are looked at.
        now: The time.
    """
    peers = [peer for namespace in namespaces for peer in namespace]
    return [
        *_of_broker(state),
        *_of_namespaces(state, namespaces, now),
        *_of_peers(state, peers, now),
    ]


def _of_broker(state: BrokerState) -> Iterator[str]:
    config, health = state.config, state.health
    if config.insecure:
        yield "insecure: whoever reaches this broker can run code on its workers and clients"
    if health.loop_latency > _SLOW_LOOP:
        yield (
            f"a turn of the broker's loop took {health.loop_latency * 1000:.0f} ms: messages wait "
            "for the broker; spread the namespaces over several brokers"
        )
    if health.busy > _NEAR:
        yield f"the broker's loop is busy for {health.busy:.0%} of the time"
    if len(state.registry) > _NEAR * config.max_peers:
        yield (
            f"{len(state.registry)} of at most {config.max_peers} peers are registered "
            "(--max-peers)"
        )


def _of_namespaces(
    state: BrokerState, namespaces: Sequence[Namespace], now: float
) -> Iterator[str]:
    names = {namespace.name for namespace in namespaces}
    if len(names) == len(state.registry.namespaces):
        names |= {happening.namespace for happening in state.history.happenings}
    lost = sum(
        happening.count
        for happening in state.history.happenings
        if happening.kind == "lost"
        and happening.namespace in names
        and now - happening.time < _LATELY
    )
    if lost:
        yield f"{lost} {'peer was' if lost == 1 else 'peers were'} lost in the last minute"
    for namespace in namespaces:
        if namespace.world_is_waiting():
            size = namespace.world_size
            missing = [str(rank) for rank in range(size) if rank not in namespace.by_id]
            yield (
                f"the world of {size} in namespace {namespace.name!r} is incomplete: "
                f"{_some('rank', missing)} missing"
            )


def _of_peers(state: BrokerState, peers: Sequence[Peer], now: float) -> Iterator[str]:
    silent_after = max(_BEATS * state.config.heartbeat_interval, state.config.heartbeat_timeout)
    away = [peer for peer in peers if peer.away]
    silent = [peer for peer in peers if not peer.away and now - peer.last_heard > silent_after]
    full = [peer for peer in peers if _queue(state, peer) > _NEAR * state.config.queue_bytes]
    if away:
        yield f"{_some('peer', _names(away))} away: the connection broke"
    if silent:
        yield (
            f"{_some('peer', _names(silent))} connected but silent: busy with Python's lock held, "
            "or stopped"
        )
    if full:
        yield f"{_some('peer', _names(full))} reading too slowly: the queue is nearly full"
    versions = {peer.info.versions.get("tensorplay") for peer in peers} - {None}
    if versions - {state.versions["tensorplay"]}:
        yield (
            f"versions differ: the broker is {state.versions['tensorplay']}, peers are "
            f"{', '.join(sorted(map(str, versions)))}"
        )


def _queue(state: BrokerState, peer: Peer) -> int:
    return 0 if peer.identity is None else state.queued_bytes(peer.identity)


def _names(peers: list[Peer]) -> list[str]:
    return [repr(peer.info.name) for peer in peers]


def _some(what: str, names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    plural = len(names) > 1
    return f"{what}{'s' if plural else ''} {', '.join(names[:_NAMED])}{more} " + (
        "are" if plural else "is"
    )
