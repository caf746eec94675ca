"""Asking a broker whether it is well."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time

import pytest

from tensorplay.broker import Broker
from tensorplay.broker.check import check, own_address
from tensorplay.errors import BrokerError
from tests.broker.helpers import Connect


def test_a_broker_that_is_well_answers(broker: Broker, connect: Connect) -> None:
    connect().register("w", 1)
    status = check(broker.address, 10.0)
    assert [peer["name"] for peer in status["namespaces"]["default"]["peers"]] == ["w"]


def test_where_no_broker_is_nobody_answers() -> None:
    with socket.socket() as nobody:  # bound, but it does not listen
        nobody.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{nobody.getsockname()[1]}"
        started = time.monotonic()
        with pytest.raises(BrokerError, match=f"no broker answered at {address} within 0.3 s"):
            check(address, 0.3)
        assert time.monotonic() - started < 3


def test_what_is_no_broker_is_told_from_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n")
                connection.recv(1024)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(BrokerError, match="no broker answered"):
            check(f"tcp://127.0.0.1:{server.getsockname()[1]}", 0.5)
        thread.join()


@pytest.mark.parametrize(
    ("bound", "reached"),
    [
        ("tcp://0.0.0.0:5555", "tcp://127.0.0.1:5555"),
        ("tcp://*:5555", "tcp://127.0.0.1:5555"),
        ("tcp://[::]:5555", "tcp://[::1]:5555"),
        ("tcp://10.0.0.7:5555", "tcp://10.0.0.7:5555"),
        ("ipc:///run/broker", "ipc:///run/broker"),
    ],
)
def test_a_broker_is_reached_from_its_own_host(bound: str, reached: str) -> None:
    assert own_address(bound) == reached


def test_a_port_that_is_not_said_cannot_be_asked() -> None:
    with pytest.raises(BrokerError, match="names no port"):
        own_address("tcp://127.0.0.1:0")


def test_the_command_tells_by_its_exit_code(broker: Broker) -> None:
    def run(address: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "tensorplay.broker", "--check", "--bind", address],
            capture_output=True,
            text=True,
            timeout=60,
        )

    well = run(broker.address)
    assert (well.returncode, well.stderr) == (0, "")
    assert well.stdout.startswith("well: up for ")
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        gone = run(f"tcp://127.0.0.1:{nobody.getsockname()[1]}")
    assert (gone.returncode, gone.stdout) == (1, "")
    assert "no broker answered" in gone.stderr
