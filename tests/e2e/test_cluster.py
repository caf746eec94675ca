"""The local cluster: what it offers, and that nothing is left of it however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import tensorplay
from tensorplay.cluster import ForkServerClient, LocalCluster
from tensorplay.distributed import rpc
from tensorplay.errors import BrokerError, ConfigError, WorkerLostError
from tests.rpc import helpers

Start = Callable[..., LocalCluster]

#: A program that runs a cluster until it is told otherwise.
PROGRAM = """
import sys, time, tensorplay
with tensorplay.local_cluster(workers=2):
    print("up", flush=True)
    if sys.argv[1:] == ["fails"]:
        raise ZeroDivisionError("on purpose")
    time.sleep(100)
"""


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Callable[..., tuple[subprocess.Popen[str], set[int]]]]:
    """Starts the program; gives its process and those that it has started."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM, encoding="utf-8")
    running: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> tuple[subprocess.Popen[str], set[int]]:
        process = subprocess.Popen(
            [sys.executable, str(script), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        running.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        try:
            started = {child.pid for child in psutil.Process(process.pid).children(recursive=True)}
        except psutil.NoSuchProcess:
            started = set()
        return process, started

    yield start
    for process in running:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def wait_gone(pids: set[int]) -> None:
    """Waits until none of the processes is there any more."""
    processes = []
    for pid in pids:
        try:
            processes.append(psutil.Process(pid))
        except psutil.NoSuchProcess:
            continue
    _, left = psutil.wait_procs(processes, timeout=30)
    # A container without an init process does not reap orphans.
    assert not [p for p in left if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def test_names_addresses_and_processes(own_cluster: Start) -> None:
    cluster = own_cluster(workers=2)
    assert cluster.workers == ["worker0", "worker1"]
    assert cluster.address.startswith("tcp://127.0.0.1:")
    for rank, name in enumerate(cluster.workers):
        assert rpc.rpc_sync(rank, os.getpid) == cluster.pids[name]
    assert rpc.get_worker_info().name == "client"
    assert rpc.get_worker_info().id < 0
    assert psutil.pid_exists(cluster.broker_pid)


def test_workers_may_be_named(own_cluster: Start) -> None:
    cluster = own_cluster(["left", "right"], name="me", threads=2)
    assert cluster.workers == ["left", "right"]
    assert rpc.rpc_sync("right", helpers.who) == "right"
    assert rpc.get_worker_info().name == "me"


def test_workers_see_the_modules_and_the_folder_of_this_process(
    own_cluster: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "my_models.py").write_text("def answer():\n    return 42\n", encoding="utf-8")
    (tmp_path / "loaded.py").write_text("LOADED = True\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with (
        ForkServerClient() as server,
        tensorplay.local_cluster(workers=1, name="reader", imports=["loaded"], fork_server=server),
    ):
        import my_models  # type: ignore[import-not-found]

        assert rpc.rpc_sync("worker0", my_models.answer) == 42
        assert rpc.rpc_sync("worker0", os.getcwd) == str(tmp_path)
        assert "loaded" in rpc.rpc_sync("worker0", lambda: sorted(__import__("sys").modules))


def test_a_worker_that_has_ended_may_be_started_again(own_cluster: Start) -> None:
    cluster = own_cluster(workers=1)
    with pytest.raises(ConfigError, match="'worker0' is running"):
        cluster.start_worker("worker0")
    cluster.kill("worker0")
    assert cluster.wait_ended("worker0") == -signal.SIGKILL
    with pytest.raises(ConfigError, match="no worker named 'worker0' runs"):
        cluster.kill("worker0")
    cluster.start_worker("worker0", rank=0)
    assert cluster.workers == ["worker0"]
    assert rpc.rpc_sync("worker0", os.getpid) == cluster.pids["worker0"]


def test_a_worker_that_cannot_start_is_told_at_once(own_cluster: Start) -> None:
    cluster = own_cluster(workers=1)
    with pytest.raises(WorkerLostError, match="'twin' ended with exit code 1"):
        cluster.start_worker("twin", rank=0)  # that rank is taken


def test_a_worker_that_runs_on_is_an_error_of_the_wait(own_cluster: Start) -> None:
    cluster = own_cluster(workers=1)
    with pytest.raises(BrokerError, match="still runs after"):
        cluster.wait_ended("worker0", timeout=0.05)


def test_a_broker_that_does_not_start_is_an_error(own_cluster: Start) -> None:
    with pytest.raises(BrokerError, match="the broker ended with exit code 2"):
        own_cluster(workers=1, broker_options=["--heartbeat-interval", "-1"])
    assert not rpc._is_current_rpc_agent_set()


def test_a_fork_server_that_has_ended_is_told(own_cluster: Start) -> None:
    with ForkServerClient() as server:
        server._process.kill()
        server._reader.join(30)
        with (
            pytest.raises(BrokerError, match="has ended"),
            tensorplay.local_cluster(workers=1, fork_server=server),
        ):
            pass
    assert not rpc._is_current_rpc_agent_set()


def test_an_error_inside_ends_everything(program: Callable[..., tuple[object, set[int]]]) -> None:
    process, started = program("fails")
    assert isinstance(process, subprocess.Popen)
    assert process.wait(60) == 1
    wait_gone(started)


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL, signal.SIGHUP], ids=lambda s: s.name
)
def test_a_signal_leaves_nothing_behind(
    program: Callable[..., tuple[object, set[int]]], number: signal.Signals
) -> None:
    process, started = program()
    assert isinstance(process, subprocess.Popen)
    assert len(started) == 4  # the broker, the fork server, two workers
    os.killpg(process.pid, number)  # as a terminal, or a notebook's server, does
    assert process.wait(60) != 0
    wait_gone(started)


def test_an_interrupt_of_the_whole_group_ends_neither_broker_nor_workers(
    own_cluster: Start,
) -> None:
    cluster = own_cluster(workers=1)
    groups = {os.getpgid(pid) for pid in (cluster.broker_pid, cluster.pids["worker0"])}
    assert os.getpgrp() not in groups
