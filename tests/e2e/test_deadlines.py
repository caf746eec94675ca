"""Every call ends by its deadline, whatever has become of the broker, the callee or itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tensorplay.cluster import LocalCluster
from tensorplay.distributed import rpc
from tensorplay.errors import BrokerError, RpcTimeoutError, WorkerLostError
from tests.chaos.proxy import Network
from tests.rpc import helpers

Start = Callable[..., LocalCluster]

#: Seconds that a call may be late on a loaded machine.
SLACK = 3.0
FAST = ("--heartbeat-interval", "0.2", "--heartbeat-timeout", "1")

#: A client that prints how long calls with a time-out of a second took, and their error.
CLIENT = """
import sys, time
from tensorplay.distributed import rpc
from tests.rpc import helpers
rpc.init_rpc("sleeper", broker=sys.argv[1])
start = time.monotonic()
future = rpc.rpc_async("worker0", helpers.wait_event, ("never", 60.0), timeout=2.0)
print("called", flush=True)
try:
    future.wait()
except TimeoutError as error:
    print(type(error).__name__, flush=True)
rpc.shutdown(graceful=False)
"""

#: A peer that others call, and whose program ends in the middle of it.
SHORT = """
import sys
from tensorplay.distributed import rpc
rpc.init_rpc("short", broker=sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
"""

#: A client that ends with a call in flight.
HASTY = """
import sys
from tensorplay.distributed import rpc
from tests.rpc import helpers
rpc.init_rpc("hasty", broker=sys.argv[1])
rpc.rpc_async("worker0", helpers.wait_event, ("never", 60.0))
"""


def run(program: str, address: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def seconds_until_it_times_out(call: Callable[[], Any]) -> float:
    start = time.monotonic()
    with pytest.raises(RpcTimeoutError):
        call()
    return time.monotonic() - start


def test_with_a_dead_broker(own_cluster: Start) -> None:
    cluster = own_cluster(workers=1)
    os.kill(cluster.broker_pid, signal.SIGKILL)
    late = seconds_until_it_times_out(lambda: rpc.rpc_sync("worker0", helpers.who, timeout=0.5))
    assert 0.5 <= late < 0.5 + SLACK
    start = time.monotonic()
    rpc.shutdown(graceful=False)  # nor does leaving wait for it
    assert time.monotonic() - start < 10.0


def test_with_a_stopped_broker(own_cluster: Start) -> None:
    cluster = own_cluster(workers=1)
    os.kill(cluster.broker_pid, signal.SIGSTOP)
    try:
        late = seconds_until_it_times_out(lambda: rpc.rpc_sync("worker0", helpers.who, timeout=1.0))
    finally:
        os.kill(cluster.broker_pid, signal.SIGCONT)
    assert 1.0 <= late < 1.0 + SLACK
    assert rpc.rpc_sync("worker0", helpers.who) == "worker0"


def test_with_a_callee_that_holds_its_lock(own_cluster: Start) -> None:
    own_cluster(workers=1, broker_options=FAST)

    def hold_the_lock() -> None:
        import ctypes

        ctypes.PyDLL(None).usleep(4_000_000)

    late = seconds_until_it_times_out(lambda: rpc.rpc_sync("worker0", hold_the_lock, timeout=1.0))
    assert 1.0 <= late < 1.0 + SLACK - 1.0  # before it lets go
    assert rpc.rpc_sync("worker0", helpers.who) == "worker0"


def test_with_a_caller_that_was_stopped(own_cluster: Start) -> None:
    cluster = own_cluster(workers=1)
    with run(CLIENT, cluster.address) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == "called\n"
        os.kill(client.pid, signal.SIGSTOP)
        time.sleep(3.0)  # past the deadline
        resumed = time.monotonic()
        os.kill(client.pid, signal.SIGCONT)
        assert client.stdout.readline() == "RpcTimeoutError\n"
        assert time.monotonic() - resumed < SLACK
        assert client.wait(30) == 0
    cluster.kill("worker0")  # what it still runs would keep it


def test_a_program_that_ends_fails_the_calls_to_it(own_cluster: Start) -> None:
    cluster = own_cluster(workers=1)
    with run(SHORT, cluster.address) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "ready\n"
        rpc.wait_for_workers(["short"], timeout=20)
        doomed = rpc.rpc_async("short", helpers.wait_event, ("never", 60.0))
        other = rpc.rpc_async("worker0", helpers.wait_event, ("go on", 60.0))
        rpc.rpc_sync("short", helpers.who)
        process.stdin.close()
        with pytest.raises(WorkerLostError, match="'short'"):
            doomed.wait(30)
        assert process.wait(30) == 0
    rpc.rpc_sync("worker0", helpers.set_event, ("go on",))
    assert other.wait(20)


def test_a_program_that_ends_does_not_wait_for_its_calls(own_cluster: Start) -> None:
    cluster = own_cluster(workers=1)
    start = time.monotonic()
    with run(HASTY, cluster.address) as process:
        assert process.wait(30) == 0
    assert time.monotonic() - start < 25.0  # its imports are most of it
    assert rpc.rpc_sync("worker0", helpers.who) == "worker0"
    cluster.kill("worker0")


def test_a_large_tensor_on_a_slow_link_is_not_taken_for_silence(own_cluster: Start) -> None:
    """It takes several heartbeat time-outs; as one frame it would never arrive."""
    cluster = own_cluster(workers=1, broker_options=FAST)
    rpc.shutdown()
    options = rpc.BrokerRpcBackendOptions(shm=False)
    with Network(int(cluster.address.rpartition(":")[2]), ["client"]) as network:
        rpc.init_rpc("client", broker=network.address("client"), rpc_backend_options=options)
        rpc.wait_for_workers(["worker0"], timeout=20)
        network.set("client", delay=0.05)
        start = time.monotonic()
        tensor = torch.ones(4 << 20)
        assert rpc.rpc_sync("worker0", helpers.fill_and_sum, (tensor,), timeout=60) == 4 << 20
        assert time.monotonic() - start > 2.0
        network.set("client")
        rpc.shutdown(graceful=False)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_after_an_error_of_the_librarys_own(
    own_cluster: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = own_cluster(workers=1)
    future = rpc.rpc_async("worker0", helpers.wait_event, ("never", 60.0), timeout=0)
    rpc.rpc_sync("worker0", helpers.who)
    agent = rpc._get_current_rpc_agent()

    def fail(now: float) -> float:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(agent, "on_tick", fail)
    agent.wake()
    with pytest.raises(BrokerError, match="ZeroDivisionError: a bug"):
        future.wait(20)
    with pytest.raises(BrokerError, match="init_rpc"):  # nor does a later call hang
        rpc.rpc_sync("worker0", helpers.who, timeout=0)
    cluster.kill("worker0")
