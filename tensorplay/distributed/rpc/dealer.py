"""The DEALER socket by which a peer reaches the broker: whole messages in, whole messages out.

A socket belongs to whichever thread holds the link's lock; ZeroMQ allows that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum

import zmq
from zmq.utils.monitor import recv_monitor_message

from tensorplay.address import BrokerAddress
from tensorplay.keys import PeerKeys, secure
from tensorplay.protocol.messages import CHUNK_BYTES

Frame = bytes | memoryview

#: Payloads up to this size are received by copying: cheaper than a Frame object each.
_COPY_BYTES = 8 << 10


class Change(Enum):
    """What has become of the connection."""

    CONNECTED = "connected"
    FAILED = "the other side ended the connection in the handshake"
    UNLIKE = "the other side speaks, or asks for, something else; ZeroMQ does not try again"
    KEY_REFUSED = "the broker refused this peer's key; ZeroMQ does not try again"


_CHANGES = {
    zmq.EVENT_HANDSHAKE_SUCCEEDED: Change.CONNECTED,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: Change.FAILED,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: Change.UNLIKE,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: Change.KEY_REFUSED,
}


class Dealer:
    """A DEALER socket that keeps trying to connect.

    Args:
        context: The ZeroMQ context.
        address: Where the broker is.
        heartbeat: Seconds between ZeroMQ's own heartbeats.
        silence: Seconds without an answer to them after which the connection is given up.
        keys: The keys to use, or None.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: BrokerAddress,
        heartbeat: float,
        silence: float,
        keys: PeerKeys | None = None,
    ) -> None:
        socket = self._socket = context.socket(zmq.DEALER)
        for option, value in {
            zmq.IMMEDIATE: 1,  # nothing is queued for a broker that is not there
            zmq.LINGER: 0,
            zmq.SNDHWM: 1024,
            # Unlimited: the window bounds what comes. libzmq answers no heartbeat while a
            # queue is full, so the broker would take a busy peer for dead, and it aborts the
            # process if it reconnects then.
            zmq.RCVHWM: 0,
            zmq.MAXMSGSIZE: 16 * CHUNK_BYTES,
            zmq.IPV6: int(address.needs_ipv6()),
            zmq.RECONNECT_IVL: 100,
            zmq.RECONNECT_IVL_MAX: 2000,
            # Answered by libzmq's own thread: a process that computes with the GIL held
            # is alive, one that was stopped is not.
            zmq.HEARTBEAT_IVL: int(heartbeat * 1000),
            zmq.HEARTBEAT_TIMEOUT: int(silence * 1000),
            # And no time to live, which would overrule how patient the broker is.
            # Middle boxes forget idle connections.
            zmq.TCP_KEEPALIVE: 1,
            zmq.TCP_KEEPALIVE_IDLE: 60,
            zmq.TCP_KEEPALIVE_INTVL: 15,
            zmq.TCP_KEEPALIVE_CNT: 4,
        }.items():
            socket.setsockopt(option, value)
        if keys is not None:
            secure(socket, keys)
        self._monitor = socket.get_monitor_socket(sum(_CHANGES))
        socket.connect(address.endpoint)

    def descriptors(self) -> tuple[int, int]:
        """Returns the file descriptors that become readable when there may be something to do.

        They tell of a change once: look for messages and changes before waiting for one.
        """
        return self._socket.fileno(), self._monitor.fileno()

    def readable(self) -> bool:
        """Returns whether a message is waiting."""
        return _has_message(self._socket)

    def changes(self) -> Iterator[Change]:
        """Yields what has become of the connection since the last look."""
        while _has_message(self._monitor):
            yield _CHANGES[recv_monitor_message(self._monitor)["event"]]  # type: ignore[index]

    def send(self, frames: Sequence[Frame]) -> bool:
        """Sends a message; returns False if it is not taken now."""
        socket = self._socket
        last = len(frames) - 1
        try:
            for index, frame in enumerate(frames):
                flags = zmq.DONTWAIT | (zmq.SNDMORE if index < last else 0)
                # The first frame is refused if the socket is full, a later one never is.
                socket.send(frame, flags, copy=len(frame) <= _COPY_BYTES)
        except zmq.Again:
            return False
        return True

    def receive(self) -> tuple[bytes, list[Frame]] | None:
        """Returns header and further frames of the next message, or None if there is none."""
        socket = self._socket
        try:
            header = socket.recv(zmq.DONTWAIT)
        except zmq.Again:
            return None
        frames: list[Frame] = []
        if not socket.getsockopt(zmq.RCVMORE):
            return header, frames
        frames.append(socket.recv())
        while socket.getsockopt(zmq.RCVMORE):
            frame = socket.recv(copy=False)
            frames.append(frame.bytes if len(frame) <= _COPY_BYTES else frame.buffer)
        return header, frames

    def close(self) -> None:
        """Closes the socket; what it has not sent is thrown away."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)


def _has_message(socket: zmq.Socket[bytes]) -> bool:
    events = socket.getsockopt(zmq.EVENTS)
    return isinstance(events, int) and bool(events & zmq.POLLIN)
