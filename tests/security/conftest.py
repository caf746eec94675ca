"""A broker that asks for keys, and the keys of those who come."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from tensorplay import keys
from tensorplay.broker import Broker, BrokerConfig
from tests.security.helpers import INTERVAL, TIMEOUT, KeyRing


@pytest.fixture
def ring(tmp_path: Path) -> KeyRing:
    """A key directory with the broker's own pair."""
    keys.create(tmp_path, keys.BROKER_NAME)
    return KeyRing(tmp_path)


@pytest.fixture
def broker(ring: KeyRing) -> Iterator[Broker]:
    """A broker that lets in who is allowed in ``ring``."""
    before = threading.active_count()
    with Broker(
        BrokerConfig(
            bind=("tcp://127.0.0.1:0",),
            heartbeat_interval=INTERVAL,
            heartbeat_timeout=TIMEOUT,
            curve_dir=str(ring.directory),
        )
    ) as broker:
        yield broker
    assert threading.active_count() == before


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context: zmq.Context[Any] = zmq.Context()
    yield context
    context.destroy(linger=0)
