"""The forms of a broker's address."""

from __future__ import annotations

import socket

import pytest

from tensorplay.address import BrokerAddress
from tensorplay.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "endpoint", "namespace"),
    [
        ("tcp://127.0.0.1:5555", "tcp://127.0.0.1:5555", "default"),
        ("tcp://host:5555/", "tcp://host:5555", "default"),
        ("tcp://host:5555/experiment-7", "tcp://host:5555", "experiment-7"),
        ("tcp://[::1]:5555/a", "tcp://[::1]:5555", "a"),
        ("ipc:///tmp/broker.sock", "ipc:///tmp/broker.sock", "default"),
        ("ipc:///tmp/broker.sock?a", "ipc:///tmp/broker.sock", "a"),
    ],
)
def test_forms(text: str, endpoint: str, namespace: str) -> None:
    address = BrokerAddress.parse(text)
    assert (address.endpoint, address.namespace) == (endpoint, namespace)
    assert BrokerAddress.parse(str(address)) == address


@pytest.mark.parametrize(
    "text", ["", "host:5555", "tcp://host", "tcp://:5555", "udp://h:1", "ipc://", "tcp://h:99999"]
)
def test_other_forms_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected"):
        BrokerAddress.parse(text)


def test_a_name_with_two_families_uses_the_one_that_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        v4 = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))
        v6 = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", port, 0, 0))
        monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: [v6, v4])
        address = BrokerAddress.parse(f"tcp://localhost:{port}")
        assert not address.needs_ipv6()
        assert address.resolve() == [f"::1:{port}", f"127.0.0.1:{port}"]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: [v6])
        assert address.needs_ipv6()


def test_a_name_that_does_not_resolve_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    address = BrokerAddress.parse("tcp://no-such-host:1")
    assert "Name or service not known" in address.resolve()[0]
    assert not address.needs_ipv6()
