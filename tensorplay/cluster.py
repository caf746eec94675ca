"""A broker, workers and a client on this machine, for notebooks, tests and demos."""

from __future__ import annotations

import copy
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any

from tensorplay.distributed import rpc
from tensorplay.errors import BrokerError, ConfigError, WorkerLostError
from tensorplay.worker.launcher import END_SECONDS, ForkServerClient, local_broker
from tensorplay.worker.serve import WorkerConfig

__all__ = ["ForkServerClient", "LocalCluster", "local_cluster"]


class LocalCluster:
    """A running cluster, as ``local_cluster`` gives it.

    Attributes:
        address: The broker's address; other processes may join there.
        broker_pid: Process id of the broker.
        pids: Process ids of the workers, by name, also of those that have ended.
        exit_codes: Exit codes of the workers that have ended, by name; a negative one is the
            signal that ended it.
    """

    def __init__(
        self,
        address: str,
        broker_pid: int,
        fork_server: ForkServerClient,
        template: WorkerConfig,
        timeout: float,
    ) -> None:
        self.address = address
        self.broker_pid = broker_pid
        self.pids: dict[str, int] = {}
        self.exit_codes: dict[str, int] = {}
        self._fork_server = fork_server
        self._template = template
        self._timeout = timeout
        self._changed = threading.Condition()
        self._on_change: Callable[[], None] = lambda: None

    @property
    def workers(self) -> list[str]:
        """Names of the workers that run."""
        return [name for name in self.pids if name not in self.exit_codes]

    def start_worker(self, name: str, *, wait: bool = True, **options: Any) -> None:
        """Starts a worker.

        Args:
            name: Its name; that of one that has ended may be used again.
            wait: Whether to wait until it is registered.
            **options: Further fields of ``WorkerConfig``, such as ``rank`` and ``device``.

        Raises:
            ConfigError: If a worker of that name runs.
            WorkerLostError: If it ends before it is registered.
            BrokerError: If it does not come up in time.
        """
        if name in self.workers:
            raise ConfigError(f"a worker named {name!r} is running; kill it first")
        config = replace(self._template, name=name, **options)

        def ended(code: int) -> None:
            with self._changed:
                self.exit_codes[name] = code
                self._changed.notify_all()
            self._on_change()

        self.exit_codes.pop(name, None)
        self.pids[name] = self._fork_server.start(config, ended, self._timeout)
        if wait:
            self._wait_registered(name)

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """Sends a worker a signal, by default one that it cannot answer.

        Raises:
            ConfigError: If no worker of that name runs.
        """
        if name not in self.workers:
            raise ConfigError(f"no worker named {name!r} runs; running are {self.workers}")
        # It may have ended without our having heard of it yet.
        with suppress(ProcessLookupError):
            os.kill(self.pids[name], number)

    def wait_ended(self, name: str, timeout: float = 30.0) -> int:
        """Waits until a worker has ended and returns its exit code.

        Raises:
            BrokerError: If it has not within ``timeout`` seconds.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: name in self.exit_codes, timeout):
                raise BrokerError(f"worker {name!r} still runs after {timeout} s")
        return self.exit_codes[name]

    def _end_workers(self) -> None:
        """Ends the workers that still run: told to at first, then killed."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            for name in self.workers:
                self.kill(name, number)
            with self._changed:
                if self._changed.wait_for(lambda: not self.workers, END_SECONDS):
                    return

    def _wait_registered(self, name: str) -> None:
        pid = self.pids[name]

        def registered() -> bool:
            if name in self.exit_codes:
                raise WorkerLostError(
                    f"worker {name!r} ended with exit code {self.exit_codes[name]} before it was "
                    "registered; its log, on standard error, says why"
                )
            return any(peer.name == name and peer.pid == pid for peer in rpc.list_workers())

        roster = rpc._get_current_rpc_agent().roster
        self._on_change = roster.notify
        if not roster.wait_for(registered, self._timeout):
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
    curve_dir: str = "",
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
        fork_server: Forks the workers, if one runs already; it goes on afterwards. Several
            clusters one after the other start faster with one.
        curve_dir: A key directory with keys for the broker, this process and each worker, all
            under their names and allowed. Without one the cluster uses no keys.

    Yields:
        The cluster, whose workers can be killed and started.

    Raises:
        RuntimeError: If this process is a peer already.
        BrokerError: If the broker or a worker does not come up.
    """
    names = [f"worker{rank}" for rank in range(workers)] if isinstance(workers, int) else workers
    with ExitStack() as stack:
        # The fork server comes first: it imports torch while the broker starts.
        server = fork_server or stack.enter_context(ForkServerClient())
        broker, address = stack.enter_context(
            local_broker("--curve-dir", curve_dir, *broker_options)
        )
        template = WorkerConfig(
            name="template",
            broker=address,
            threads=threads,
            imports=tuple(imports),
            curve_dir=curve_dir,
        )
        cluster = LocalCluster(address, broker.pid, server, template, start_timeout)
        stack.callback(cluster._end_workers)
        rpc.init_rpc(name, rpc_backend_options=_with_keys(options, curve_dir), broker=address)
        stack.callback(_leave)
        for rank, worker in enumerate(names):
            cluster.start_worker(worker, wait=False, rank=rank)
        for worker in names:
            cluster._wait_registered(worker)
        yield cluster


def _with_keys(
    options: rpc.BrokerRpcBackendOptions | None, curve_dir: str
) -> rpc.BrokerRpcBackendOptions:
    """Returns options with the keys of the cluster, whatever the environment says."""
    options = rpc.BrokerRpcBackendOptions() if options is None else copy.copy(options)
    options.curve_dir = curve_dir
    return options


def _leave() -> None:
    if rpc._is_current_rpc_agent_set():
        rpc.shutdown(graceful=False)
