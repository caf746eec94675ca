"""Who is dead and who is only busy, with real processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from tensorplay.broker import Broker
from tensorplay.protocol import wire
from tensorplay.protocol.messages import Heartbeat, Kind, Roster, Route, Stranger, Welcome
from tests.broker.conftest import GRACE, INTERVAL, TIMEOUT
from tests.broker.helpers import Connect, Dial, RawPeer, hello


@contextmanager
def peer_process(address: str, holds_lock: float = 0.0) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "tests.broker.peer_process", address, str(holds_lock)]
    with subprocess.Popen(command) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def watcher(connect: Connect) -> RawPeer:
    watcher = connect()
    watcher.register("watcher", 1)
    return watcher


def wait_for_victim(watcher: RawPeer) -> None:
    assert [peer.name for peer in watcher.expect(Roster).joined] == ["victim"]


def seconds_until_it_leaves(watcher: RawPeer) -> float:
    start = time.monotonic()
    (gone,) = watcher.expect(Roster).left
    assert (gone.peer.name, gone.clean) == ("victim", False)
    assert "last heard of" in gone.reason
    return time.monotonic() - start


def test_a_killed_process_is_missed_within_an_interval_and_the_grace(
    broker: Broker, watcher: RawPeer
) -> None:
    with peer_process(broker.address) as process:
        wait_for_victim(watcher)
        process.kill()
        assert seconds_until_it_leaves(watcher) < INTERVAL + GRACE + 0.5


def test_a_stopped_process_is_missed_within_the_timeout(broker: Broker, watcher: RawPeer) -> None:
    with peer_process(broker.address) as process:
        wait_for_victim(watcher)
        os.kill(process.pid, signal.SIGSTOP)
        assert (
            TIMEOUT - INTERVAL < seconds_until_it_leaves(watcher) < TIMEOUT + INTERVAL + GRACE + 0.7
        )
        os.kill(process.pid, signal.SIGCONT)


def test_a_process_that_holds_its_lock_is_busy_not_dead(broker: Broker, watcher: RawPeer) -> None:
    busy = 5 * TIMEOUT
    with peer_process(broker.address, holds_lock=busy):
        wait_for_victim(watcher)
        start = time.monotonic()
        # Its own queue takes all of this meanwhile; a full one would stop its heartbeats.
        for number in range(3000):
            watcher.route(Kind.REQUEST, 2, number, b"x" * 1000)
        for number in range(3000):
            message = wire.decode(watcher.expect_frames(busy + 10.0)[0])
            assert isinstance(message, Route), message
            assert message.id == number
        assert time.monotonic() - start > busy - 0.5


class Proxy:
    """Passes TCP connections on until it is told to be silent."""

    def __init__(self, port: int) -> None:
        self.silent = False
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets: list[socket.socket] = [self._listener]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        for end in self._sockets:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in list(self._threads):
            thread.join()
        for end in self._sockets:
            end.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
                self._sockets += [near, far]
                for pair in ((near, far), (far, near)):
                    thread = threading.Thread(target=self._pass_on, args=pair)
                    self._threads.append(thread)
                    thread.start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if not self.silent:
                    target.sendall(data)
            if not self.silent:
                target.shutdown(socket.SHUT_WR)


@pytest.fixture
def proxy(broker: Broker) -> Iterator[Proxy]:
    proxy = Proxy(int(broker.address.rpartition(":")[2]))
    yield proxy
    proxy.close()


def test_a_half_open_connection_is_found(proxy: Proxy, dial: Dial, watcher: RawPeer) -> None:
    victim = dial(proxy.address)
    victim.register("victim", 2)
    wait_for_victim(watcher)
    proxy.silent = True  # both ends believe that the connection stands
    assert TIMEOUT - INTERVAL < seconds_until_it_leaves(watcher) < TIMEOUT + INTERVAL + GRACE + 0.7


def test_a_peer_takes_its_name_along_from_a_half_open_connection(
    proxy: Proxy, dial: Dial, connect: Connect, watcher: RawPeer
) -> None:
    dial(proxy.address).register("victim", 2)
    wait_for_victim(watcher)
    proxy.silent = True
    new = connect()
    new.incarnation = 2
    new.send(hello("victim", 2))
    assert "another connection" in new.expect(Stranger).reason  # so it seems, for a while
    while isinstance(answer := wire.decode(new.expect_frames()[0]), Stranger):
        pass
    assert isinstance(answer, Welcome)
    assert answer.peer.id == 1
    assert [peer.name for peer in watcher.expect(Roster).joined] == ["victim"]  # is back
    watcher.expect_nothing(TIMEOUT + 2 * INTERVAL + GRACE)  # the old connection's end is no news
    watcher.route(Kind.REQUEST, 2, 5, b"x")
    assert len(new.expect_frames()) == 2


def test_a_short_silence_changes_nothing(proxy: Proxy, dial: Dial, watcher: RawPeer) -> None:
    victim = dial(proxy.address)
    victim.register("victim", 2)
    wait_for_victim(watcher)
    watcher.expect_nothing(3 * TIMEOUT)  # nor does a peer that says nothing
    victim.send(hello("victim", 2))
    victim.expect(Welcome)
    victim.expect(Heartbeat)
