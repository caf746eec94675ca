"""Clients that are told to end, are interrupted, or just end; and what their peers see of it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tensorplay.cluster import LocalCluster
from tensorplay.distributed import rpc
from tensorplay.errors import ConfigError, WorkerLostError
from tensorplay.protocol.messages import Departure
from tests.rpc import helpers
from tests.rpc.rref_helpers import wait_until

pytestmark = pytest.mark.timeout(90)

PATIENCE = 30.0
#: What an end without anything to wait for takes at most, on a busy machine.
SOON = 10.0

START = """
import atexit, signal, sys, threading, time
from tensorplay.distributed import rpc
from tests.rpc import helpers

def start(**options):
    rpc.init_rpc(
        sys.argv[2], broker=sys.argv[1], rpc_backend_options=rpc.BrokerRpcBackendOptions(**options)
    )
    print("ready", flush=True)

def call(name):
    future = rpc.rpc_async("worker0", helpers.begin_and_wait, (name,), timeout=0)
    rpc.rpc_sync("worker0", helpers.wait_event, (f"{name} has begun",))
    return future
"""

Run = Callable[..., subprocess.Popen[str]]


class Watch:
    """Notes how peers leave."""

    def __init__(self) -> None:
        self.left: dict[str, Departure] = {}
        rpc._get_current_rpc_agent().on_peer_left(self._note)

    def _note(self, departure: Departure) -> None:
        self.left[departure.peer.name] = departure

    def child(self, name: str = "child") -> Departure:
        wait_until(lambda: name in self.left, "the child's departure")
        return self.left[name]


@pytest.fixture
def cluster(own_cluster: Callable[..., LocalCluster]) -> Iterator[LocalCluster]:
    running = own_cluster(workers=1)
    yield running
    if "worker0" in running.workers:  # which else finishes its calls first
        rpc.rpc_sync("worker0", helpers.set_event, ("endless",))


@pytest.fixture
def watch(cluster: LocalCluster) -> Watch:
    return Watch()


@pytest.fixture
def run(cluster: LocalCluster) -> Iterator[Run]:
    """Runs a script as a client, and returns it once it says that it is ready."""
    with ExitStack() as stack:

        def start(code: str, name: str = "child", *, wait: bool = True) -> subprocess.Popen[str]:
            child = subprocess.Popen(
                [sys.executable, "-c", START + code, cluster.address, name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(child)
            stack.callback(child.kill)
            if wait:
                said(child, "ready")
            return child

        yield start


def said(child: subprocess.Popen[str], line: str) -> None:
    """Waits for a line of a child's output."""
    assert child.stdout is not None
    if child.stdout.readline() != f"{line}\n":
        raise AssertionError(ended(child))


