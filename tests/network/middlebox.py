"""A box between peers and broker that forgets connections on which nothing is said for a while.

As firewalls and virtual addresses do: what comes on a forgotten connection is dropped without
a word to either side.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
from contextlib import suppress

#: When something was said last on a connection that is forgotten for good.
FORGOTTEN = float("-inf")


class MiddleBox:
    """Listens at a port of its own; used as a context manager.

    Args:
        target: The broker's port.
        idle_limit: Seconds of silence after which a connection is forgotten.
    """

    def __init__(self, target: int, idle_limit: float) -> None:
        self._target = target
        self._idle_limit = idle_limit
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._server.getsockname()[1])
        #: How many connections were made, and how many were forgotten.
        self.made = 0
        self.forgotten = 0
        self._ends: list[socket.socket] = []
        self._last: dict[int, float] = {}
        self._selector = selectors.DefaultSelector()
        self._closing = False
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> MiddleBox:
        self._selector.register(self._server, selectors.EVENT_READ)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closing = True
        self._thread.join()
        for end in [*self._ends, self._server]:
            end.close()
        self._selector.close()

    def _run(self) -> None:
        while not self._closing:
            for key, _ in self._selector.select(0.05):
                if key.fileobj is self._server:
                    self._accept()
                else:
                    number, source, sink = key.data
                    self._pass_on(number, source, sink)

    def _accept(self) -> None:
        near, _ = self._server.accept()
        far = socket.create_connection(("127.0.0.1", self._target))
        number = self.made = self.made + 1
        self._last[number] = time.monotonic()
        self._ends += [near, far]
        self._selector.register(near, selectors.EVENT_READ, (number, near, far))
        self._selector.register(far, selectors.EVENT_READ, (number, far, near))

    def _pass_on(self, number: int, source: socket.socket, sink: socket.socket) -> None:
        data = b""
        with suppress(OSError):
            data = source.recv(1 << 16)
        if not data:
            for end in (source, sink):
                with suppress(KeyError):
                    self._selector.unregister(end)
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
            return
        now = time.monotonic()
        if now - self._last[number] > self._idle_limit:
            self.forgotten += self._last[number] != FORGOTTEN
            self._last[number] = FORGOTTEN
            return
        self._last[number] = now
        with suppress(OSError):
            sink.sendall(data)
