"""What those can do who have shown no key yet: open connections, and send bytes."""

from __future__ import annotations

import os
import re
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

from tensorplay.broker import Broker, BrokerConfig
from tensorplay.distributed.rpc.roster import PeerRoster
from tensorplay.distributed.rpc.shm import files
from tensorplay.errors import ConfigError, ProtocolError
from tensorplay.protocol import wire
from tensorplay.protocol.calls import Op, Request
from tensorplay.protocol.messages import Kind, Refused
from tests.broker.helpers import PATIENCE, hello
from tests.security.helpers import KeyRing, agent, dial

#: The greeting of ZeroMQ 3.1 that asks for CURVE, as a client.
GREETING = b"\xff" + b"\0" * 8 + b"\x7f" + b"\x03\x01" + b"CURVE".ljust(20, b"\0") + b"\0" * 32


def connect(broker: Broker | str) -> socket.socket:
    address = broker if isinstance(broker, str) else broker.address
    return socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), PATIENCE)


def closed_within(peer: socket.socket, seconds: float) -> bool:
    """Returns whether the other end closes the connection in time."""
    deadline = time.monotonic() + seconds
    while (rest := deadline - time.monotonic()) > 0:
        peer.settimeout(rest)
        try:
            if not peer.recv(4096):
                return True
        except ConnectionError:
            return True
        except TimeoutError:
            break
    return False


@contextmanager
def patient(ring: KeyRing, seconds: float) -> Iterator[Broker]:
    config = BrokerConfig(
        bind=("tcp://127.0.0.1:0",), curve_dir=str(ring.directory), handshake_timeout=seconds
    )
    with Broker(config) as broker:
        yield broker


@pytest.mark.parametrize("first", [b"", b"\xff", GREETING], ids=["nothing", "byte", "greeting"])
def test_a_handshake_that_does_not_end_is_ended(ring: KeyRing, first: bytes) -> None:
    with patient(ring, 0.5) as broker, connect(broker) as peer:
        peer.sendall(first)
        assert closed_within(peer, PATIENCE)


def test_the_handshakes_time_is_an_option() -> None:
    with pytest.raises(ConfigError, match="handshake_timeout"):
        BrokerConfig(handshake_timeout=0.0)


def test_a_large_frame_before_the_handshake_is_not_read(ring: KeyRing) -> None:
    """The size alone ends the connection: nothing of it is kept."""
    with patient(ring, 30.0) as broker, connect(broker) as peer:
        peer.sendall(GREETING + b"\x06" + (1 << 40).to_bytes(8, "big") + b"x" * 1024)
        assert closed_within(peer, 10.0)


@pytest.mark.parametrize(
    "noise",
    [b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)), GREETING + bytes(range(256))],
    ids=["http", "noise", "noise after a greeting"],
)
def test_noise_ends_its_own_connection_only(
    ring: KeyRing, context: zmq.Context[Any], noise: bytes
) -> None:
    own = ring.make("alice")
    with patient(ring, 0.5) as broker, dial(context, broker.address, own) as alice:
        alice.register("alice", 1)
        with connect(broker) as peer:
            peer.sendall(noise)
            assert closed_within(peer, PATIENCE)
        assert len(alice.status()["namespaces"]["default"]["peers"]) == 1


def test_more_connections_than_open_files_do_not_end_the_broker(
    ring: KeyRing, context: zmq.Context[Any]
) -> None:
    """They are bounded by the limit of open files, and are gone when their time is up."""
    own, late = ring.make("alice"), ring.make("late")
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "tensorplay.broker", "--bind", "tcp://127.0.0.1:0"),
            *("--curve-dir", str(ring.directory), "--handshake-timeout", "1"),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        found = re.search(r"tcp://\S+", process.stdout.readline())
        assert found is not None
        limit = psutil.Process(process.pid).num_fds() + 40
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (limit, limit))
        with ExitStack() as stack:
            alice = stack.enter_context(dial(context, found[0], own))
            alice.register("alice", 1)
            for _ in range(100):
                stack.enter_context(connect(found[0]))
            assert alice.status()["namespaces"]["default"]["peers"][0]["name"] == "alice"
            newcomer = stack.enter_context(dial(context, found[0], late))
            assert newcomer.register("late", 2).peer.name == "late"
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate()


def test_no_more_peers_than_allowed(ring: KeyRing, context: zmq.Context[Any]) -> None:
    config = BrokerConfig(bind=("tcp://127.0.0.1:0",), curve_dir=str(ring.directory), max_peers=1)
    with Broker(config) as broker, ExitStack() as stack:
        own = ring.make("shared", names=["*"])
        first, second = (stack.enter_context(dial(context, broker.address, own)) for _ in range(2))
        first.register("a", 1)
        second.send(hello("b", 2))
        assert second.expect(Refused).code == "full"


def roster_is_full(roster: PeerRoster) -> Callable[[], bool]:
    return lambda: len(roster.all()) == 3


def test_a_payload_beyond_the_memory_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    """What is announced, by a message of a few bytes, is refused; the peer goes on."""
    with (
        Broker(BrokerConfig(bind=("tcp://127.0.0.1:0",), max_message_bytes=1 << 60)) as broker,
        agent("victim", broker) as victim,
        agent("attacker", broker) as attacker,
        agent("witness", broker) as witness,
    ):
        peer = victim.info
        for roster in (attacker.roster, witness.roster):
            assert roster.wait_for(roster_is_full(roster), PATIENCE)
        size = 1 << 50
        header = wire.encode(Request(Op.CALL, sizes=[size]))
        attacker._link.send(peer.incarnation, Kind.REQUEST, 12345, size, header)
        attacker.wake()
        deadline = time.monotonic() + PATIENCE
        while "no memory for" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.02)
        assert f"no memory for {size} bytes" in caplog.text
        assert witness.call(peer, abs, (-2,), hooks=False).wait() == 2


def test_a_slab_has_no_name_that_could_lead_elsewhere(tmp_path: Path) -> None:
    """It is asked for by numbers, and is taken only for an anonymous file of that peer's."""
    secret = tmp_path / "secret"
    secret.write_bytes(b"x" * 4096)
    refused = pytest.raises(ProtocolError, match="was found where the slab")
    with secret.open("r+b") as file, refused:
        files.open_slab(os.getpid(), file.fileno(), 1, 1, 4096)
    disguised = os.memfd_create("tensorplay-1-1/../../etc/passwd")
    try:
        with pytest.raises(ProtocolError, match="was found where the slab"):
            files.open_slab(os.getpid(), disguised, 1, 1, 4096)
    finally:
        os.close(disguised)
    assert secret.read_bytes() == b"x" * 4096
