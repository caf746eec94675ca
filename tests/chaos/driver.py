"""Runs a system of real processes, breaks it as a seed decides, and collects what happened."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

import msgspec
import psutil

from tensorplay.distributed import rpc
from tests.chaos import peers, tasks
from tests.chaos.judge import RECOVERY
from tests.chaos.proxy import Network
from tests.chaos.records import Call, Fault, calls

HEARTBEAT_INTERVAL = 0.5
HEARTBEAT_TIMEOUT = 2.0
#: Seconds that the system has to be whole again after the last fault.
PATIENCE = 60.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run is to be.

    Attributes:
        faults: How many things are broken.
        seed: Decides what, when and for how long.
        workers: How many workers.
        clients: How many clients.
        pace: Seconds from one fault to the next, on average.
    """

    faults: int = 30
    seed: int = 0
    workers: int = 3
    clients: int = 2
    pace: float = 0.35


@dataclass
class Result:
    """What happened.

    Attributes:
        seconds: How long the run took.
        faults: What was broken.
        calls: What was called.
        executed: How often each call ran.
        complaints: What went wrong besides calls: processes that ended, things left behind.
        peaks: Most memory that the broker had, in MiB, by name.
    """

    seconds: float = 0.0
    faults: list[Fault] = field(default_factory=list)
    calls: dict[str, Call] = field(default_factory=dict)
    executed: dict[str, int] = field(default_factory=dict)
    complaints: list[str] = field(default_factory=list)
    peaks: dict[str, float] = field(default_factory=dict)


