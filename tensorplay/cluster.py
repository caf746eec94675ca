"""A broker, workers and a client on this machine, for notebooks, tests and demos."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from tensorplay.distributed import rpc
from tensorplay.errors import BrokerError, ConfigError, WorkerLostError
from tensorplay.worker.serve import WorkerConfig

#: Seconds that a child has to end before it is killed.
_END_SECONDS = 10.0


@dataclass
class LocalCluster:
    """A running cluster, as ``local_cluster`` gives it.

    Attributes:
        address: The broker's address; other processes may join there.
        pids: Process ids of the workers, by name.
        exit_codes: Exit codes of the workers that have ended, by name.
    """

    address: str
    pids: dict[str, int] = field(default_factory=dict)
    exit_codes: dict[str, int] = field(default_factory=dict)
    broker_pid: int = 0
    _server: ForkServerClient | None = None
    _defaults: dict[str, Any] = field(default_factory=dict)
    _timeout: float = 60.0

    @property
    def workers(self) -> list[str]:
        """Names of the workers that run."""
        return [name for name in self.pids if name not in self.exit_codes]

    def start_worker(self, name: str, *, wait: bool = True, **config: Any) -> None:
        """Starts a worker.

        Args:
            name: Its name; one that has ended may be used again.
            wait: Whether to wait until it is registered.
            **config: Further fields of ``WorkerConfig``.

        Raises:
            ConfigError: If a worker of that name runs.
            BrokerError: If it does not come up in time.
        """
        if name in self.workers:
            raise ConfigError(f"a worker named {name!r} is running; kill it first")
        assert self._server is not None
        fields = asdict(WorkerConfig(name=name, broker=self.address, **self._defaults | config))
        self.exit_codes.pop(name, None)
        self.pids[name] = self._server.start(fields, self._timeout)
        if wait:
            self._wait_for(name)

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """Sends a worker a signal, by default one that it cannot answer.

        Raises:
            ConfigError: If no worker of that name runs.
        """
        if name not in self.workers:
            raise ConfigError(f"no worker named {name!r} runs; running are {self.workers}")
        os.kill(self.pids[name], number)

    def wait_ended(self, name: str, timeout: float = 30.0) -> int:
        """Waits until a worker has ended and returns its exit code.

        Raises:
            BrokerError: If it has not within ``timeout`` seconds.
        """
        assert self._server is not None
        self._server.wait_until(lambda: name in self.exit_codes, timeout, f"the end of {name}")
        return self.exit_codes[name]

    def _end_workers(self) -> None:
        """Ends the workers that still run: told to at first, then killed."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            for name in self.workers:
                with suppress(ProcessLookupError):
                    os.kill(self.pids[name], number)
            with suppress(BrokerError):
                assert self._server is not None
                self._server.wait_until(lambda: not self.workers, _END_SECONDS, "the workers")

    def _wait_for(self, name: str) -> None:
        pid = self.pids[name]

        def registered() -> bool:
            if name in self.exit_codes:
                raise WorkerLostError(
                    f"worker {name!r} ended with exit code {self.exit_codes[name]} before it was "
                    "registered; its log, on standard error, says why"
                )
            return any(peer.name == name and peer.pid == pid for peer in rpc.list_workers())

        agent = rpc._get_current_rpc_agent()
        assert self._server is not None
        self._server.on_event = agent.roster.notify
        if not agent.roster.wait_for(registered, self._timeout):
            raise BrokerError(f"worker {name!r} did not register within {self._timeout} s")


