"""Connections to the broker that ended in the handshake, and what to look at then."""

from __future__ import annotations

import logging

from tensorplay.keys import PeerKeys

_log = logging.getLogger(__name__)


class Handshakes:
    """Counts the handshakes that failed.

    Args:
        where: The broker's address, for messages to people.
        keys: The keys that are used, or None.
    """

    def __init__(self, where: str, keys: PeerKeys | None) -> None:
        self.keys = keys
        self._where = where
        self._failed = 0

    def failed(self) -> None:
        """Notes that somebody was reached, but no connection came about."""
        self._failed += 1
        if self._failed == 2:  # once may be a broker that just ended
            _log.warning("no connection to the broker at %s.%s", self._where, self.why())

    def why(self) -> str:
        """Returns what to look at, as a further sentence; nothing if none failed."""
        if not self._failed:
            return ""
        if self.keys is None:
            what = "if the broker asks for keys, say which (curve_dir, TENSORPLAY_CURVE_DIR)"
        else:
            what = (
                "either its key is not the public key that this process has for it (broker.key, "
                "curve_server, TENSORPLAY_CURVE_SERVER), or it asks for no keys"
            )
        return f" Something answered, but ended the connection in the handshake: {what}."
