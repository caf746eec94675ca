"""What the keys of those who connect let them do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from tensorplay.broker import admission
from tensorplay.broker.registry import Peer, Registry
from tensorplay.keys import Grant, KeyRole
from tensorplay.protocol.messages import Ask, Hello, Refused

#: What is not for whoever may call a worker.
_OF_OWNERS = ("drain", "kill", "logs")


class Rights:
    """Asks for each key what it may do at this moment.

    Args:
        grants: Gives what the keys may do, by public key; None if nobody is asked for a key.
    """

    def __init__(self, grants: Callable[[], Mapping[str, Grant]] | None) -> None:
        self._grants = grants

    def _grant(self, key: str) -> Grant | None:
        return None if self._grants is None else self._grants().get(key)

    def may_speak(self, key: str) -> bool:
        """Returns whether somebody with a key is listened to at all."""
        return self._grants is None or self._grant(key) is not None

    def check(self, hello: Hello, key: str) -> Refused | None:
        """Returns why a HELLO goes beyond what its key may do, or None."""
        return None if self._grants is None else admission.check_key(hello, self._grant(key))

    def of(self, key: str) -> tuple[bool, bool]:
        """Returns whether peers with a key may call, and whether they may be called."""
        grant = self._grant(key)
        role = KeyRole.BOTH if grant is None else grant.role
        return role.calls, role.serves

    def sees(self, key: str) -> Callable[[str], bool]:
        """Returns what tells whether somebody with a key may see a namespace."""
        grant = self._grant(key)
        if self._grants is None:
            return lambda namespace: True
        return (lambda namespace: False) if grant is None else grant.sees

    def check_ask(self, ask: Ask, key: str, registry: Registry) -> str:
        """Returns why a key may not ask something of a peer; nothing if it may.

        Only who may take a peer's name may read its log, have it leave, or end it: who may only
        call it may be somebody whom it does not trust.
        """
        if self._grants is None or not ask.name:
            return ""
        grant = self._grant(key)
        if grant is None or not grant.sees(ask.namespace) or not grant.role.calls:
            return f"this key may not ask anything of peers in namespace {ask.namespace!r}"
        if ask.what in _OF_OWNERS and not grant.covers(ask.name, ask.namespace):
            return (
                f"{ask.what} {ask.name!r} needs a key that may register that name; "
                f"{grant.key!r} may register {' '.join(grant.names) or 'none'}"
            )
        peer = registry.namespace(ask.namespace).by_name.get(ask.name)
        if peer is None or peer.info.serves or grant.covers(ask.name, ask.namespace):
            return ""
        return f"this key may not ask anything of {ask.name!r}, which serves no calls"

    def revoked(self, registry: Registry) -> Iterator[Peer]:
        """Yields the peers whose keys do not let them be what they are any more."""
        if self._grants is None:
            return
        grants = self._grants()
        for namespace in list(registry.namespaces.values()):
            for peer in list(namespace):
                if not admission.still_granted(peer, grants.get(peer.key)):
                    yield peer
