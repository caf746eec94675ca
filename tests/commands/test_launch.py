"""``tensorplay launch --local N``, as a process with children."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator

import psutil
import pytest
from click.testing import CliRunner

from tensorplay.cli import main
from tensorplay.distributed import rpc
from tests.following import PATIENCE, Follower

Launch = Callable[..., Follower]

PROGRAM = "from tensorplay.cli import main; main()"
READY = "tensorplay broker and 2 workers ready at "


@pytest.fixture
def launch() -> Iterator[Launch]:
    """Starts two workers, and checks that nothing of them is left in the end."""
    followers: list[Follower] = []
    children: list[psutil.Process] = []

    def start(*arguments: str) -> Follower:
        command = [sys.executable, "-c", PROGRAM, "launch", "--local", "2", *arguments]
        followers.append(Follower(command))
        return followers[-1]

    yield start
    for follower in followers:
        children += psutil.Process(follower.pid).children(recursive=True) if follower.runs else []
        follower.close()
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive


def address(launched: Follower) -> str:
    return launched.expect(READY).removeprefix(READY).strip()


def children(launched: Follower) -> list[psutil.Process]:
    found: list[psutil.Process] = psutil.Process(launched.pid).children(recursive=True)
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_runs_until_it_is_told_to_end(launch: Launch, number: int) -> None:
    launched = launch()
    rpc.init_rpc("client", broker=address(launched))
    try:
        assert [peer.name for peer in rpc.list_workers() if peer.id >= 0] == ["worker0", "worker1"]
        assert rpc.rpc_sync("worker1", pow, (2, 5)) == 32
    finally:
        rpc.shutdown(graceful=False)
    started = children(launched)
    assert len(started) >= 3
    launched.signal(number)
    assert launched.end() == 0
    _, alive = psutil.wait_procs(started, timeout=20)
    assert not alive


def test_all_end_with_it_even_if_it_is_killed(launch: Launch) -> None:
    launched = launch()
    address(launched)
    started = children(launched)
    launched.signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(started, timeout=20)
    assert not alive


def test_it_ends_with_a_worker_and_says_which(launch: Launch) -> None:
    launched = launch("--log-level", "info")
    rpc.init_rpc("client", broker=address(launched))
    try:
        pid = next(peer.pid for peer in rpc.list_workers() if peer.name == "worker1")
    finally:
        rpc.shutdown(graceful=False)
    psutil.Process(pid).kill()
    assert launched.end() == 1
    assert "worker1 ended by itself, with exit code -9" in launched.output


CALL = """
import os, sys
from tensorplay.distributed import rpc
rpc.init_rpc("client")  # the address comes from the environment
print(rpc.rpc_sync("worker1", pow, (2, 5)), sys.argv[1:])
rpc.shutdown(graceful=False)
sys.exit(3)
"""


def test_a_command_finds_the_broker_and_its_exit_code_is_passed_on(launch: Launch) -> None:
    launched = launch("--", sys.executable, "-c", CALL, "--local", "an argument")
    assert launched.end() == 3
    assert "32 ['--local', 'an argument']" in launched.output
    assert "ready at" not in launched.output


def test_a_command_that_is_not_there(launch: Launch) -> None:
    launched = launch("--", "no-such-command")
    assert launched.end(PATIENCE) == 1
    assert "'no-such-command' cannot be run" in launched.output


def test_an_address_that_others_can_reach_is_refused(launch: Launch) -> None:
    launched = launch("--bind", "tcp://0.0.0.0:0")
    assert launched.end(PATIENCE) == 1
    assert "can be reached from other hosts" in launched.output


@pytest.mark.parametrize("arguments", [[], ["--local", "0"], ["--local", "many"]])
def test_wrong_usage(arguments: list[str]) -> None:
    result = CliRunner().invoke(main, ["launch", *arguments])
    assert result.exit_code == 2
    assert "--local" in result.output