def ended(child: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Waits for the end of a child and returns its exit code and the rest of what it said."""
    assert child.stdout is not None
    assert child.stderr is not None
    # Not by communicate(), which knows nothing of what readline() has read ahead.
    out, err = child.stdout.read(), child.stderr.read()
    return child.wait(PATIENCE), out, err


def begun(name: str) -> None:
    assert rpc.rpc_sync("worker0", helpers.wait_event, (f"{name} has begun",))


# SIGTERM.


def test_sigterm_lets_calls_finish_and_leaves_cleanly(run: Run, watch: Watch) -> None:
    child = run(
        """
start()
future = call("finish")
future.add_done_callback(lambda done: print("answered", done.value(), flush=True))
try:
    rpc.rpc_sync("worker0", helpers.begin_and_wait, ("interrupted",), timeout=0)
finally:
    print("unwound", flush=True)
"""
    )
    begun("interrupted")
    child.send_signal(signal.SIGTERM)
    said(child, "unwound")
    rpc.rpc_sync("worker0", helpers.set_event, ("finish",))
    assert ended(child) == (128 + signal.SIGTERM, "answered True\n", "")
    assert watch.child().clean
    assert watch.child().reason == "its process ended"


def test_calls_that_do_not_finish_hold_it_up_no_longer_than_the_limit(
    run: Run, watch: Watch
) -> None:
    child = run('start(drain_timeout=0.5)\nfuture = call("endless")\ntime.sleep(60)')
    begun("endless")
    start = time.monotonic()
    child.send_signal(signal.SIGTERM)
    code, _, err = ended(child)
    assert code == 128 + signal.SIGTERM
    assert 0.5 <= time.monotonic() - start < SOON
    assert "left with calls under way after 0.5 s" in err
    assert watch.child().clean


def test_the_limit_holds_for_a_shutdown_on_the_way_out(run: Run, watch: Watch) -> None:
    child = run(
        """
start(drain_timeout=0.5)
future = call("endless")
try:
    print("waits", flush=True)
    time.sleep(60)
finally:
    rpc.shutdown()
    print("shut down")
"""
    )
    said(child, "waits")
    child.send_signal(signal.SIGTERM)
    code, out, _ = ended(child)
    assert (code, out) == (128 + signal.SIGTERM, "shut down\n")
    assert watch.child().clean


def test_a_second_sigterm_ends_it_at_once(run: Run) -> None:
    child = run(
        """
start(drain_timeout=60)
future = call("endless")
try:
    print("waits", flush=True)
    time.sleep(60)
finally:
    print("unwound", flush=True)
"""
    )
    said(child, "waits")
    child.send_signal(signal.SIGTERM)
    said(child, "unwound")
    start = time.monotonic()
    child.send_signal(signal.SIGTERM)
    assert ended(child)[0] == -signal.SIGTERM
    assert time.monotonic() - start < SOON


def test_a_client_that_is_called_finishes_what_runs_there(run: Run) -> None:
    child = run("start()\ntime.sleep(60)")
    rpc.wait_for_workers(["child"], PATIENCE)
    future = rpc.rpc_async("child", helpers.begin_and_wait, ("served",), timeout=0)
    assert rpc.rpc_sync("child", helpers.wait_event, ("served has begun",))
    child.send_signal(signal.SIGTERM)
    rpc.rpc_sync("child", helpers.set_event, ("served",))
    assert future.wait()
    assert ended(child)[0] == 128 + signal.SIGTERM


def test_the_signal_is_left_alone(run: Run) -> None:
    cases = {
        "switched-off": ("start(drain_timeout=None)", -signal.SIGTERM),
        "after-shutdown": ("start()\nrpc.shutdown()", -signal.SIGTERM),
        "its-own": ("signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\nstart()", 7),
    }
    children = {
        name: run(f"{code}\nprint('waits', flush=True)\ntime.sleep(60)", name, wait=False)
        for name, (code, _) in cases.items()
    }
    for name, child in children.items():
        said(child, "ready")
        said(child, "waits")
        child.send_signal(signal.SIGTERM)
        assert ended(child)[0] == cases[name][1], name


def test_a_process_that_it_forks_ends_as_ever(run: Run) -> None:
    child = run(
        """
import multiprocessing
start()
context = multiprocessing.get_context("fork")
runs = context.Event()

def sleep():
    runs.set()
    time.sleep(60)

forked = context.Process(target=sleep)
forked.start()
runs.wait()
forked.terminate()
forked.join()
print(forked.exitcode)
"""
    )
    assert ended(child)[:2] == (0, f"{-signal.SIGTERM}\n")


@pytest.mark.parametrize("wrong", [-1.0, float("nan")])
def test_a_limit_that_cannot_be(wrong: float) -> None:
    with pytest.raises(ConfigError, match="drain_timeout"):
        rpc.BrokerRpcBackendOptions(drain_timeout=wrong)


# The interpreter's exit.


def test_an_exit_without_shutdown_does_not_hang(run: Run, watch: Watch) -> None:
    thread = "waits = threading.Thread(target=call('endless').wait, daemon=True)\nwaits.start()"
    cases = {
        "idle": ("", 0),
        "a-call": ("future = call('endless')", 0),
        "a-callback": ("future = call('endless')\nfuture.then(lambda done: done.wait())", 0),
        "sys-exit": ("future = call('endless')\nsys.exit(3)", 3),
        "an-exception": ("future = call('endless')\nraise LookupError", 1),
        "a-reference": ("kept = [rpc.remote('worker0', helpers.Waiter)]", 0),
        "a-thread": (thread, 0),
    }
    children = {
        name: run(f"start()\nsys.stdin.readline()\n{code}", name, wait=False)
        for name, (code, _) in cases.items()
    }
    for child in children.values():
        said(child, "ready")
    for name, child in children.items():
        start = time.monotonic()
        assert child.stdin is not None
        child.stdin.write("\n")
        child.stdin.flush()
        code, _, err = ended(child)
        assert code == cases[name][1], f"{name}: {err}"
        assert time.monotonic() - start < SOON, name
        assert watch.child(name).clean, name


def test_an_exit_in_the_middle_of_others_calls_fails_those_and_no_more(
    run: Run, watch: Watch
) -> None:
    child = run("start()\nsys.stdin.readline()\nsys.exit(4)")
    rpc.wait_for_workers(["child"], PATIENCE)
    future = rpc.rpc_async("child", helpers.begin_and_wait, ("left alone",), timeout=0)
    other = rpc.rpc_async("worker0", helpers.begin_and_wait, ("goes on",), timeout=0)
    assert rpc.rpc_sync("child", helpers.wait_event, ("left alone has begun",))
    assert child.stdin is not None
    child.stdin.write("\n")
    child.stdin.flush()
    with pytest.raises(WorkerLostError, match=r"begin_and_wait.*its process ended"):
        future.wait(PATIENCE)
    assert watch.child().clean
    assert ended(child)[0] == 4
    begun("goes on")
    rpc.rpc_sync("worker0", helpers.set_event, ("goes on",))
    assert other.wait()


def test_a_client_that_leaves_frees_its_modules_and_the_worker_says_so(
    run: Run, watch: Watch
) -> None:
    child = run(
        """
start()
import torch
from tensorplay.distributed.nn import RemoteModule
kept = [RemoteModule("worker0", torch.nn.Linear, (2, 2)) for _ in range(3)]
print("made", flush=True)
time.sleep(60)
"""
    )
    said(child, "made")
    assert rpc.rpc_sync("worker0", helpers.counts)["rrefs_owned"] == 3
    rpc.rpc_sync("worker0", helpers.keep_log)
    child.kill()
    assert not watch.child().clean
    wait_until(
        lambda: rpc.rpc_sync("worker0", helpers.counts)["rrefs_owned"] == 0, "the modules' end"
    )
    (line,) = rpc.rpc_sync("worker0", helpers.kept_log)
    assert "freed 3 objects" in line
    assert "'child'" in line


def test_an_exit_when_the_worker_is_dead(run: Run, cluster: LocalCluster) -> None:
    child = run("start()\nfuture = call('endless')\nsys.stdin.readline()")
    begun("endless")
    cluster.kill("worker0")
    cluster.wait_ended("worker0")
    start = time.monotonic()
    assert child.communicate("\n", timeout=PATIENCE)
    assert child.returncode == 0
    assert time.monotonic() - start < SOON


def test_an_exit_when_the_broker_is_dead() -> None:
    broker = subprocess.Popen(
        [sys.executable, "-m", "tensorplay.broker", "--bind", "tcp://127.0.0.1:0"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert broker.stdout is not None
    address = broker.stdout.readline().split()[-1]
    code = START + "start()\nfuture = rpc.rpc_async('child', time.sleep, (60,))\ninput()"
    child = subprocess.Popen(
        [sys.executable, "-c", code, address, "child"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        broker.kill()
        broker.wait(PATIENCE)
        start = time.monotonic()
        child.communicate("\n", timeout=PATIENCE)
        assert child.returncode == 0
        assert time.monotonic() - start < SOON
    finally:
        for process in (child, broker):
            process.kill()
            process.wait(PATIENCE)
        broker.stdout.close()


# Ctrl-C.


def test_an_interrupted_call_leaves_the_agent_usable(run: Run) -> None:
    child = run(
        """
start()
from tensorplay.distributed.nn import RemoteModule
handle = RemoteModule("worker0", helpers.WaitingModule)
rref = rpc.remote("worker0", helpers.Waiter)
uses = {
    "call": lambda: rpc.rpc_sync("worker0", helpers.begin_and_wait, ("call",), timeout=0),
    "handle": lambda: handle("handle"),
    "future": lambda: rpc.rpc_async("worker0", helpers.begin_and_wait, ("future",)).wait(),
    "reference": lambda: rpc.remote("worker0", helpers.begin_and_wait, ("reference",)).to_here(),
}
for name, use in uses.items():
    try:
        use()
    except KeyboardInterrupt:
        print("interrupted", name, rpc.rpc_sync("worker0", helpers.add, (1, 2)), flush=True)
print(rpc._get_current_rpc_agent().stats()["calls_in_flight"])
rpc.rpc_sync("worker0", helpers.set_event, ("reference",))
rpc.rpc_sync("worker0", helpers.set_event, ("future",))
rpc.shutdown()
"""
    )
    assert child.stdout is not None
    for name in ("call", "handle", "future", "reference"):
        begun(name)
        child.send_signal(signal.SIGINT)
        assert child.stdout.readline() == f"interrupted {name} 3\n"
    code, out, err = ended(child)
    assert (code, err) == (0, "")
    # Others could have the future and the reference: those calls go on, the first two do not.
    assert int(out) <= 3
