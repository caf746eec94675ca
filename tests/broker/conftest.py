"""Brokers and sockets that are gone after each test."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from tensorplay.broker import Broker, BrokerConfig
from tests.broker.helpers import Connect, Dial, RawPeer

#: Short enough to see a peer die, long enough for a loaded machine.
INTERVAL, TIMEOUT, GRACE = 0.2, 2.0, 0.2


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context: zmq.Context[Any] = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def broker() -> Iterator[Broker]:
    before = threading.active_count()
    with Broker(
        BrokerConfig(
            bind=("tcp://127.0.0.1:0",),
            heartbeat_interval=INTERVAL,
            heartbeat_timeout=TIMEOUT,
            reconnect_grace=GRACE,
        )
    ) as broker:
        yield broker
    assert threading.active_count() == before


@pytest.fixture
def dial(context: zmq.Context[Any]) -> Iterator[Dial]:
    """Returns a function that connects a new raw peer to a broker."""
    peers = []

    def dial(address: str, options: dict[int, int] | None = None) -> RawPeer:
        peers.append(RawPeer(context, address, options))
        return peers[-1]

    yield dial
    for peer in peers:
        peer.socket.close()


@pytest.fixture
def connect(dial: Dial, broker: Broker) -> Connect:
    """Returns a function that connects a new raw peer to the test's broker."""
    return lambda options=None: dial(broker.address, options)
