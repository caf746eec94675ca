"""Whether a peer may register, and what it is told of differing versions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tensorplay.broker.registry import Namespace, Peer
from tensorplay.keys import Grant
from tensorplay.protocol.messages import PROTOCOL_VERSION, Hello, Refused, Role

#: Longest name of a peer or a namespace.
MAX_NAME = 128
#: Longest other text that a peer tells of itself.
MAX_TEXT = 256
_MAX_INCARNATION = 1 << 63
_MAX_RANK = 1 << 31


def refused(code: str, text: str) -> Refused:
    """Returns a refusal."""
    return Refused(PROTOCOL_VERSION, code, text)


def check(hello: Hello) -> Refused | None:
    """Returns why a HELLO is refused whoever else is there, or None."""
    if hello.protocol != PROTOCOL_VERSION:
        return wrong_protocol(hello.protocol, hello.versions.get("tensorplay", "unknown"))
    for what, text in (("name", hello.name), ("namespace", hello.namespace)):
        if not 0 < len(text) <= MAX_NAME or not text.isprintable():
            return refused(
                "invalid",
                f"{what} {text[:MAX_NAME]!r} is not 1 to {MAX_NAME} printable characters",
            )
    for what, text in (("host", hello.host), ("device", hello.device)):
        if len(text) > MAX_TEXT or not text.isprintable():
            return refused(
                "invalid",
                f"{what} {text[:MAX_TEXT]!r} is not at most {MAX_TEXT} printable characters",
            )
    if not 0 < hello.incarnation < _MAX_INCARNATION:
        return refused("invalid", f"incarnation {hello.incarnation} is not a 63-bit number")
    if not -_MAX_RANK < hello.rank < _MAX_RANK or not 0 <= hello.world_size < _MAX_RANK:
        return refused("invalid", f"no world of size {hello.world_size} has a rank {hello.rank}")
    if hello.world_size and hello.rank >= hello.world_size:
        return refused(
            "world-size",
            f"rank {hello.rank} is not in a world of size {hello.world_size}; ranks go from 0 "
            f"to {hello.world_size - 1}",
        )
    return None


def check_world(hello: Hello, namespace: Namespace) -> Refused | None:
    """Returns why a HELLO does not fit the fixed world of its namespace, or None."""
    size = namespace.world_size
    if size and not hello.world_size and hello.rank >= 0:
        return refused(
            "world-size",
            "RPC group mixes statically and dynamically initialized members which is not "
            f"supported. Namespace {namespace.name!r} has a fixed world of size {size}: "
            f"{hello.name!r} may join it with that world_size, or without a rank",
        )
    if hello.world_size and size and hello.world_size != size:
        return refused(
            "world-size",
            f"{hello.name!r} expects a world of size {hello.world_size}, but namespace "
            f"{namespace.name!r} has a world of size {size}; use another namespace, or the "
            "same world_size everywhere",
        )
    return None


def check_key(hello: Hello, grant: Grant | None) -> Refused | None:
    """Returns why a HELLO goes beyond what its key may do, or None.

    Args:
        hello: The registration.
        grant: What the key may do, or None if it is not allowed.
    """
    if grant is None:
        return refused(
            "key", "the key of this connection is not allowed; `tensorplay keys allow` lets it in"
        )
    if grant.covers(hello.name, hello.namespace):
        return None
    return refused(
        "key",
        f"key {grant.key!r} may register the names {' '.join(grant.names)} in the namespaces "
        f"{' '.join(grant.namespaces)}, but not {hello.name!r} in {hello.namespace!r}; "
        "`tensorplay keys allow` at the broker changes that",
    )


def still_granted(peer: Peer, grant: Grant | None) -> bool:
    """Returns whether a key allows (still) what a peer is."""
    info = peer.info
    return (
        grant is not None
        and grant.covers(info.name, peer.namespace.name)
        and info.calls is grant.role.calls
        and info.serves is grant.role.serves
    )


def wrong_protocol(version: int, release: str = "unknown") -> Refused:
    """Returns the refusal of a peer that speaks another version of the protocol."""
    from tensorplay.version import __version__

    return refused(
        "protocol",
        f"this broker (tensorplay {__version__}) speaks protocol version {PROTOCOL_VERSION}, the "
        f"peer (tensorplay {release}) speaks version {version}; install the same tensorplay "
        "on both",
    )


def holder(hello: Hello, namespace: Namespace) -> Peer | None:
    """Returns the peer that has the name or the rank which a HELLO asks for."""
    found = namespace.by_name.get(hello.name)
    if found is None and hello.rank >= 0:
        found = namespace.by_id.get(hello.rank)
    return found


def taken(hello: Hello, peer: Peer) -> Refused:
    """Returns the refusal of a HELLO whose name or rank ``peer`` has."""
    where = f"in namespace {peer.namespace.name!r}"
    info = peer.info
    if info.name == hello.name:
        return refused(
            "name-taken",
            f"name {hello.name!r} is not unique {where}: it belongs to a live peer (id "
            f"{info.id}, host {info.host or '?'}, pid {info.pid}); choose another name",
        )
    return refused(
        "rank-taken",
        f"rank {hello.rank}, asked for by {hello.name!r}, is not unique {where}: it belongs "
        f"to the live peer {peer}; choose another rank, or none to be given a free one",
    )


def choose_id(hello: Hello, namespace: Namespace) -> int | None:
    """Returns the id of a newcomer, or None if its fixed world has no rank left."""
    if hello.rank >= 0:
        return hello.rank
    if hello.role == Role.WORKER and hello.rank == -1:
        if not hello.world_size:
            return namespace.free_rank()
        free = (rank for rank in range(hello.world_size) if rank not in namespace.by_id)
        return next(free, None)
    if hello.rank < -1 and hello.rank not in namespace.by_id:
        return hello.rank
    return namespace.free_rankless_id()


def version_warnings(hello: Hello, own: Mapping[str, str], peers: Iterable[Peer]) -> list[str]:
    """Returns a sentence for each version of a newcomer that differs where it may matter.

    Args:
        hello: The newcomer's registration.
        own: The broker's versions.
        peers: Who is there already.
    """
    warnings = []
    theirs = _minor(hello.versions, "tensorplay")
    if theirs and theirs != _minor(own, "tensorplay"):
        warnings.append(
            f"tensorplay {hello.versions['tensorplay']} here, {own['tensorplay']} at the broker"
        )
    consequences = {
        "tensorplay": "",
        "python": ": functions and classes that travel by value may not load",
        "torch": ": results may differ, and some objects may not load",
    }
    seen: set[tuple[str, str]] = set()
    for peer in peers:
        for key, consequence in consequences.items():
            mine, other = _minor(hello.versions, key), _minor(peer.info.versions, key)
            if mine and other and mine != other and (key, other) not in seen:
                seen.add((key, other))
                warnings.append(
                    f"{key} {hello.versions[key]} here, {peer.info.versions[key]} at peer "
                    f"{peer.info.name!r}{consequence}"
                )
    return warnings


def _minor(versions: Mapping[str, str], key: str) -> str:
    """Returns the first two numbers of a version, or nothing."""
    return ".".join(versions.get(key, "").split(".")[:2])
