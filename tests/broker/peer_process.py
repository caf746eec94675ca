"""A peer in a process of its own: ``python -m tests.broker.peer_process ADDRESS SECONDS``.

Registers as "victim" with incarnation 2, then holds the interpreter's lock for some seconds
in C, where no Python thread can run, and then answers every request.
"""

from __future__ import annotations

import ctypes
import sys

import zmq

from tensorplay.protocol import wire
from tensorplay.protocol.messages import Kind, Route
from tests.broker.helpers import RawPeer


def main(address: str, seconds: float) -> None:
    heartbeats: dict[int, int] = {
        zmq.HEARTBEAT_IVL: 200,
        zmq.HEARTBEAT_TIMEOUT: 1000,
        zmq.HEARTBEAT_TTL: 1000,
        zmq.RCVHWM: 0,
    }
    peer = RawPeer(zmq.Context(), address, heartbeats)
    peer.register("victim", 2)
    # PyDLL calls without giving the lock away.
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))
    while True:
        message = wire.decode(peer.expect_frames(3600.0)[0])
        if isinstance(message, Route) and message.kind == Kind.REQUEST:
            peer.route(Kind.REPLY, message.src, message.id)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
