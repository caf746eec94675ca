"""The end of a process that is still a peer: SIGTERM, and the interpreter's exit."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import threading
from types import FrameType

from tensorplay.distributed.rpc import current, rendezvous

_log = logging.getLogger(__name__)

_told = False


def end_on_sigterm() -> None:
    """Has SIGTERM end this process cleanly, if nothing else is to be done about it.

    The main thread gets a SystemExit, so that blocks are left and files closed; calls under
    way then have the options' ``drain_timeout`` to finish. A second signal ends the process
    at once. Handlers that the program has set itself stay, and so does the default in
    processes that this one forks.
    """
    global _told
    if threading.current_thread() is not threading.main_thread():
        return
    _told = False
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _end)


def drain_limit(otherwise: float | None) -> float | None:
    """Returns how many seconds to wait for calls under way, once this process is to end.

    Args:
        otherwise: What holds as long as it is not.
    """
    if not _told or not current.is_set():
        return otherwise
    limit = current.agent().options.drain_timeout
    return limit if otherwise is None or limit is None else min(limit, otherwise)


def _end(number: int, frame: FrameType | None) -> None:
    global _told
    signal.signal(number, signal.SIG_DFL)  # the second one
    if not current.is_set():  # it has left, or this is a process that was forked
        os.kill(os.getpid(), number)
        return
    _told = True
    raise SystemExit(128 + number)


@atexit.register
def _leave() -> None:
    """An interpreter that ends without ``shutdown`` says goodbye, and does not hang."""
    if not current.is_set():
        return
    agent = current.agent()
    limit = drain_limit(None)
    if limit is not None and not agent.drain(limit):
        _log.warning("left with calls under way after %s s", limit)
    agent.close(timeout=1.0, reason="its process ended")
    current.set_agent(None)
    rendezvous.stop_embedded_broker()
