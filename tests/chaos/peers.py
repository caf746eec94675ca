"""The processes of a run: workers that serve, clients that call until they are told to end.

They are forked from one server that has imported torch.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from tensorplay.distributed import autograd as dist_autograd
from tensorplay.distributed import rpc
from tensorplay.errors import TensorPlayError, WorkerNotFoundError
from tensorplay.worker.serve import WorkerConfig, run
from tests.chaos import tasks
from tests.chaos.records import Book

#: Time-outs of calls, in seconds: one that chaos often exceeds, and one that it seldom does.
TIMEOUTS = (1.5, 10.0)
#: Threads of each client that call.
CALLERS = 3
#: Seconds between two calls of a thread, at most.
PAUSE = 0.02


def _log_to(folder: Path, name: str) -> None:
    log = os.open(folder / f"log-{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, sys.stderr.fileno())
    logging.basicConfig(
        level=logging.WARNING, format=f"%(asctime)s {os.getpid()} %(name)s %(message)s", force=True
    )


def work(name: str, rank: int, address: str, folder: Path) -> None:
    """Is a worker."""
    torch.set_num_threads(1)
    _log_to(folder, name)
    tasks.open_ledger(folder)
    # Of each kind, some use shared memory and some send everything through the broker.
    config = WorkerConfig(name=name, rank=rank, broker=address, threads=4, shm=rank % 2 == 0)
    sys.exit(run(config, announce=False))


def call(name: str, address: str, workers: list[str], folder: Path, seed: int) -> None:
    """Is a client: calls until SIGTERM, then checks that all workers answer."""
    torch.set_num_threads(1)
    _log_to(folder, name)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    _join(name, address, workers, stop)
    if not rpc._is_current_rpc_agent_set():
        return
    book = Book(folder, name)
    threads = [
        threading.Thread(target=_Caller(book, workers, seed + number).run, args=(stop,))
        for number in range(CALLERS)
    ]
    for thread in threads:
        thread.start()
    while not stop.wait(1.0):  # a signal right before the wait does not interrupt it
        pass
    for thread in threads:
        thread.join()
    # Everything has been mended by now: no call may fail.
    for worker in workers:
        rpc.wait_for_workers([worker], timeout=20.0)
        id = book.new_id()
        with book.call(id, "final", worker, timeout=30.0):
            assert rpc.rpc_sync(worker, tasks.echo, (id, id), timeout=30.0) == id
    rpc.shutdown(graceful=False)


def _join(name: str, address: str, workers: list[str], stop: threading.Event) -> None:
    """Registers, however long the broker is away, and waits for the workers a while."""
    options = rpc.BrokerRpcBackendOptions(
        connect_timeout=5.0, rpc_timeout=TIMEOUTS[-1], shm=name == "c1"
    )
    while not stop.is_set():
        try:
            rpc.init_rpc(name, broker=address, rpc_backend_options=options)
            break
        except TensorPlayError as error:
            logging.getLogger("chaos").warning("not registered yet: %s", error)
    with suppress(WorkerNotFoundError):  # one may be dead at this moment
        rpc.wait_for_workers(workers, timeout=10.0)


class _Caller:
    """A thread of a client; knows what the right answers are.

    Args:
        book: Where its calls are noted.
        workers: Whom it calls.
        seed: Decides what it calls.
    """

    def __init__(self, book: Book, workers: list[str], seed: int) -> None:
        self._book = book
        self._workers = workers
        self._random = random.Random(seed)
        self._torch = torch.Generator().manual_seed(seed)

    def run(self, stop: threading.Event) -> None:
        """Makes one call after the other."""
        ways: list[Callable[[str, float], None]] = [
            *[self._echo] * 6,
            *[self._futures] * 3,
            *[self._fail] * 2,
            *[self._relay] * 3,
            *[self._cell] * 3,
            *[self._large] * 2,
            *[self._gradient] * 3,
        ]
        while not stop.is_set():
            way = self._random.choice(ways)
            try:
                way(self._random.choice(self._workers), self._random.choice(TIMEOUTS))
            except Exception as error:  # is in the book, and judged at the end
                logging.getLogger("chaos").info("%s", error)
            time.sleep(self._random.uniform(0.0, PAUSE))

    def _echo(self, worker: str, timeout: float) -> None:
        id = self._book.new_id()
        with self._book.call(id, "echo", worker, timeout=timeout):
            assert rpc.rpc_sync(worker, tasks.echo, (id, id), timeout=timeout) == id

    def _futures(self, worker: str, timeout: float) -> None:
        """Several calls at a time, to all workers."""
        ids = [self._book.new_id() for _ in range(8)]
        targets = [self._random.choice(self._workers) for _ in ids]
        threads = [
            threading.Thread(target=self._one, args=(id, target, timeout))
            for id, target in zip(ids, targets, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _one(self, id: str, worker: str, timeout: float) -> None:
        try:
            with self._book.call(id, "async", worker, timeout=timeout):
                future = rpc.rpc_async(worker, tasks.echo, (id, id), timeout=timeout)
                assert future.wait() == id
        except Exception as error:
            logging.getLogger("chaos").info("%s", error)

    def _fail(self, worker: str, timeout: float) -> None:
        id = self._book.new_id()
        with self._book.call(id, "raise", worker, timeout=timeout, expect=ValueError):
            rpc.rpc_sync(worker, tasks.fail, (id,), timeout=timeout)

    def _relay(self, worker: str, timeout: float) -> None:
        other = self._random.choice(self._workers)
        id, inner = self._book.new_id(), self._book.new_id()
        with self._book.call(id, "nested", worker, other, timeout=timeout):
            arguments = (id, other, inner, timeout)
            assert rpc.rpc_sync(worker, tasks.relay, arguments, timeout=timeout) == inner

    def _large(self, worker: str, timeout: float) -> None:
        size = self._random.choice([1000, 100_000, 1_500_000])
        id = self._book.new_id()
        with self._book.call(id, "large argument", worker, timeout=timeout):
            total = rpc.rpc_sync(worker, tasks.total, (id, torch.arange(size)), timeout=timeout)
            assert total == size * (size - 1) / 2
        id = self._book.new_id()
        with self._book.call(id, "large result", worker, timeout=timeout):
            ramp = rpc.rpc_sync(worker, tasks.ramp, (id, size), timeout=timeout)
            assert torch.equal(ramp, torch.arange(size, dtype=torch.float32))

    def _cell(self, worker: str, timeout: float) -> None:
        id = self._book.new_id()
        with self._book.call(id, "remote", worker, timeout=timeout):
            cell = rpc.remote(worker, tasks.Cell, (id,), timeout=timeout)
        sure = tried = 0
        for _ in range(3):
            id = self._book.new_id()
            tried += 1
            with self._book.call(id, "method", worker, timeout=timeout):
                cell.rpc_sync(timeout=timeout).add(id)
            sure += 1
        id = self._book.new_id()
        with self._book.call(id, "fetch", worker, timeout=timeout):
            value = cell.to_here(timeout=timeout).value
            assert sure <= value <= tried, f"{sure} of {tried} additions gave {value}"

    def _gradient(self, worker: str, timeout: float) -> None:
        inputs = torch.randn(4, 8, generator=self._torch)
        weights = torch.randn(8, 3, generator=self._torch, requires_grad=True)
        (expected,) = torch.autograd.grad((inputs @ weights).relu().sum(), weights)
        with dist_autograd.context() as context:
            id = self._book.new_id()
            with self._book.call(id, "forward", worker, timeout=timeout):
                arguments = (id, inputs, weights)
                result = rpc.rpc_sync(worker, tasks.weigh, arguments, timeout=timeout)
            id = self._book.new_id()
            with self._book.call(id, "backward", worker, timeout=0.0):
                dist_autograd.backward(context, [result.sum()])
                found = dist_autograd.get_gradients(context)[weights]
                assert torch.allclose(found, expected)
