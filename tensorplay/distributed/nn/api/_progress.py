"""A progress bar for what moves large modules, on a terminal."""

from __future__ import annotations

import sys
import threading
from typing import TypeVar

from tensorplay.distributed import rpc
from tensorplay.distributed.rpc import api

T = TypeVar("T")

#: Seconds after which the bar is shown: most modules are there by then.
DELAY = 0.5
#: Seconds between two looks.
INTERVAL = 0.1


def wait(future: rpc.Future[T], what: str) -> T:
    """Returns the result of a future; shows how far its payload is if that takes long.

    Args:
        future: Of a call of this process.
        what: What is under way, for people, such as ``"state from worker0"``.
    """
    if sys.stderr is not None and sys.stderr.isatty():
        done = threading.Event()
        future.add_done_callback(lambda _: done.set())
        if not done.wait(DELAY):
            _show(future, what, done)
    return future.wait()


def _show(future: rpc.Future[T], what: str, done: threading.Event) -> None:
    from rich import progress  # not at import: few processes have a terminal
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeElapsedColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        bar = bars.add_task(what, total=None)
        while not done.wait(INTERVAL):
            passed, size = api._progress(future)
            if size:
                bars.update(bar, completed=passed, total=size)
