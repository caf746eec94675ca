"""``python -m tensorplay.broker``, in processes of its own."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest

from tensorplay.broker import Broker, BrokerConfig
from tensorplay.protocol.messages import Farewell
from tests.broker.helpers import PATIENCE, Dial

Process: TypeAlias = "subprocess.Popen[str]"
Start: TypeAlias = Callable[..., Process]

LOOPBACK = "tcp://127.0.0.1:0"
READY = re.compile(r"tensorplay broker ready at ((?:tcp|ipc)://\S+)\n")


@pytest.fixture
def start() -> Iterator[Start]:
    """Returns a function that starts a broker with arguments and environment."""
    processes: list[Process] = []

    def start(*arguments: str, **environment: str) -> Process:
        process = subprocess.Popen(
            [sys.executable, "-m", "tensorplay.broker", *arguments],
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def ready(process: Process) -> str:
    """Returns the endpoint that the broker says it is ready at."""
    assert process.stdout is not None
    line = process.stdout.readline()
    match = READY.fullmatch(line)
    assert match is not None, (line, process.poll())
    return match[1]


def end(process: Process, number: int = signal.SIGTERM) -> tuple[int, str, str]:
    process.send_signal(number)
    out, err = process.communicate(timeout=PATIENCE)
    return process.returncode, out, err


def failed(process: Process) -> tuple[int, str]:
    out, err = process.communicate(timeout=PATIENCE)
    assert out == ""
    return process.returncode, err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_says_where_it_is_serves_and_ends_cleanly(start: Start, dial: Dial, number: int) -> None:
    process = start("--bind", LOOPBACK)
    address = ready(process)
    assert not address.endswith(":0")
    peer = dial(address)
    peer.register("w", 1)
    code, out, err = end(process, number)
    assert (code, out) == (0, "")
    assert "peer 'w'" in err
    assert "Traceback" not in err


def test_a_line_is_printed_for_each_endpoint(start: Start, tmp_path: Path, dial: Dial) -> None:
    process = start("--bind", LOOPBACK, "--bind", f"ipc://{tmp_path}/b")
    for number, address in enumerate((ready(process), ready(process))):
        dial(address).register(f"w{number}", number + 1)
    assert end(process)[0] == 0
    assert not (tmp_path / "b").exists()


def test_options_come_from_the_environment_too(start: Start, tmp_path: Path, dial: Dial) -> None:
    process = start(
        TENSORPLAY_BIND=f"{LOOPBACK} ipc://{tmp_path}/b",
        TENSORPLAY_HEARTBEAT_INTERVAL="0.5",
        TENSORPLAY_HEARTBEAT_TIMEOUT="7",
        TENSORPLAY_MAX_MESSAGE_BYTES="1000",
        TENSORPLAY_QUEUE_BYTES="2000",
        TENSORPLAY_MAX_PEERS="3",
        TENSORPLAY_LOG_LEVEL="info",
        TENSORPLAY_LOG_JSON="1",
    )
    assert ready(process).startswith("tcp://")
    address = ready(process)
    assert address == f"ipc://{tmp_path}/b"
    welcome = dial(address).register("w", 1)
    assert (welcome.heartbeat_interval, welcome.heartbeat_timeout) == (0.5, 7.0)
    assert welcome.max_message_bytes == 1000
    config = dial(address).status()["config"]
    assert (config["queue_bytes"], config["max_peers"]) == (2000, 3)
    _, _, err = end(process)
    lines = [json.loads(line) for line in err.splitlines()]
    assert {"time", "level", "logger", "process", "message"} <= lines[0].keys()
    assert any("'w'" in line["message"] for line in lines)


def test_options_come_before_the_environment(start: Start) -> None:
    process = start("--bind", LOOPBACK, "--log-level", "error", TENSORPLAY_BIND="tcp://*:1")
    ready(process)
    assert end(process) == (0, "", "")


def test_an_address_in_use_is_a_failure_that_says_so(start: Start) -> None:
    with Broker(BrokerConfig(bind=(LOOPBACK,))) as broker:
        code, err = failed(start("--bind", broker.address))
    assert code == 1
    assert f"cannot listen at {broker.address}: Address already in use" in err
    assert "Traceback" not in err


def test_an_address_that_others_reach_needs_insecure(start: Start) -> None:
    code, err = failed(start("--bind", "tcp://0.0.0.0:0"))
    assert code == 2
    assert "--insecure" in err
    process = start("--bind", "tcp://0.0.0.0:0", "--insecure")
    assert ready(process).startswith("tcp://0.0.0.0:")
    code, _, err = end(process)
    assert code == 0
    assert "WARNING" in err
    assert "run code" in err


@pytest.mark.parametrize(
    "arguments",
    [
        ("--heartbeat-interval", "0"),
        ("--heartbeat-timeout", "0.5"),
        ("--bind", "nonsense"),
        ("--max-peers", "many"),
        ("--no-such-option",),
        ("argument",),
    ],
)
def test_wrong_usage_has_its_own_exit_code(start: Start, arguments: tuple[str, ...]) -> None:
    code, err = failed(start(*arguments))
    assert code == 2
    assert "Error:" in err


def test_a_second_signal_ends_it_at_once(start: Start) -> None:
    process = start("--bind", LOOPBACK)
    ready(process)
    process.send_signal(signal.SIGSTOP)  # so that both are there when it goes on
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGCONT)
    assert process.wait(PATIENCE) in (128 + signal.SIGINT, 128 + signal.SIGTERM)


def test_it_ends_with_its_parent_once_its_peers_have_left(start: Start, dial: Dial) -> None:
    process = start("--bind", LOOPBACK, "--exit-with-parent")
    peer = dial(ready(process))
    peer.register("w", 1)
    process.send_signal(signal.SIGINT)  # is the parent's business
    assert process.stdin is not None
    process.stdin.close()
    peer.status()
    assert process.poll() is None
    left_at = time.monotonic()
    peer.leave()
    peer.expect(Farewell)
    assert process.wait(PATIENCE) == 0
    assert time.monotonic() - left_at < 1.0


def test_it_starts_fast_and_small(start: Start) -> None:
    begin = time.monotonic()
    process = start("--bind", LOOPBACK)
    ready(process)
    took = time.monotonic() - begin
    text = Path(f"/proc/{process.pid}/statm").read_text()
    resident = int(text.split()[1]) * resource.getpagesize()
    assert resident < 60 << 20
    assert took < 2.0  # about 0.15 s on an idle machine


def test_help_names_every_option_and_variable() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "tensorplay.broker", "--help"],
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE,
    )
    actions = {"--check", "--help", "--version"}
    options = set(re.findall(r"--[a-z-]+", result.stdout)) - actions
    variables = set(re.findall(r"TENSORPLAY_[A-Z_]+", result.stdout))
    assert {"TENSORPLAY_" + option[2:].replace("-", "_").upper() for option in options} == (
        variables
    )


def test_the_broker_never_imports_torch_numpy_or_a_pickler() -> None:
    code = (
        "import sys, tensorplay.broker, tensorplay.broker.cli, tensorplay.broker.server;"
        "tensorplay.broker.Broker, tensorplay.broker.BrokerConfig;"
        "print([name for name in ('torch', 'numpy', 'cloudpickle') if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30
    )
    assert result.stdout == "[]\n"


def test_the_folder_is_no_package_of_another_name() -> None:
    repository = Path(__file__).parents[2]
    result = subprocess.run(
        [sys.executable, "-c", "import broker"],
        cwd=repository,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert result.returncode == 1
    assert "ImportError: this package is tensorplay.broker" in result.stderr
