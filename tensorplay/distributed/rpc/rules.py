"""Which guard holds for what a peer sends to this one."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from tensorplay.distributed.rpc.allow import Guard, Policy
from tensorplay.distributed.rpc.roster import PeerRoster
from tensorplay.errors import NotAllowedError
from tensorplay.protocol.messages import PeerInfo

__all__ = ["Rules"]


class Rules:
    """What one agent lets others have it load and call.

    Args:
        roster: Who is there, and what their keys let them do.
        requests: What requests may name; None is anything.
        replies: What replies may name; None is anything.

    Raises:
        ConfigError: If something of it cannot be allowed.
    """

    def __init__(
        self,
        roster: PeerRoster,
        requests: Iterable[str] | None = None,
        replies: Iterable[str] | None = None,
    ) -> None:
        self._roster = roster
        self._requests = None if requests is None else Policy(requests)
        self._replies = None if replies is None else Policy(replies)
        self._nothing = Policy()
        self._lock = threading.Lock()
        self.violations = 0

    def of_request(self, src: PeerInfo) -> Guard | None:
        """Returns the guard of a peer's requests, or None if they may name anything."""
        me = self._roster.me
        if src.incarnation == me.incarnation:
            return None
        if src.calls and me.serves:
            if self._requests is None:
                return None
            return Guard(self._requests, src.name, self._count)
        # It may not call this peer, but may have to have its gradients.
        return Guard(self._nothing, src.name, self._count, gradients_only=True)

    def refusal_of_fetch(self, src: PeerInfo) -> NotAllowedError | None:
        """Returns why a peer may not have the value of a reference, or None if it may."""
        if src.calls and self._roster.me.serves:
            return None
        guard = self.of_request(src)
        try:
            if guard is not None:
                guard.refuse("the value of a reference")
        except NotAllowedError as refusal:
            return refusal
        return None

    def of_reply(self, src: PeerInfo) -> Guard | None:
        """Returns the guard of a peer's replies, or None if they may name anything."""
        if self._replies is None or src.incarnation == self._roster.me.incarnation:
            return None
        return Guard(self._replies, src.name, self._count)

    def _count(self) -> None:
        with self._lock:
            self.violations += 1
