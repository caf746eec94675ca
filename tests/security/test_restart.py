"""A broker with keys that is restarted, and peers that come back."""

from __future__ import annotations

import socket

import pytest

from tensorplay import keys
from tensorplay.broker import Broker, BrokerConfig
from tensorplay.errors import RegistrationError
from tests.security.helpers import INTERVAL, TIMEOUT, KeyRing, agent


def config(ring: KeyRing, port: int) -> BrokerConfig:
    return BrokerConfig(
        bind=(f"tcp://127.0.0.1:{port}",),
        heartbeat_interval=INTERVAL,
        heartbeat_timeout=TIMEOUT,
        curve_dir=str(ring.directory),
    )


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_calls_go_on_after_a_restart_with_the_same_keys(ring: KeyRing, port: int) -> None:
    for name in ("caller", "callee"):
        ring.make(name)
    options = {"curve_dir": str(ring.directory)}
    broker = Broker(config(ring, port)).start()
    try:
        with (
            agent("caller", broker, **options) as caller,
            agent("callee", broker, **options) as one,
        ):
            assert caller.roster.wait_for(lambda: len(caller.roster.all()) == 2, 10)
            broker.close()
            broker = Broker(config(ring, port)).start()
            assert caller.call(one.info, abs, (-3,), hooks=False).wait(30) == 3
    finally:
        broker.close()


def test_a_key_that_was_revoked_meanwhile_does_not_come_back(ring: KeyRing, port: int) -> None:
    ring.make("alice")
    broker = Broker(config(ring, port)).start()
    try:
        with agent("alice", broker, curve_dir=str(ring.directory)) as alice:
            broker.close()
            keys.revoke(ring.directory, "alice")
            broker = Broker(config(ring, port)).start()
            alice._link.thread.join(30)
            assert isinstance(alice.failure, RegistrationError)
            assert "refused this peer's key" in str(alice.failure)
    finally:
        broker.close()
