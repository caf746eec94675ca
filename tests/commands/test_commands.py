"""The operator's commands against a broker, a worker's process and a client."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tensorplay.broker import Broker, BrokerConfig
from tensorplay.cli import main
from tensorplay.distributed import rpc
from tensorplay.errors import RegistrationError, WorkerLostError

#: The command, in a process of its own.
RUN = "from tensorplay.cli import main; main()"

CODE = """
import logging, sys

def speak(text):
    print(text)
    print(text.upper(), file=sys.stderr)

def note():
    logging.getLogger("mine").warning("look here")

def fail():
    raise ValueError("this cannot work")
"""


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    config = BrokerConfig(
        bind=("tcp://127.0.0.1:0",), heartbeat_interval=0.2, heartbeat_timeout=5.0
    )
    with Broker(config) as running:
        yield running


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("work")
    (folder / "talking.py").write_text(CODE, encoding="utf-8")
    return folder


Start = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture(scope="module")
def start(broker: Broker, folder: Path) -> Iterator[Start]:
    running = []
    files = ExitStack()

    def start(name: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "tensorplay.worker", "--broker", broker.address, "--name", name],
            cwd=folder,
            stdout=files.enter_context((folder / f"{name}.out").open("w")),
            stderr=subprocess.STDOUT,
            text=True,
        )
        running.append(process)
        until(lambda: "ready" in (folder / f"{name}.out").read_text(), 60.0)
        return process

    yield start
    for process in running:
        process.kill()
        process.wait(20)
    files.close()


@pytest.fixture(scope="module")
def worker(start: Start, broker: Broker, folder: Path) -> Iterator[subprocess.Popen[str]]:
    process = start("worker0")
    sys.path.insert(0, str(folder))
    rpc.init_rpc("client", broker=broker.address)
    yield process
    rpc.shutdown(graceful=False)
    sys.path.remove(str(folder))


@pytest.fixture
def run(broker: Broker) -> Callable[..., Result]:
    def run(command: str, *arguments: str, **options: Any) -> Result:
        return CliRunner().invoke(
            main, [command, *arguments, "--broker", broker.address], **options
        )

    return run


def call(name: str, *arguments: Any) -> Any:
    return rpc.rpc_sync("worker0", getattr(__import__("talking"), name), args=arguments)


@pytest.fixture
def worked(worker: subprocess.Popen[str], run: Callable[..., Result]) -> None:
    """The worker has answered calls, and the broker has been told."""

    def told() -> list[float]:
        peers = json.loads(run("status", "--json").output)["namespaces"]["default"]["peers"]
        stats = {peer["name"]: peer["stats"] for peer in peers}
        return [
            stats["client"].get("calls_made", 0),
            stats.get("worker0", {}).get("calls_served", 0),
            stats["client"].get("call_p50", 0),
            stats["worker0"].get("served_p50", 0),
        ]

    before = told()
    for _ in range(20):
        call("speak", "working")
    until(lambda: all(now > 0 for now in told()) and told()[:2] > before[:2])


def test_status_shows_the_peers(worked: None, run: Callable[..., Result]) -> None:
    result = run("status")
    assert result.exit_code == 0, result.output
    line = next(line for line in result.output.splitlines() if line.startswith("worker0"))
    assert str(os.getpid()) in result.output
    assert "p99" in result.output
    assert line.rstrip().endswith("s"), "a latency stands at the end"


def test_status_as_json_is_all_there_is(worked: None, run: Callable[..., Result]) -> None:
    def told() -> tuple[dict[str, Any], Any, Any]:
        namespace = json.loads(run("status", "--json").output)["namespaces"]["default"]
        peers = {peer["name"]: peer for peer in namespace["peers"]}
        return namespace, peers["client"], peers["worker0"]

    def complete() -> bool:
        _, client, worker = told()
        counts = client["stats"]["calls_made"], worker["stats"]["calls_served"]
        return bool(min(counts) >= 20 and client["rates"]["calls_made"] > 0)

    def works_until_complete() -> bool:
        call("speak", "working")  # a rate is one of the last few seconds
        return complete()

    until(works_until_complete)
    namespace, client, worker = told()
    assert worker["id"] == 0
    assert 0 < client["stats"]["call_p50"] <= client["stats"]["call_p99"] < 10
    assert worker["stats"]["memory_bytes"] > 1 << 20
    pairs = {(pair["from"], pair["to"]) for pair in namespace["traffic"]}
    assert pairs == {("client", "worker0"), ("worker0", "client")}


def test_status_tells_of_calls_that_failed(
    worker: subprocess.Popen[str], run: Callable[..., Result]
) -> None:
    with pytest.raises(ValueError, match="cannot work"):
        call("fail")
    until(lambda: "a call of 'client' raised ValueError: this cannot work" in run("status").output)


def test_watch_goes_on_until_it_is_interrupted(
    worker: subprocess.Popen[str], broker: Broker
) -> None:
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            RUN,
            "status",
            "--watch",
            "--json",
            "--interval",
            "0.1",
        ],
        env={**os.environ, "TENSORPLAY_BROKER": broker.address},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        looks = [json.loads(process.stdout.readline())["time"] for _ in range(3)]
        assert looks == sorted(set(looks))
    finally:
        process.kill()
        process.communicate()


def test_ps_lists_the_processes(worker: subprocess.Popen[str], run: Callable[..., Result]) -> None:
    result = run("ps")
    assert result.exit_code == 0
    (line,) = [line for line in result.output.splitlines() if line.startswith("worker0")]
    assert line.split()[1] == "0"
    assert line.rstrip().endswith("well")


def test_ping_measures_round_trips(
    worker: subprocess.Popen[str], run: Callable[..., Result]
) -> None:
    result = run("ping", "worker0", "--count", "3", "--interval", "0")
    assert result.exit_code == 0, result.output
    assert result.output.count("worker0 ") == 3
    assert "worker0: min" in result.output


def test_doctor_finds_nothing_wrong(
    worker: subprocess.Popen[str], run: Callable[..., Result]
) -> None:
    result = run("doctor")
    assert result.exit_code == 0, result.output
    for what in ("versions", "CURVE", "shared memory", "open files", "broker's clock", "worker0"):
        assert what in result.output


def test_logs_show_what_the_worker_prints(
    worker: subprocess.Popen[str], run: Callable[..., Result]
) -> None:
    call("speak", "tea is ready ☕")
    until(lambda: "TEA IS READY" in run("logs", "worker0").output)
    output = run("logs", "worker0").output
    assert "tea is ready ☕" in output
    assert "tensorplay worker worker0 ready" in output
    assert run("logs", "worker0", "-n", "1").output.count("\n") == 1


def test_a_worker_s_log_says_which_call_it_serves(
    worker: subprocess.Popen[str], run: Callable[..., Result]
) -> None:
    call("note")
    until(lambda: "look here" in run("logs", "worker0").output)
    (line,) = [line for line in run("logs", "worker0").output.splitlines() if "look here" in line]
    assert re.search(r"WARNING mine: \[worker0, call \d+ of 'client'\] look here", line)


def test_long_logs_come_in_pieces(
    worker: subprocess.Popen[str], run: Callable[..., Result]
) -> None:
    call("speak", "\n".join(f"line {number} \x1b[0m" for number in range(5000)))
    until(lambda: "LINE 4999" in run("logs", "worker0").output)
    lines = run("logs", "worker0").output.splitlines()
    assert [line for line in lines if line.startswith("line ")] == [
        f"line {number} "  # no terminal, no colours
        for number in range(5000)
    ]


def test_logs_can_be_followed(worker: subprocess.Popen[str], broker: Broker) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, "logs", "-f", "-n", "0", "worker0"],
        env={**os.environ, "TENSORPLAY_BROKER": broker.address},
        stdout=subprocess.PIPE,
        text=True,
    )
    seen = threading.Event()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line == "something new\n":
                seen.set()

    reader = threading.Thread(target=read)
    reader.start()
    try:
        deadline = time.monotonic() + 20
        while not seen.wait(0.3):
            assert time.monotonic() < deadline
            call("speak", "something new")
    finally:
        process.kill()
        process.wait()
        reader.join()
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.parametrize("command", ["kill", "drain", "ping", "logs"])
def test_nobody_of_that_name_is_an_error(
    worker: subprocess.Popen[str], run: Callable[..., Result], command: str
) -> None:
    result = run(command, "nobody", *(["--yes"] if command == "kill" else []))
    assert result.exit_code == 1
    assert "no peer 'nobody'" in result.output
    assert "worker0" in result.output


def test_a_client_cannot_be_drained_and_keeps_no_output(
    worker: subprocess.Popen[str], run: Callable[..., Result]
) -> None:
    assert "only workers" in run("drain", "client").output
    assert "does not know 'logs'" in run("logs", "client").output


@pytest.mark.parametrize("command", ["status", "ps", "doctor", "ping"])
def test_no_broker_is_an_error(free_port: int, command: str) -> None:
    address = f"tcp://127.0.0.1:{free_port}"
    result = CliRunner().invoke(main, [command, "--broker", address, "--timeout", "0.2"])
    assert result.exit_code == 1
    assert f"no broker answered at {address}" in result.output


def test_commands_need_no_torch(broker: Broker) -> None:
    code = (
        "import sys\nfrom tensorplay.cli import main\n"
        f"main(['status', '--broker', {broker.address!r}], standalone_mode=False)\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_kill_asks_first(start: Start, worker: Any, run: Callable[..., Result]) -> None:
    process = start("victim")
    assert run("kill", "victim", input="n\n").exit_code == 1
    until(
        lambda: any(
            peer.name == "victim" for peer in rpc._get_current_rpc_agent().get_worker_infos()
        )
    )
    future = rpc.rpc_async("victim", time.sleep, args=(60,))
    result = run("kill", "victim", input="y\n")
    assert result.exit_code == 0
    assert "victim was killed" in result.output
    with pytest.raises(WorkerLostError, match="killed by an operator"):
        future.wait()
    assert process.wait(10) == 137


def test_drain_lets_calls_finish(start: Start, worker: Any, run: Callable[..., Result]) -> None:
    process = start("leaver")
    until(
        lambda: any(
            peer.name == "leaver" for peer in rpc._get_current_rpc_agent().get_worker_infos()
        )
    )
    future = rpc.rpc_async("leaver", time.sleep, args=(0.5,))
    time.sleep(0.2)  # it is to have begun
    result = run("drain", "leaver")
    assert result.exit_code == 0, result.output
    assert "leaver has left" in result.output
    assert future.wait() is None
    assert process.wait(10) == 0


def test_a_killed_client_is_told(broker: Broker, run: Callable[..., Result]) -> None:
    code = (
        "import sys\nfrom tensorplay.distributed import rpc\n"
        f"rpc.init_rpc('notebook', broker={broker.address!r})\n"
        "print('here', flush=True)\nsys.stdin.readline()\n"
        "try:\n    rpc.rpc_sync('worker0', max, args=(1, 2))\n"
        "except Exception as error:\n    print(type(error).__name__, error, flush=True)\n"
        "rpc.shutdown(graceful=False)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        assert run("kill", "-y", "notebook").exit_code == 0
        until(lambda: "notebook" not in run("ps").output)
        output, _ = process.communicate("go on\n", timeout=30)
        assert RegistrationError.__name__ in output
        assert "operator" in output
    finally:
        process.kill()
        process.wait()
