"""Workers that die, leave, come back, or come late; each test has a cluster of its own."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest
import torch

from tensorplay.broker import Broker
from tensorplay.cluster import ForkServerClient, LocalCluster
from tensorplay.distributed import rpc
from tensorplay.distributed.nn import RemoteModule
from tensorplay.errors import (
    BrokerError,
    MessageTooLargeError,
    NotInitializedError,
    RegistrationError,
    WorkerLostError,
    WorkerNotFoundError,
)
from tests.rpc import helpers

Start = Callable[..., LocalCluster]


def test_kill_9_fails_the_calls_in_flight_and_no_others(own_cluster: Start) -> None:
    cluster = own_cluster(workers=2)
    doomed = [rpc.rpc_async("worker1", helpers.wait_event, ("never", 60.0)) for _ in range(3)]
    other = rpc.rpc_async("worker0", helpers.wait_event, ("go", 60.0))
    rpc.rpc_sync("worker1", helpers.who)  # the three have begun
    killed = time.monotonic()
    cluster.kill("worker1")
    for future in doomed:
        with pytest.raises(WorkerLostError, match=r"worker 'worker1' \(id 1\) died while running"):
            future.wait(20)
    assert time.monotonic() - killed < 10
    rpc.rpc_sync("worker0", helpers.set_event, ("go",))
    assert other.wait(20)
    assert cluster.wait_ended("worker1") == -signal.SIGKILL
    with pytest.raises(WorkerLostError, match="worker1"):
        rpc.rpc_sync("worker1", helpers.who)
    with pytest.raises(WorkerNotFoundError, match=r"registered are worker0 \(0\)"):
        rpc.get_worker_info("worker1")


def test_the_error_of_a_lost_worker_says_who_where_and_when(own_cluster: Start) -> None:
    cluster = own_cluster(workers=2)
    futures = [rpc.rpc_async("worker1", helpers.wait_event, ("never", 60.0)) for _ in range(2)]
    cluster.kill("worker1")
    with pytest.raises(WorkerLostError) as caught:
        futures[0].wait(20)
    said = re.fullmatch(
        r"worker 'worker1' \(id 1\) died while running wait_event \(request \d+, "
        r"2 in flight to it from here\): connection lost, last heard of [\d.]+ s ago",
        str(caught.value),
    )
    assert said, caught.value


def test_shutdown_after_a_death_returns_at_once(own_cluster: Start) -> None:
    cluster = own_cluster(workers=2)
    cluster.kill("worker1")
    cluster.wait_ended("worker1")
    started = time.monotonic()
    rpc.shutdown()
    assert time.monotonic() - started < 5


MEMBER = """
import sys, time
from tensorplay.distributed import rpc
rpc.init_rpc(f"member{sys.argv[2]}", rank=int(sys.argv[2]), world_size=3, broker=sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
began = time.monotonic()
rpc.shutdown()
print(time.monotonic() - began)
"""


def test_a_fixed_world_does_not_wait_for_its_dead(own_cluster: Start) -> None:
    cluster = own_cluster(workers=0)
    members = [
        subprocess.Popen(
            [sys.executable, "-c", MEMBER, f"{cluster.address}/world", str(rank)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        for member in members:
            assert member.stdout is not None
            assert member.stdout.readline() == "ready\n"
        members[1].kill()
        for member in (members[0], members[2]):
            assert member.stdin is not None
            member.stdin.write("\n")
            member.stdin.flush()
        for member in (members[0], members[2]):
            assert member.stdout is not None
            assert float(member.stdout.read()) < 15
            assert member.wait(30) == 0
    finally:
        for member in members:
            member.kill()
            member.communicate()


def test_a_worker_that_comes_back_is_a_new_one(own_cluster: Start) -> None:
    cluster = own_cluster(workers=1)
    module = RemoteModule("worker0", torch.nn.Linear, (2, 2))
    cluster.kill("worker0")
    cluster.wait_ended("worker0")
    cluster.start_worker("worker0", rank=0)
    assert rpc.rpc_sync("worker0", os.getpid) == cluster.pids["worker0"]
    with pytest.raises(WorkerLostError):  # never reaches the wrong object
        module(torch.ones(1, 2))


def test_sigterm_lets_calls_finish(own_cluster: Start) -> None:
    cluster = own_cluster(workers=1)
    future = rpc.rpc_async("worker0", helpers.wait_event, ("finish", 60.0))
    rpc.rpc_sync("worker0", helpers.who)
    cluster.kill("worker0", signal.SIGTERM)
    assert rpc.rpc_sync("worker0", helpers.set_event, ("finish",)) is None
    assert future.wait(20)
    assert cluster.wait_ended("worker0") == 0


def test_a_second_sigterm_ends_a_worker_at_once(own_cluster: Start) -> None:
    cluster = own_cluster(workers=1)
    future = rpc.rpc_async("worker0", helpers.wait_event, ("forever", 60.0))
    rpc.rpc_sync("worker0", helpers.who)
    cluster.kill("worker0", signal.SIGTERM)
    while not cluster.exit_codes and not future.done():
        cluster.kill("worker0", signal.SIGTERM)
        with pytest.raises((TimeoutError, WorkerLostError)):
            future.wait(0.2)
    assert cluster.wait_ended("worker0") == 128 + signal.SIGTERM


def test_a_name_or_rank_that_is_taken_is_refused(own_cluster: Start) -> None:
    cluster = own_cluster(workers=1)
    code = (
        "import sys; from tensorplay.distributed import rpc\n"
        "rpc.init_rpc(sys.argv[1], rank=int(sys.argv[2]), broker=sys.argv[3])"
    )
    for name, rank in (("worker0", "-1"), ("other", "0")):
        done = subprocess.run(
            [sys.executable, "-c", code, name, rank, cluster.address],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 1
        assert "RegistrationError" in done.stderr
        assert "is not unique" in done.stderr
    assert rpc.rpc_sync("worker0", helpers.who) == "worker0"


def test_forty_workers_at_once(own_cluster: Start) -> None:
    own_cluster(workers=40, threads=1)
    assert {peer.id for peer in rpc.list_workers() if peer.id >= 0} == set(range(40))
    futures = [rpc.rpc_async(rank, helpers.who) for rank in range(40)]
    assert [future.wait(60) for future in futures] == [f"worker{rank}" for rank in range(40)]


def test_a_client_works_with_those_who_are_there(own_cluster: Start) -> None:
    cluster = own_cluster(workers=1)
    assert rpc.rpc_sync("worker0", helpers.who) == "worker0"
    with pytest.raises(WorkerNotFoundError, match="did not come"):
        rpc.wait_for_workers(["worker0", "worker1"], timeout=0.1)
    cluster.start_worker("worker1", wait=False)
    assert rpc.wait_for_workers(["worker1"], timeout=60)[0].id == 1


def test_a_worker_waits_for_a_broker_that_is_not_up_yet(free_port: int) -> None:
    address = f"tcp://127.0.0.1:{free_port}"
    worker = subprocess.Popen(
        [sys.executable, "-m", "tensorplay.worker", "--broker", address, "--name", "early"],
        stdout=subprocess.PIPE,
        text=True,
    )
    broker = subprocess.Popen(
        [sys.executable, "-m", "tensorplay.broker", "--bind", address], stdout=subprocess.PIPE
    )
    try:
        assert worker.stdout is not None
        assert worker.stdout.readline() == f"tensorplay worker early ready (rank 0) at {address}\n"
        worker.terminate()
        assert worker.wait(20) == 0
        broker.terminate()
        assert broker.wait(20) == 0
    finally:
        for process in (worker, broker):
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def test_a_worker_comes_back_to_a_restarted_broker(free_port: int) -> None:
    address = f"tcp://127.0.0.1:{free_port}"
    command = [sys.executable, "-m", "tensorplay.broker", "--bind", address]
    brokers = [subprocess.Popen(command, stdout=subprocess.PIPE)]
    worker = subprocess.Popen(
        [sys.executable, "-m", "tensorplay.worker", "--broker", address, "--name", "steady"],
        stdout=subprocess.PIPE,
    )
    try:
        rpc.init_rpc("client", broker=address)
        rpc.wait_for_workers(["steady"], timeout=60)
        rref = rpc.remote("steady", helpers.Counter, (5,))
        assert rref.rpc_sync().increment() == 6
        brokers[0].kill()
        brokers[0].wait()
        brokers.append(subprocess.Popen(command, stdout=subprocess.PIPE))
        deadline = time.monotonic() + 60
        while True:  # calls that are lost with the broker time out
            try:
                assert rref.rpc_sync(timeout=2).increment() > 6
                break
            except TimeoutError:
                assert time.monotonic() < deadline
    finally:
        if rpc._is_current_rpc_agent_set():
            rpc.shutdown(graceful=False)
        for process in (worker, *brokers):
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def test_no_broker_is_an_error_that_names_the_addresses(free_port: int) -> None:
    with pytest.raises(BrokerError, match=rf"localhost:{free_port} \(.*127\.0\.0\.1:{free_port}"):
        rpc.init_rpc(
            "lonely",
            broker=f"tcp://localhost:{free_port}",
            rpc_backend_options=rpc.BrokerRpcBackendOptions(connect_timeout=0.3),
        )
    assert not rpc._is_current_rpc_agent_set()


def test_joining_again_after_leaving(own_cluster: Start) -> None:
    cluster = own_cluster(workers=1)
    for _ in range(5):
        rpc.shutdown()
        with pytest.raises(NotInitializedError, match="init_rpc"):
            rpc.rpc_sync("worker0", helpers.who)
        rpc.init_rpc("client", broker=cluster.address)
        assert rpc.rpc_sync("worker0", helpers.who) == "worker0"
    with pytest.raises(RuntimeError, match="already initialized"):
        rpc.init_rpc("client", broker=cluster.address)


def test_joining_another_broker_after_leaving(own_cluster: Start, broker: Broker) -> None:
    cluster = own_cluster(workers=1)
    rpc.shutdown()
    rpc.init_rpc("client", broker=broker.address)
    assert [peer.name for peer in rpc.list_workers()] == ["client"]
    assert rpc.rpc_sync("client", helpers.who) == "client"
    rpc.shutdown()
    rpc.init_rpc("client", broker=cluster.address)
    assert rpc.rpc_sync("worker0", helpers.who) == "worker0"


def test_two_namespaces_do_not_see_each_other(own_cluster: Start) -> None:
    cluster = own_cluster(workers=1)
    rpc.shutdown()
    rpc.init_rpc("client", broker=f"{cluster.address}/elsewhere")
    assert [peer.name for peer in rpc.list_workers()] == ["client"]
    rpc.shutdown()
    rpc.init_rpc("client", broker=cluster.address)


def test_a_forked_child_is_told_to_connect_by_itself(own_cluster: Start) -> None:
    cluster = own_cluster(workers=1)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        text = ""
        try:
            rpc.rpc_sync("worker0", helpers.who)
        except NotInitializedError as error:
            text = str(error)
            rpc.init_rpc("child", broker=cluster.address)
            text += rpc.rpc_sync("worker0", helpers.who)
            rpc.shutdown()
        finally:
            os.write(write, text.encode())
            os._exit(0)
    os.close(write)
    assert os.waitpid(pid, 0)[1] == 0
    told = os.read(read, 4096).decode()
    os.close(read)
    assert "call init_rpc in this process" in told
    assert told.endswith("worker0")
    assert rpc.rpc_sync("worker0", helpers.who) == "worker0"  # the parent goes on


def test_joining_from_a_thread(own_cluster: Start) -> None:
    cluster = own_cluster(workers=1)
    rpc.shutdown()
    failures: list[BaseException] = []

    def join() -> None:
        try:
            rpc.init_rpc("threaded", broker=cluster.address)
            assert rpc.rpc_sync("worker0", helpers.who) == "worker0"
            rpc.shutdown()
        except BaseException as error:
            failures.append(error)

    for _ in range(50):
        thread = threading.Thread(target=join)
        thread.start()
        thread.join(30)
    assert not failures
    rpc.init_rpc("client", broker=cluster.address)


def test_an_interpreter_that_ends_without_shutdown_does_not_hang(own_cluster: Start) -> None:
    cluster = own_cluster(workers=1)
    code = (
        "import sys; from tensorplay.distributed import rpc\n"
        "rpc.init_rpc('careless', broker=sys.argv[1])\n"
        "rpc.rpc_async('worker0', abs, (1,))"
    )
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code, cluster.address], timeout=60)
    assert done.returncode == 0
    assert time.monotonic() - started < 40
    agent = rpc._get_current_rpc_agent()
    assert agent.roster.wait_for(
        lambda: "careless" not in [peer.name for peer in rpc.list_workers()], 20
    )


def test_ctrl_c_in_a_call_leaves_the_agent_usable(own_cluster: Start) -> None:
    own_cluster(workers=1)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        rpc.rpc_sync("worker0", helpers.wait_event, ("interrupted", 60.0))
    timer.join()
    rpc.rpc_sync("worker0", helpers.set_event, ("interrupted",))
    assert rpc.rpc_sync("worker0", helpers.who) == "worker0"


def test_a_worker_that_computes_with_the_lock_held_is_not_given_up(
    fork_server: ForkServerClient, own_cluster: Start
) -> None:
    own_cluster(
        workers=1, broker_options=["--heartbeat-interval", "0.2", "--heartbeat-timeout", "1"]
    )

    def hold_the_lock() -> str:
        import ctypes

        ctypes.PyDLL(None).usleep(3_000_000)  # PyDLL keeps the interpreter's lock
        return "there"

    assert rpc.rpc_sync("worker0", hold_the_lock) == "there"


def test_a_stopped_worker_is_given_up_and_comes_back(own_cluster: Start) -> None:
    cluster = own_cluster(
        workers=1, broker_options=["--heartbeat-interval", "0.2", "--heartbeat-timeout", "1"]
    )
    future = rpc.rpc_async("worker0", helpers.wait_event, ("stopped", 60.0))
    rpc.rpc_sync("worker0", helpers.who)
    cluster.kill("worker0", signal.SIGSTOP)
    try:
        with pytest.raises(WorkerLostError, match="worker0"):
            future.wait(20)
    finally:
        cluster.kill("worker0", signal.SIGCONT)
    rpc.wait_for_workers(["worker0"], timeout=20)
    rpc.rpc_sync("worker0", helpers.set_event, ("stopped",))


def test_names_that_no_peer_can_have(own_cluster: Start) -> None:
    cluster = own_cluster(workers=1)
    rpc.shutdown()
    for name in ("", "a b", "x" * 128):
        with pytest.raises(ValueError, match="Worker name must"):
            rpc.init_rpc(name, broker=cluster.address)
    with pytest.raises(RegistrationError, match="is not unique"):
        rpc.init_rpc("worker0", broker=cluster.address)
    rpc.init_rpc("client", broker=cluster.address)


def test_what_is_larger_than_the_broker_admits_is_an_error_at_once(own_cluster: Start) -> None:
    own_cluster(workers=1, broker_options=["--max-message-bytes", "100000"])
    with pytest.raises(MessageTooLargeError, match=r"request has .* at most 100000"):
        rpc.rpc_sync("worker0", helpers.echo, (torch.zeros(100_000),))
    with pytest.raises(MessageTooLargeError, match=r"result has .* at most 100000"):
        rpc.rpc_sync("worker0", torch.zeros, (100_000,))
    assert rpc.rpc_sync("worker0", torch.zeros, (10_000,)).numel() == 10_000


def test_handles_dropped_by_the_garbage_collector_while_calling(own_cluster: Start) -> None:
    """References are dropped from other threads and by cycles, and never block a call."""
    own_cluster(workers=1)
    stop = threading.Event()

    def drop() -> None:
        while not stop.is_set():
            rref = rpc.remote("worker0", helpers.Counter)
            assert rref.rpc_sync().increment() == 1
            cycle: list[object] = [rref]
            cycle.append(cycle)
            del cycle, rref
            gc.collect(0)  # the young objects: the cycle is among them

    threads = [threading.Thread(target=drop) for _ in range(2)]
    for thread in threads:
        thread.start()
    for number in range(100):
        assert rpc.rpc_sync("worker0", helpers.add, (number, 1), timeout=30) == number + 1
    stop.set()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


def test_waiting_for_a_call_lets_other_threads_compute(own_cluster: Start) -> None:
    own_cluster(workers=1)
    future = rpc.rpc_async("worker0", helpers.wait_event, ("overlap", 60.0))
    waiter = threading.Thread(target=future.wait)
    waiter.start()
    assert sum(range(100_000)) == 4_999_950_000  # needs the interpreter's lock
    rpc.rpc_sync("worker0", helpers.set_event, ("overlap",))
    waiter.join(30)
    assert not waiter.is_alive()
