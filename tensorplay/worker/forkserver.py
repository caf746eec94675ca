"""Starts workers quickly: imports torch once and forks a worker for each line of input.

``python -m tensorplay.worker.forkserver`` reads JSON lines on standard input, each with the
fields of ``WorkerConfig``, and prints one for each event on standard output::

    {"event": "started", "name": "worker0", "pid": 123}
    {"event": "ended", "name": "worker0", "pid": 123, "code": 0}

Answers come in the order of the questions. The server ends with its input or with the process
that started it: its workers are told to end, and killed if they do not. If it dies itself, the
kernel kills its workers (on Linux).
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import selectors
import signal
import sys
import time
from contextlib import suppress
from typing import Any, NoReturn

from tensorplay import logs
from tensorplay.distributed.rpc.serving import log_fields
from tensorplay.worker.serve import WorkerConfig, run

#: Seconds that workers have to end before they are killed.
GRACE_SECONDS = 5.0

_PR_SET_PDEATHSIG = 1


class ForkServer:
    """Forks workers, and tells of their beginning and end."""

    def __init__(self) -> None:
        self._workers: dict[int, str] = {}
        self._partial = b""

    def loop(self) -> None:
        """Serves until standard input ends, or the process that started this one."""
        wake_out, wake_in = os.pipe()
        for end in (wake_out, wake_in):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake_in)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        with selectors.DefaultSelector() as selector:
            selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
            selector.register(wake_out, selectors.EVENT_READ)
            parent = _descriptor_of_parent()
            if parent is not None:
                selector.register(parent, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fd == wake_out:
                        os.read(wake_out, 4096)
                        self.reap()
                    elif key.fd == parent or not self._read():
                        return

    def _read(self) -> bool:
        data = os.read(sys.stdin.fileno(), 1 << 16)
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            self.start(json.loads(line))
        return bool(data)

    def start(self, fields: dict[str, Any]) -> None:
        """Forks a worker."""
        fields["imports"] = tuple(fields.get("imports", ()))
        config = WorkerConfig(**fields)
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            _become(config, server)
        self._workers[pid] = config.name
        _tell(event="started", name=config.name, pid=pid)

    def reap(self) -> None:
        """Tells of the workers that have ended."""
        for pid in list(self._workers):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                name = self._workers.pop(pid)
                _tell(event="ended", name=name, pid=pid, code=os.waitstatus_to_exitcode(status))

    def close(self) -> None:
        """Ends the workers: asks them to, and kills those that do not within the limit."""
        deadline = time.monotonic() + GRACE_SECONDS
        self._signal(signal.SIGTERM)
        while self._workers and time.monotonic() < deadline:
            time.sleep(0.02)
            self.reap()
        self._signal(signal.SIGKILL)
        while self._workers:
            time.sleep(0.02)
            self.reap()

    def _signal(self, number: int) -> None:
        for pid in self._workers:
            os.kill(pid, number)


def _become(config: WorkerConfig, server: int) -> NoReturn:
    """Makes the forked process a worker; never returns."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _die_with(server)
        # The lines of the server's standard input are not the worker's.
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        os.dup2(2, 1)  # standard output tells the server's events
        _configure_log(lambda: {"worker": config.name, **log_fields()})
        code = run(config, announce=False)
        sys.stdout.flush()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


def _die_with(server: int) -> None:
    """Has the kernel kill this process when the server dies, however it does (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:  # it died before the kernel was told
        os._exit(1)


def _descriptor_of_parent() -> int | None:
    """Returns what becomes readable when the parent dies, where there is such a thing.

    The end of standard input tells it as a rule, but not while another child of the parent,
    forked without an exec, holds the other end of the pipe. (A death signal, as the workers
    have, would come as soon as the parent's *thread* ends that started this process.)
    """
    if sys.platform != "linux":
        return None
    try:
        return os.pidfd_open(os.getppid())
    except OSError:  # an old kernel, or the parent is gone and standard input has ended
        return None


def _tell(**event: Any) -> None:
    with suppress(BrokenPipeError):  # nobody listens any more: standard input ends, too
        os.write(1, json.dumps(event).encode() + b"\n")


def _configure_log(context: logs.Context | None = None) -> None:
    logs.configure(os.environ.get("TENSORPLAY_LOG_LEVEL", "warning"), context=context)


def main() -> None:
    """Runs the server."""
    _configure_log()
    import tensorplay.distributed  # noqa: F401  (what the workers need is imported once)

    gc.freeze()  # what is imported stays shared between the workers
    server = ForkServer()
    try:
        server.loop()
    finally:
        server.close()


if __name__ == "__main__":
    main()
