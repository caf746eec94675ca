"""Answers libzmq's question whether a key may connect (ZAP, ZeroMQ RFC 27).

libzmq asks during the handshake of each connection, before it takes any message of it,
through a socket of the broker's context that has a fixed name.  A thread of its own
answers: a handshake never waits for the broker's loop, nor the loop for a file.

What an accepted connection sends carries the user id of the answer, which is its public
key: the broker asks for it with every message.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

from tensorplay import keys
from tensorplay.keys import Grant

_log = logging.getLogger(__name__)

#: Where libzmq asks.
_ENDPOINT = "inproc://zeromq.zap.01"
#: A domain must be set, or libzmq does not ask.
_DOMAIN = b"tensorplay"
_VERSION = b"1.0"
#: Seconds between two lines in the log about refused connections.
_LOG_SECONDS = 1.0


class Access:
    """The broker's own key, and the keys that it lets in.

    Args:
        directory: The key directory.

    Raises:
        ConfigError: If the broker's own pair is not there, or others may read it.
    """

    def __init__(self, directory: Path) -> None:
        directory = directory.expanduser()
        self._own = keys.load_pair(directory / f"{keys.BROKER_NAME}.key_secret")
        # Whoever has the broker's own pair may ask it how it is, and register nothing.
        self._owner = {self._own.public: Grant(keys.BROKER_NAME, self._own.public, (), ("*",))}
        self._authorized = keys.Authorized(directory / keys.AUTHORIZED)

    def grants(self) -> Mapping[str, Grant]:
        """Returns what the keys may do at this moment, by public key."""
        return {**self._authorized.grants(), **self._owner}

    def guard(self, socket: zmq.Socket[bytes]) -> None:
        """Has a socket, before it listens, let in only who shows a key that is allowed."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self._own.public.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._own.secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)


class Authenticator:
    """Decides who may connect.

    Args:
        context: The broker's ZeroMQ context.
        grants: Gives what the keys may do that may connect, by public key; called in the thread.
    """

    def __init__(
        self, context: zmq.Context[Any], grants: Callable[[], Mapping[str, Grant]]
    ) -> None:
        self._grants = grants
        self._next_log = float("-inf")
        self._unlogged = 0
        self._wake_out, self._wake_in = os.pipe()
        self._socket: zmq.Socket[bytes] = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(_ENDPOINT)
        self._thread = threading.Thread(target=self._run, name="tensorplay-keys", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread; libzmq is to ask no more."""
        os.close(self._wake_in)
        self._thread.join()
        os.close(self._wake_out)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_out, zmq.POLLIN)
        try:
            while self._wake_out not in dict(poller.poll()):
                self._socket.send_multipart(self._answer(self._socket.recv_multipart()))
        finally:
            self._socket.close()

    def _answer(self, request: Sequence[bytes]) -> list[bytes]:
        request_id = request[1] if len(request) > 1 else b""
        key = self._accept(request)
        if key is None:
            return [_VERSION, request_id, b"400", b"key not allowed", b"", b""]
        return [_VERSION, request_id, b"200", b"OK", key.encode(), b""]

    def _accept(self, request: Sequence[bytes]) -> str | None:
        """Returns the public key of a connection that is let in."""
        # version, request id, domain, address, routing id, mechanism, credentials
        if len(request) != 7 or request[2] != _DOMAIN or request[5] != b"CURVE":
            return None
        key = z85.encode(request[6]).decode()
        try:
            grant = self._grants().get(key)
        except Exception:  # whatever goes wrong, nobody is let in by it
            _log.exception("could not find out whether a key is allowed")
            return None
        if grant is None:
            self._log_refusal(request[3].decode(errors="replace"), key)
            return None
        return key

    def _log_refusal(self, address: str, key: str) -> None:
        now = time.monotonic()
        if now < self._next_log:
            self._unlogged += 1
            return
        self._next_log = now + _LOG_SECONDS
        more = f" (and {self._unlogged} more before)" if self._unlogged else ""
        self._unlogged = 0
        _log.warning(
            "refused a connection from %s%s: the public key %s is not allowed; "
            "`tensorplay keys allow` lets it in",
            address,
            more,
            key,
        )
