"""A broker and workers on this machine, as one thing that is started and ended."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from types import FrameType

from tensorplay.broker.check import check
from tensorplay.errors import BrokerError, TensorPlayError
from tensorplay.worker.launcher import ForkServerClient, local_broker
from tensorplay.worker.serve import WorkerConfig

_log = logging.getLogger(__name__)

#: Seconds that all workers have to register.
START_SECONDS = 120.0
#: Seconds that a command has to end once it is told to, before it is killed.
_END_SECONDS = 10.0


@dataclass(frozen=True)
class _Ended:
    """A process has ended; ``code`` is its exit code, or minus the signal that ended it."""

    what: str
    code: int


class _Told(Exception):  # noqa: N818  (no error)
    """A signal has asked for the end."""

    def __init__(self, number: int) -> None:
        self.number = number


@dataclass(frozen=True, kw_only=True)
class LocalWorld:
    """What is to run on this machine.

    Args:
        workers: How many.
        bind: Where the broker listens, ``tcp://host:port``; port 0 is a free one.
        threads: How many calls each worker runs at a time.
        devices: Devices of the workers, which take turns.
        imports: Modules that each worker imports.
    """

    workers: int
    bind: str = "tcp://127.0.0.1:0"
    threads: int = 16
    devices: Sequence[str] = ("cpu",)
    imports: Sequence[str] = ()

    def run(self, command: Sequence[str], ready: Callable[[str], None]) -> int:
        """Runs everything until it is told to end, and returns the exit code.

        Args:
            command: What to run with the address in TENSORPLAY_BROKER; if there is none, this
                waits for SIGINT or SIGTERM.
            ready: Is told the line for people, with the address, if there is no command.

        Raises:
            TensorPlayError: If the broker or a worker does not come up, or ends by itself.
        """
        # Filled by signal handlers and by the threads that hear of ends.
        news: SimpleQueue[int | _Ended] = SimpleQueue()
        with _signals(news), ExitStack() as stack:
            try:
                address = self._start(stack, news)
                if command:
                    return _run_command(stack, command, address, news)
                ready(f"tensorplay broker and {self.workers} workers ready at {address}")
                _wait(news, None)
            except _Told as told:
                return 128 + told.number if command else 0
        raise AssertionError("nothing ends the wait but the end")

    def _start(self, stack: ExitStack, news: SimpleQueue[int | _Ended]) -> str:
        # The fork server comes first: it imports torch while the broker starts.
        server = stack.enter_context(ForkServerClient())
        _, address = stack.enter_context(local_broker(bind=self.bind))
        for rank in range(self.workers):
            config = WorkerConfig(
                name=f"worker{rank}",
                rank=rank,
                broker=address,
                device=self.devices[rank % len(self.devices)],
                threads=self.threads,
                imports=tuple(self.imports),
            )
            server.start(config, _teller(f"worker{rank}", news), START_SECONDS)
        deadline = time.monotonic() + START_SECONDS
        while (missing := self._missing(address)) and time.monotonic() < deadline:
            _wait(news, 0.05)
        if missing:
            raise BrokerError(f"{missing} did not register within {START_SECONDS} s")
        return address

    def _missing(self, address: str) -> list[str]:
        status = check(address, START_SECONDS, os.environ.get("TENSORPLAY_CURVE_DIR"))
        there = {
            peer["name"]
            for namespace in status["namespaces"].values()
            for peer in namespace["peers"]
        }
        return [name for rank in range(self.workers) if (name := f"worker{rank}") not in there]


@contextmanager
def _signals(news: SimpleQueue[int | _Ended]) -> Iterator[None]:
    """Has signals that ask for the end arrive as news; a second one ends this at once."""
    told: list[int] = []

    def tell(number: int, frame: FrameType | None) -> None:
        if told:
            os._exit(128 + number)  # what was started ends with this process
        told.append(number)
        news.put(number)

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, tell) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _teller(what: str, news: SimpleQueue[int | _Ended]) -> Callable[[int], None]:
    return lambda code: news.put(_Ended(what, code))


def _wait(news: SimpleQueue[int | _Ended], timeout: float | None) -> None:
    """Waits for news, all of which mean the end.

    Raises:
        _Told: If it is a signal.
        TensorPlayError: If it is a process that has ended by itself.
    """
    try:
        item = news.get(timeout=timeout)
    except Empty:
        return
    if isinstance(item, int):
        raise _Told(item)
    raise TensorPlayError(
        f"{item.what} ended by itself, with exit code {item.code}; its log, on standard error, "
        "may say why"
    )


def _run_command(
    stack: ExitStack, command: Sequence[str], address: str, news: SimpleQueue[int | _Ended]
) -> int:
    """Runs a command and returns its exit code, as a shell would say it."""
    try:
        process = subprocess.Popen(command, env={**os.environ, "TENSORPLAY_BROKER": address})
    except OSError as error:
        raise TensorPlayError(f"{command[0]!r} cannot be run: {error}") from None
    stack.callback(_end, process)
    waiting = threading.Thread(
        target=lambda: news.put(_Ended("", process.wait())), name="tensorplay-launch", daemon=True
    )
    waiting.start()
    item = news.get()
    while isinstance(item, _Ended) and item.what:  # the command deals with lost workers itself
        _log.warning("%s ended with exit code %s", item.what, item.code)
        item = news.get()
    if isinstance(item, int):
        raise _Told(item)
    waiting.join()
    return item.code if item.code >= 0 else 128 - item.code


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
