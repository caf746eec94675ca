"""Starts processes that end with this one: a broker, and workers by way of the fork server."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

from tensorplay.errors import BrokerError
from tensorplay.worker.serve import WorkerConfig

_log = logging.getLogger(__name__)

#: Seconds that a child has to end after its standard input has, before it is killed.
END_SECONDS = 10.0


class ForkServerClient:
    """Runs ``python -m tensorplay.worker.forkserver``; several clusters may share one.

    Used as a context manager: at the end the server and all its workers are gone.
    """

    def __init__(self) -> None:
        self._process = spawn("tensorplay.worker.forkserver")
        #: Guards the order of what was asked for, which is the order of the answers.
        self._lock = threading.Lock()
        self._asked: deque[tuple[Future[int], Callable[[int], None]]] = deque()
        self._on_end: dict[int, Callable[[int], None]] = {}
        self._ended = False
        self._reader = threading.Thread(
            target=self._read, name="tensorplay-forkserver", daemon=True
        )
        self._reader.start()

    def __enter__(self) -> ForkServerClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        end_with_input(self._process)
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def start(self, config: WorkerConfig, on_end: Callable[[int], None], timeout: float) -> int:
        """Starts a worker and returns its process id.

        Args:
            config: What the worker is told.
            on_end: Called with its exit code when it has ended, in a thread of the library;
                a negative one is the signal that ended it.
            timeout: Seconds that the start may take; the first one waits for torch.

        Raises:
            BrokerError: If the server does not start it in time, or has ended itself.
        """
        started: Future[int] = Future()
        assert self._process.stdin is not None
        with self._lock:
            if self._ended:
                raise _ended()
            self._asked.append((started, on_end))
            with suppress(BrokenPipeError):  # then the reader fails the future
                self._process.stdin.write(json.dumps(asdict(config)) + "\n")
                self._process.stdin.flush()
        try:
            return started.result(timeout)
        except FutureTimeoutError:
            raise BrokerError(
                f"worker {config.name!r} was not started within {timeout} s; "
                "standard error may say why, or give it a longer start_timeout"
            ) from None

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event = json.loads(line)
            if event["event"] == "started":
                started, self._on_end[event["pid"]] = self._asked.popleft()
                started.set_result(event["pid"])
            else:
                self._on_end.pop(event["pid"])(event["code"])
        with self._lock:
            self._ended = True
            for started, _ in self._asked:
                started.set_exception(_ended())


def _ended() -> BrokerError:
    return BrokerError("the process that starts workers has ended; standard error says why")


def spawn(module: str, *arguments: str) -> subprocess.Popen[str]:
    """Runs a module that ends with its standard input, and finds what this process imports.

    It has a session of its own: Ctrl-C at the terminal, and the interrupt of a notebook, which
    go to whole process groups, are for this process to handle.
    """
    path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,
    )


def end_with_input(process: subprocess.Popen[str]) -> None:
    """Ends what ``spawn`` has started: by closing its input, and by force if that fails."""
    assert process.stdin is not None
    with suppress(OSError):
        process.stdin.close()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        _log.warning("process %s did not end within %s s; it is killed", process.pid, END_SECONDS)
    finally:  # also when this process is interrupted while it waits
        process.kill()
        process.wait()


@contextmanager
def local_broker(
    *options: str, bind: str = "tcp://127.0.0.1:0"
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Runs a broker while it lasts, and yields its process and its address.

    Args:
        *options: Further options of its command line.
        bind: Where it listens.

    Raises:
        BrokerError: If it does not come up.
    """
    process = spawn(
        "tensorplay.broker",
        *("--bind", bind, "--log-level", "warning", "--exit-with-parent"),
        *options,
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line:
            raise BrokerError(
                f"the broker ended with exit code {process.wait()}; standard error says why"
            )
        yield process, line.split()[-1]
    finally:
        end_with_input(process)
        process.stdout.close()
