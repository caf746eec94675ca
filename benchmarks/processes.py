"""The processes of one group, and the pipes to them."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from signal import SIGCONT, SIGSTOP, Signals
from types import TracebackType
from typing import Any

import psutil

from benchmarks.systems.base import PeerSpec, Shape, join, launch
from benchmarks.tasks import TASKS, Numbers

#: Seconds that the processes of a group have to come up, and to leave.
START_SECONDS = 120.0
END_SECONDS = 15.0

# At their end torch's peers each warn that the others have gone.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
# Forked from one server that has imported torch: a group of 25 is there within seconds.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["benchmarks.preload"])


class MeasurementError(Exception):
    """A task failed in its client; the text is the client's traceback."""


class UnsupportedError(MeasurementError):
    """The system cannot do what the task asks."""


class Group:
    """The running processes of one system; a context manager that ends them.

    Args:
        system: The module of ``benchmarks.systems`` that implements it.
        shape: How many clients and workers.
        options: What the launcher is given.
        environment: Variables for the peers.
        threads: Threads for torch's operators in each peer.
    """

    def __init__(
        self,
        system: str,
        shape: Shape,
        *,
        options: Mapping[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
        threads: int = 1,
    ) -> None:
        self.shape = shape
        self._ends = ExitStack()
        self._pipes: dict[int, Connection] = {}
        self._peers: dict[int, int] = {}
        self._stopped = False
        self._launcher = launch(system, options or {})
        self._ends.callback(self._launcher.close)
        variables = {**self._launcher.environment, **(environment or {})}
        first = 0 if self._launcher.starts_workers else shape.workers
        try:
            for index in range(first, shape.workers + shape.clients):
                self._start(
                    PeerSpec(system, shape, index, self._launcher.address, variables, threads)
                )
            for index in self._pipes:
                self._answer(index, START_SECONDS)
        except BaseException:
            self.close()
            raise
        self._members = self._find_members()

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def start(self, client: int, task: str, seconds: float, arguments: Mapping[str, Any]) -> None:
        """Has a client start with a task; ``finish`` waits for it."""
        self._pipes[self.shape.workers + client].send((task, seconds, dict(arguments)))

    def finish(self, client: int, timeout: float = 120.0) -> Numbers:
        """Waits for the numbers of a client's task.

        Raises:
            MeasurementError: If the task failed or does not end in time.
            UnsupportedError: If the system cannot do it.
        """
        numbers: Numbers = self._answer(self.shape.workers + client, timeout)
        return numbers

    def pause(self) -> None:
        """Stops the processes of a system that would be busy while it is idle."""
        if self._launcher.stops_when_idle and not self._stopped:
            self._signal(SIGSTOP)
            self._stopped = True

    def resume(self) -> None:
        """Lets stopped processes go on."""
        if self._stopped:
            self._signal(SIGCONT)
            self._stopped = False

    @property
    def broker_pid(self) -> int:
        """Process id of the broker.

        Raises:
            ValueError: If the group has none.
        """
        if self._launcher.broker_pid is None:
            raise ValueError("this system has no broker")
        return self._launcher.broker_pid

    @property
    def has_broker(self) -> bool:
        """Whether the group has a broker."""
        return self._launcher.broker_pid is not None

    def cpu_seconds(self) -> float:
        """Returns the processor time that the group has used so far."""
        return sum(map(_cpu_seconds, self._members))

    def broker_seconds(self) -> float:
        """Returns the processor time of the broker, or 0 without one; exact to microseconds."""
        pid = self._launcher.broker_pid
        return 0.0 if pid is None else precise_cpu_seconds(pid)

    def worker_seconds(self) -> float:
        """Returns the processor time of the first worker, or 0 if it is not the harness's."""
        pid = self._peers.get(0)
        return 0.0 if pid is None else precise_cpu_seconds(pid)

    def memory(self) -> Numbers:
        """Returns the bytes that broker, first worker and first client hold on their own."""
        pids = {
            "broker": self._launcher.broker_pid,
            "worker": self._peers.get(0) if self._launcher.starts_workers else None,
            "client": self._peers.get(self.shape.workers),
        }
        return {
            role: float(psutil.Process(pid).memory_full_info().uss)
            for role, pid in pids.items()
            if pid is not None
        }

    def close(self) -> None:
        """Ends the group: clients first, and kills what does not end."""
        self.resume()
        for index in reversed(self._pipes):
            with suppress(OSError):
                self._pipes[index].send(None)
        self._ends.close()

    def _start(self, spec: PeerSpec) -> None:
        ours, theirs = _context.Pipe()
        process = _context.Process(target=_peer_main, args=(spec, theirs), daemon=True)
        process.start()
        theirs.close()

        def end() -> None:
            process.join(END_SECONDS)
            if process.is_alive():
                process.kill()
                process.join()
            ours.close()

        self._ends.callback(end)
        assert process.pid is not None
        self._pipes[spec.index], self._peers[spec.index] = ours, process.pid

    def _answer(self, index: int, timeout: float) -> Any:
        pipe = self._pipes[index]
        if not pipe.poll(timeout):
            raise MeasurementError(f"peer {index} has not answered within {timeout:.0f} s")
        try:
            kind, value = pipe.recv()
        except EOFError:
            raise MeasurementError(f"the process of peer {index} has ended") from None
        if kind == "unsupported":
            raise UnsupportedError(value)
        if kind == "error":
            raise MeasurementError(value)
        return value

    def _signal(self, number: Signals) -> None:
        for pid in self._peers.values():
            os.kill(pid, number)

    def _find_members(self) -> list[psutil.Process]:
        pids = [*self._peers.values()]
        if self._launcher.broker_pid is not None:
            pids.append(self._launcher.broker_pid)
        processes = [psutil.Process(pid) for pid in pids]
        return processes + [
            child for process in processes for child in process.children(recursive=True)
        ]


def _cpu_seconds(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


def precise_cpu_seconds(pid: int) -> float:
    """Returns the processor time of a process, from the scheduler where the kernel tells it."""
    nanoseconds = 0
    try:
        for task in os.scandir(f"/proc/{pid}/task"):
            with open(f"{task.path}/schedstat", encoding="ascii") as file:  # noqa: PTH123
                nanoseconds += int(file.read().split()[0])
    except (OSError, IndexError):
        return _cpu_seconds(psutil.Process(pid))
    return nanoseconds / 1e9


def _peer_main(spec: PeerSpec, pipe: Connection) -> None:
    """Joins the group, does what comes through the pipe, and leaves when it ends."""
    os.environ.update(spec.environment)
    try:
        import torch

        torch.set_num_threads(spec.threads)
        peer = join(spec)
    except BaseException:
        pipe.send(("error", traceback.format_exc()))
        raise
    pipe.send(("ready", None))
    with suppress(EOFError, KeyboardInterrupt):
        while (task := pipe.recv()) is not None:
            name, seconds, arguments = task
            answer: tuple[str, Any]
            try:
                answer = ("numbers", TASKS[name](peer, seconds, **arguments))
            except NotImplementedError as error:
                answer = ("unsupported", str(error))
            except Exception:
                answer = ("error", traceback.format_exc())
            pipe.send(answer)
    peer.close()
