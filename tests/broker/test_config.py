"""The broker's options."""

from __future__ import annotations

from typing import Any

import pytest

from tensorplay.broker.config import BrokerConfig
from tensorplay.errors import ConfigError


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://127.0.0.1:5555",
        "tcp://127.3.2.1:0",
        "tcp://localhost:0",
        "tcp://[::1]:5555",
        "tcp://lo:1",
        "ipc:///tmp/broker",
    ],
)
def test_endpoints_of_this_host_are_accepted(endpoint: str) -> None:
    assert BrokerConfig(bind=(endpoint,)).bind == (endpoint,)


@pytest.mark.parametrize(
    "endpoint",
    ["tcp://*:5555", "tcp://0.0.0.0:1", "tcp://10.0.0.1:1", "tcp://[::]:1", "tcp://eth0:1"],
)
def test_endpoints_that_others_reach_must_be_asked_for_in_so_many_words(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"can be reached.*--curve-dir.*--insecure"):
        BrokerConfig(bind=(endpoint,))
    assert BrokerConfig(bind=(endpoint,), insecure=True).bind == (endpoint,)
    assert BrokerConfig(bind=(endpoint,), curve_dir="keys").bind == (endpoint,)
    with pytest.raises(ConfigError, match="exclude each other"):
        BrokerConfig(bind=(endpoint,), curve_dir="keys", insecure=True)


@pytest.mark.parametrize(
    "endpoint",
    [
        "",
        "tcp://",
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:x",
        "tcp://127.0.0.1:99999",
        "ipc://",
        "udp://127.0.0.1:1",
        "127.0.0.1:5555",
        "tcp://127.0.0.1:5555/namespace",
        "tcp://[::1:5",
    ],
)
def test_other_endpoints_are_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="cannot listen at"):
        BrokerConfig(bind=(endpoint,), insecure=True)


@pytest.mark.parametrize(
    "options",
    [
        {"bind": ()},
        {"heartbeat_interval": 0.0},
        {"heartbeat_interval": float("nan")},
        {"heartbeat_interval": 5.0},
        {"heartbeat_timeout": 7000.0},
        {"heartbeat_timeout": float("nan")},
        {"max_message_bytes": 0},
        {"queue_bytes": -1},
        {"max_peers": 0},
        {"drain_timeout": -1.0},
        {"drain_timeout": float("nan")},
    ],
)
def test_values_that_cannot_work_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        BrokerConfig(**options)
