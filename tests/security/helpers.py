"""Keys for tests, and peers that use them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from tensorplay import keys
from tensorplay.address import BrokerAddress
from tensorplay.broker import Broker
from tensorplay.distributed import rpc
from tensorplay.distributed.rpc.agent import Agent
from tensorplay.protocol.messages import Role
from tests.broker.helpers import RawPeer

#: Seconds between heartbeats, and of silence that means loss.
INTERVAL, TIMEOUT = 0.2, 2.0


@dataclass
class KeyRing:
    """A key directory in which the broker and all of its peers have their keys."""

    directory: Path

    def make(self, name: str, **grant: Any) -> keys.PeerKeys:
        """Makes a key and allows it."""
        made = self.make_unknown(name)
        keys.allow(self.directory, name, **grant)
        return made

    def make_unknown(self, name: str) -> keys.PeerKeys:
        """Makes a key that is not allowed."""
        keys.create(self.directory, name)
        return keys.peer_keys(self.directory, name)


def dial(context: zmq.Context[Any], address: str, own: keys.PeerKeys | None) -> RawPeer:
    """Connects a raw peer with keys; close it, or use it as a context manager."""
    options: dict[int, Any] = {}
    if own is not None:
        options = {
            zmq.CURVE_SERVERKEY: own.server.encode(),
            zmq.CURVE_PUBLICKEY: own.own.public.encode(),
            zmq.CURVE_SECRETKEY: own.own.secret,
        }
    return RawPeer(context, address, options)


@contextmanager
def agent(name: str, broker: Broker, **options: Any) -> Iterator[Agent]:
    """Runs an agent of this process."""
    made = Agent(
        name,
        BrokerAddress.parse(broker.address),
        role=Role.CLIENT,
        options=rpc.BrokerRpcBackendOptions(**options),
    )
    try:
        made.start()
        yield made
    finally:
        made.close(timeout=1.0)
