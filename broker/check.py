"""Asks a broker whether it is well, as the health checks of containers do."""

from __future__ import annotations

import time
from typing import Any
from urllib.parse import urlsplit

import msgspec
import zmq

from tensorplay.broker.config import needs_ipv6
from tensorplay.errors import BrokerError, ProtocolError
from tensorplay.keys import BROKER_NAME, peer_keys, secure
from tensorplay.protocol import wire
from tensorplay.protocol.messages import Status, StatusRequest

#: What a broker that listens at every address is reached at from its own host.
_OWN_HOSTS = {"*": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "[::1]"}


def check(endpoint: str, timeout: float, curve_dir: str | None = None) -> dict[str, Any]:
    """Returns the status of the broker that listens at an endpoint of this host.

    Args:
        endpoint: What the broker binds to; every address of the host is asked by loopback.
        timeout: Seconds that the answer may take.
        curve_dir: The broker's key directory, if it asks for keys.

    Raises:
        ConfigError: If the broker's pair of keys is not there.
        BrokerError: If no broker answers in time, or what answers is none.
    """
    address = own_address(endpoint)
    keys = peer_keys(curve_dir, BROKER_NAME) if curve_dir else None
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IPV6, int(needs_ipv6(address)))
        if keys is not None:
            secure(socket, keys)
        socket.connect(address)
        socket.send(wire.encode(StatusRequest()))
        deadline = time.monotonic() + timeout
        while socket.poll(max(0, int((deadline - time.monotonic()) * 1000))):
            message = wire.decode(socket.recv_multipart()[0])
            if isinstance(message, Status):
                status: dict[str, Any] = msgspec.json.decode(message.json)
                return status
    except (ProtocolError, zmq.ZMQError, msgspec.DecodeError) as error:
        raise BrokerError(f"the broker at {address} cannot be asked: {error}") from None
    finally:
        context.destroy(linger=0)
    raise BrokerError(
        f"no broker answered at {address} within {timeout} s; is one running there, or does it "
        "listen elsewhere (--bind, TENSORPLAY_BIND), or ask for keys (--curve-dir)?"
    )


def own_address(endpoint: str) -> str:
    """Returns where this host reaches a broker that binds to ``endpoint``.

    Raises:
        BrokerError: If the port is left to the broker to choose.
    """
    if not endpoint.startswith("tcp://"):
        return endpoint
    parts = urlsplit(endpoint)
    if not parts.port:
        raise BrokerError(f"{endpoint!r} names no port; say the one that the broker printed")
    host = _OWN_HOSTS.get(parts.hostname or "")
    return endpoint if host is None else f"tcp://{host}:{parts.port}"
