"""``python -m tensorplay.worker``, and the fork server, as processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tensorplay.broker import Broker
from tensorplay.distributed import rpc

Run = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def run() -> Iterator[Run]:
    """Starts a module of tensorplay with pipes at all its ends."""
    running: list[subprocess.Popen[str]] = []

    def start(module: str, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", f"tensorplay.{module}", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )
        running.append(process)
        return process

    yield start
    for process in running:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def test_it_tells_when_it_is_ready_and_leaves_when_told(broker: Broker, run: Run) -> None:
    address = broker.addresses[0]
    worker = run("worker", "--broker", address, "--name", "w", "--rank", "3", "--device", "cpu")
    assert line(worker) == f"tensorplay worker w ready (rank 3) at {address}\n"
    rpc.init_rpc("client", broker=address)
    try:
        assert rpc.rpc_sync("w", os.getpid) == worker.pid
        assert rpc.get_worker_info(3).name == "w"
        worker.terminate()
        assert worker.wait(30) == 0
    finally:
        rpc.shutdown(graceful=False)


def test_ctrl_c_ends_it_like_sigterm(broker: Broker, run: Run) -> None:
    worker = run("worker", "--broker", broker.addresses[0], "--name", "w")
    assert "ready" in line(worker)
    worker.send_signal(signal.SIGINT)
    _, log = worker.communicate(timeout=30)
    assert worker.returncode == 0
    assert "Traceback" not in log


def test_a_signal_ends_the_start(free_port: int, run: Run) -> None:
    worker = run("worker", "--broker", f"tcp://127.0.0.1:{free_port}", "--name", "w")
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(60) in (0, -signal.SIGTERM)


def test_a_signal_ends_the_wait_for_a_broker(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        mute.settimeout(60)
        address = f"tcp://127.0.0.1:{mute.getsockname()[1]}"
        worker = run("worker", "--broker", address, "--name", "w")
        mute.accept()[0].close()  # it has called
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(60) == 0, worker.communicate()


def test_a_name_that_is_taken_is_an_error(broker: Broker, run: Run) -> None:
    first = run("worker", "--broker", broker.addresses[0], "--name", "w")
    assert "ready" in line(first)
    second = run("worker", "--broker", broker.addresses[0], "--name", "w")
    out, log = second.communicate(timeout=60)
    assert (second.returncode, out) == (1, "")
    assert "Error:" in log
    assert "is not unique" in log


def test_modules_are_imported_from_where_it_was_started(
    broker: Broker, run: Run, tmp_path: Path
) -> None:
    (tmp_path / "my_models.py").write_text("def answer():\n    return 42\n", encoding="utf-8")
    worker = run(
        "worker", "--broker", broker.addresses[0], "--name", "w", "--import", "my_models",
        cwd=tmp_path,
    )  # fmt: skip
    assert "ready" in line(worker)
    rpc.init_rpc("client", broker=broker.addresses[0])
    try:
        answer = rpc.rpc_sync("w", lambda: __import__("my_models").answer())
        assert answer == 42
    finally:
        rpc.shutdown(graceful=False)


def test_a_module_that_is_not_there_ends_it(broker: Broker, run: Run) -> None:
    worker = run(
        "worker", "--broker", broker.addresses[0], "--name", "w", "--import", "no_such_module"
    )
    _, log = worker.communicate(timeout=60)
    assert worker.returncode == 1
    assert "no_such_module" in log


def test_its_log_may_be_json(broker: Broker, run: Run) -> None:
    worker = run(
        "worker", "--broker", broker.addresses[0], "--name", "w", "--log-json", "--log-level",
        "debug",
    )  # fmt: skip
    assert "ready" in line(worker)
    worker.terminate()
    _, log = worker.communicate(timeout=30)
    assert log
    for entry in log.splitlines():
        assert {"time", "level", "logger", "message"} <= json.loads(entry).keys()


def test_the_fork_server_tells_of_beginning_and_end(broker: Broker, run: Run) -> None:
    server = run("worker.forkserver")
    assert server.stdin is not None
    server.stdin.write(json.dumps({"name": "w", "broker": broker.addresses[0]}) + "\n")
    server.stdin.flush()
    started = json.loads(line(server))
    assert started == {"event": "started", "name": "w", "pid": started["pid"]}
    os.kill(started["pid"], signal.SIGKILL)
    ended = json.loads(line(server))
    assert ended == {"event": "ended", "name": "w", "pid": started["pid"], "code": -9}
    server.stdin.close()
    assert server.wait(30) == 0


def test_workers_die_with_their_fork_server(broker: Broker, run: Run) -> None:
    server = run("worker.forkserver")
    assert server.stdin is not None
    server.stdin.write(json.dumps({"name": "w", "broker": broker.addresses[0]}) + "\n")
    server.stdin.flush()
    worker = psutil.Process(json.loads(line(server))["pid"])
    server.kill()
    server.wait(30)
    _, alive = psutil.wait_procs([worker], timeout=30)
    assert not [left for left in alive if left.status() != psutil.STATUS_ZOMBIE]