@contextmanager
def local_cluster(
    workers: int | Sequence[str] = 2,
    *,
    threads: int = rpc.constants.DEFAULT_NUM_WORKER_THREADS,
    name: str = "client",
    options: rpc.BrokerRpcBackendOptions | None = None,
    imports: Sequence[str] = (),
    start_timeout: float = 60.0,
    broker_options: Sequence[str] = (),
    fork_server: ForkServerClient | None = None,
) -> Iterator[LocalCluster]:
    """Starts a broker, workers and a client on this machine; all are gone at the end.

    Within it this process is a client: ``rpc_sync``, ``RemoteModule`` and the rest work at
    once. The workers come from a server that has imported torch once, so that four start
    hardly slower than one. They see this process's ``sys.path`` and working directory.

    Args:
        workers: How many, then named ``worker0``, ``worker1``, ...; or their names.
        threads: How many calls each worker runs at a time.
        name: Name of this process.
        options: Options of this process.
        imports: Modules that each worker imports.
        start_timeout: Seconds that the start may take.
        broker_options: Further command-line options of the broker.
        fork_server: Forks the workers, if one runs already; it goes on afterwards.

    Yields:
        The cluster, whose workers can be killed and started.

    Raises:
        RuntimeError: If this process is a peer already.
        BrokerError: If the broker or a worker does not come up.
    """
    names = [f"worker{rank}" for rank in range(workers)] if isinstance(workers, int) else workers
    with ExitStack() as stack:
        server = fork_server or stack.enter_context(ForkServerClient())
        broker, address = stack.enter_context(_broker(broker_options))
        cluster = LocalCluster(
            address,
            broker_pid=broker.pid,
            _server=server,
            _defaults={"threads": threads, "imports": tuple(imports)},
            _timeout=start_timeout,
        )
        server.cluster = cluster
        stack.callback(cluster._end_workers)
        rpc.init_rpc(name, rpc_backend_options=options, broker=address)
        stack.callback(_leave)
        for rank, worker in enumerate(names):
            cluster.start_worker(worker, wait=False, rank=rank)
        for worker in names:
            cluster._wait_for(worker)
        yield cluster


def _leave() -> None:
    if rpc._is_current_rpc_agent_set():
        rpc.shutdown(graceful=False)


@contextmanager
def _broker(options: Sequence[str]) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-m", "tensorplay.broker", "--bind", "tcp://127.0.0.1:0"]
    command += ["--log-level", "warning", "--exit-with-parent", *options]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=_environment()
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise BrokerError(f"the broker ended with exit code {process.wait()}; see its log")
        yield process, line.split()[-1]
    finally:
        _end(process)


class ForkServerClient:
    """Runs ``tensorplay.worker.forkserver``; one cluster at a time may use it."""

    def __init__(self) -> None:
        self.cluster: LocalCluster | None = None
        self.on_event: Any = None
        self._started: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tensorplay.worker.forkserver"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=_environment(),
        )
        self._reader = threading.Thread(
            target=self._read, name="tensorplay-forkserver", daemon=True
        )
        self._reader.start()

    def __enter__(self) -> ForkServerClient:
        return self

    def __exit__(self, *exception: object) -> None:
        _end(self._process)
        self._reader.join()

    def start(self, fields: dict[str, Any], timeout: float) -> int:
        """Starts a worker and returns its process id."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(fields) + "\n")
        self._process.stdin.flush()
        try:
            return int(self._started.get(timeout=timeout)["pid"])
        except queue.Empty:
            raise BrokerError(f"no worker was started within {timeout} s; see the log") from None

    def wait_until(self, condition: Any, timeout: float, what: str) -> None:
        """Waits until a condition on the cluster holds."""
        with self._changed:
            if not self._changed.wait_for(condition, timeout):
                raise BrokerError(f"waited {timeout} s for {what} in vain")

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event = json.loads(line)
            if event["event"] == "started":
                self._started.put(event)
                continue
            with self._changed:
                if self.cluster is not None and self.cluster.pids.get(event["name"]) == event["pid"]:
                    self.cluster.exit_codes[event["name"]] = event["code"]
                self._changed.notify_all()
            if self.on_event is not None:
                self.on_event()


def _environment() -> dict[str, str]:
    """Returns the environment in which a child finds the modules that this process finds."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return {**os.environ, "PYTHONPATH": path}


def _end(process: subprocess.Popen[str]) -> None:
    """Ends a child that ends with its standard input."""
    if process.stdin is not None:
        with suppress(OSError):
            process.stdin.close()
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    finally:
        if process.stdout is not None and process.poll() is not None:
            with suppress(ValueError, OSError):
                process.stdout.close()