class Driver:
    """Runs a plan.

    Args:
        plan: What is to be done.
        folder: Where the processes leave their records and logs.
    """

    def __init__(self, plan: Plan, folder: Path) -> None:
        self._plan = plan
        self._folder = folder
        self._random = random.Random(plan.seed)
        self._workers = [f"w{number}" for number in range(plan.workers)]
        self._clients = [f"c{number}" for number in range(plan.clients)]
        self._fork = multiprocessing.get_context("forkserver")
        self._fork.set_forkserver_preload(["tests.chaos.peers"])
        self._port = _free_port()
        self._processes: dict[str, BaseProcess] = {}
        self._broker: subprocess.Popen[bytes] | None = None
        self._starts = 0
        self._mending: list[tuple[float, Callable[[], None], Fault]] = []
        self._broken: set[str] = set()
        self.result = Result()

    def run(self, on_fault: Callable[[int], None] = lambda count: None) -> Result:
        """Runs the plan and returns what happened.

        Args:
            on_fault: Told how many faults there have been so far.
        """
        began = time.monotonic()
        with ExitStack() as stack:
            names = [*self._workers, *self._clients, "auditor"]
            self._network = stack.enter_context(Network(self._port, names, self._plan.seed))
            stack.callback(self._end_all)
            self._start_broker()
            for name in (*self._workers, *self._clients):
                self._start(name)
            while len(self.result.faults) < self._plan.faults:
                self._pass_time(self._random.expovariate(1.0 / self._plan.pace))
                self._break()
                on_fault(len(self.result.faults))
            while self._mending:
                self._pass_time(0.1)
            self._pass_time(RECOVERY)
            self._finish()
        (self._folder / "faults").write_bytes(msgspec.json.encode(self.result.faults))
        self.result.seconds = time.monotonic() - began
        self.result.calls = calls(self._folder)
        self.result.executed = tasks.executed(self._folder)
        return self.result

    # Breaking.

    def _break(self) -> None:
        target, kind, seconds = self._choose()
        fault = Fault(kind, target, time.monotonic())
        mend = getattr(self, f"_{kind}")(target)
        self.result.faults.append(fault)
        self._broken.add(target)
        self._mending.append((fault.start + seconds, mend, fault))

    def _choose(self) -> tuple[str, str, float]:
        """Returns what is broken next, how, and for how many seconds."""
        draw = self._random
        whole = [n for n in (*self._workers, *self._clients, "broker") if n not in self._broken]
        while not whole:
            self._pass_time(0.05)
            whole = [n for n in (*self._workers, *self._clients) if n not in self._broken]
        target = draw.choice(whole)
        if target == "broker":
            kind = draw.choice(["kill", "kill", "stop"])
            return target, kind, draw.uniform(0.05, 1.5)
        kinds = ["kill", "stop", "cut", "cut", "silence", "delay", "fragment"]
        if target in self._workers:
            kinds.append("terminate")
        kind = draw.choice(kinds)
        if kind in ("kill", "terminate"):
            return target, kind, draw.uniform(0.0, 1.0)
        if kind in ("stop", "cut", "silence"):  # some for longer than the heartbeat time-out
            longest = 2 * HEARTBEAT_TIMEOUT if draw.random() < 0.3 else 0.5 * HEARTBEAT_TIMEOUT
            return target, kind, draw.uniform(0.05, longest)
        return target, kind, draw.uniform(0.5, 2.0)

    def _kill(self, target: str) -> Callable[[], None]:
        if target == "broker":
            assert self._broker is not None
            self._broker.kill()
            self._broker.wait()
            return self._start_broker
        process = self._processes[target]
        process.kill()
        process.join()
        return lambda: self._start(target)

    def _terminate(self, target: str) -> Callable[[], None]:
        process = self._processes[target]
        process.terminate()

        def restart() -> None:
            process.join(PATIENCE)
            # One that has hardly begun has no handler yet.
            if process.exitcode not in (0, -signal.SIGTERM):
                self.result.complaints.append(
                    f"{target} ended with {process.exitcode} when told to by SIGTERM"
                )
                process.kill()
                process.join()
            self._start(target)

        return restart

    def _stop(self, target: str) -> Callable[[], None]:
        pid = self._broker.pid if target == "broker" and self._broker else self._pid(target)
        os.kill(pid, signal.SIGSTOP)
        return lambda: os.kill(pid, signal.SIGCONT)

    def _cut(self, target: str) -> Callable[[], None]:
        return self._set_link(target, whole=False)

    def _silence(self, target: str) -> Callable[[], None]:
        return self._set_link(target, silent=True)

    def _delay(self, target: str) -> Callable[[], None]:
        return self._set_link(target, delay=self._random.uniform(0.005, 0.1))

    def _fragment(self, target: str) -> Callable[[], None]:
        return self._set_link(target, piece=self._random.choice([1, 10, 100, 1000]))

    def _set_link(self, target: str, **state: object) -> Callable[[], None]:
        self._network.set(target, **state)
        return lambda: self._network.set(target)

    def _pass_time(self, seconds: float) -> None:
        """Waits, and mends what is due meanwhile."""
        until = time.monotonic() + seconds
        while True:
            now = time.monotonic()
            for entry in [entry for entry in self._mending if entry[0] <= now]:
                _, mend, fault = entry
                self._mending.remove(entry)
                mend()
                fault.end = time.monotonic()
                self._broken.discard(fault.target)
            self._look()
            if now >= until:
                return
            due = min((entry[0] for entry in self._mending), default=until)
            time.sleep(max(0.0, min(until, due, now + 0.1) - now))

    def _look(self) -> None:
        """Notes processes that ended by themselves, and the broker's memory."""
        for name, process in self._processes.items():
            if not process.is_alive() and name not in self._broken:
                self.result.complaints.append(f"{name} ended by itself with {process.exitcode}")
                self._start(name)
        if self._broker is None:
            return
        if self._broker.poll() is None:
            with suppress(psutil.Error):
                memory = psutil.Process(self._broker.pid).memory_info().rss / 2**20
                peak = max(memory, self.result.peaks.get("broker", 0.0))
                self.result.peaks["broker"] = peak
        elif "broker" not in self._broken:
            self.result.complaints.append(
                f"the broker ended by itself with {self._broker.returncode}"
            )
            self._start_broker()

    # Processes.

    def _start(self, name: str) -> None:
        address = self._network.address(name)
        self._starts += 1
        process: BaseProcess
        if name in self._workers:
            arguments = (name, self._workers.index(name), address, self._folder)
            process = self._fork.Process(target=peers.work, args=arguments, daemon=True)
        else:
            seed = self._plan.seed * 1_000_003 + self._starts * 101
            process = self._fork.Process(
                target=peers.call,
                args=(name, address, self._workers, self._folder, seed),
                daemon=True,
            )
        process.start()
        self._processes[name] = process

    def _pid(self, name: str) -> int:
        pid = self._processes[name].pid
        assert pid is not None
        return pid

    def _start_broker(self) -> None:
        log = os.open(self._folder / "log-broker", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._broker = subprocess.Popen(
            [
                *(sys.executable, "-m", "tensorplay.broker"),
                *("--bind", f"tcp://127.0.0.1:{self._port}", "--log-level", "warning"),
                *("--heartbeat-interval", str(HEARTBEAT_INTERVAL)),
                *("--heartbeat-timeout", str(HEARTBEAT_TIMEOUT)),
            ],
            stdout=log,
            stderr=log,
        )
        os.close(log)

    # Ending.

    def _finish(self) -> None:
        """Has the clients end, and looks at what is left of them."""
        for client in self._clients:
            self._processes[client].terminate()
        deadline = time.monotonic() + PATIENCE
        for client in self._clients:
            process = self._processes[client]
            process.join(max(0.0, deadline - time.monotonic()))
            if process.exitcode != 0:
                self.result.complaints.append(
                    f"{client} ended with {process.exitcode}, not with success, when all was mended"
                )
        self._audit()

    def _audit(self) -> None:
        """Checks that the workers hold nothing for the clients that are gone."""
        try:
            rpc.init_rpc("auditor", broker=self._network.address("auditor"))
            rpc.wait_for_workers(self._workers, timeout=PATIENCE)
            deadline = time.monotonic() + PATIENCE
            for worker in self._workers:
                while True:
                    left = _left_behind(rpc.rpc_sync(worker, tasks.stats, timeout=PATIENCE))
                    if not left or time.monotonic() > deadline:
                        break
                    time.sleep(0.1)
                if left:
                    self.result.complaints.append(f"{worker} still has {left}")
        except Exception as error:
            self.result.complaints.append(f"the audit failed: {error!r}")
        finally:
            if rpc._is_current_rpc_agent_set():
                rpc.shutdown(graceful=False)

    def _end_all(self) -> None:
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.join()
        if self._broker is not None:
            self._broker.kill()
            self._broker.wait()


def _left_behind(stats: dict[str, float]) -> dict[str, float]:
    """Returns the counts that ought to be zero; the call that asks is one in progress."""
    wanted = ("calls_in_flight", "rrefs_owned", "rrefs_used", "graphs", "autograd_contexts")
    left = {name: stats[name] for name in wanted if stats.get(name)}
    if stats["requests_in_progress"] > 1:
        left["requests_in_progress"] = stats["requests_in_progress"]
    return left


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
