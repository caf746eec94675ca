"""Progress bars of what takes long."""

from __future__ import annotations

import os
import pty
import sys
import threading
from collections.abc import Iterator
from typing import Any, TextIO

import pytest
import torch

from tensorplay.cluster import LocalCluster
from tensorplay.distributed import rpc
from tensorplay.distributed.nn import RemoteModule
from tensorplay.distributed.nn.api import _progress
from tensorplay.distributed.rpc import api
from tests.rpc import helpers


class Terminal:
    """Stands in for the terminal behind standard error, and reads what is shown on it."""

    def __init__(self) -> None:
        self._master, slave = pty.openpty()
        self.file: TextIO = os.fdopen(slave, "w")
        self.text = ""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        try:
            while data := os.read(self._master, 4096):
                self.text += data.decode(errors="replace")
        except OSError:  # the other end is closed
            pass

    def close(self) -> None:
        if not self.file.closed:
            self.file.close()
            self._reader.join()
            os.close(self._master)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    shown = Terminal()
    yield shown
    shown.close()


def test_a_call_that_takes_long_shows_a_bar(
    cluster: LocalCluster, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Here, not in the fixture: pytest puts its own in place between the two.
    monkeypatch.setattr(sys, "stderr", terminal.file)
    monkeypatch.setattr(_progress, "DELAY", 0.0)
    shown: list[Any] = []

    def progress(future: Any) -> tuple[int, int]:
        shown.append(future)
        if len(shown) == 3:
            rpc.rpc_sync("worker0", helpers.set_event, ("progress",))
        return 30_000_000, 100_000_000

    monkeypatch.setattr(api, "_progress", progress)
    future = rpc.rpc_async("worker0", helpers.wait_event, ("progress", 30.0))
    assert _progress.wait(future, "state from worker0") is True
    assert len(shown) >= 3
    monkeypatch.undo()
    terminal.close()
    assert "state from worker0" in terminal.text
    assert "30.0/100.0 MB" in terminal.text


def test_what_is_quick_shows_nothing(
    cluster: LocalCluster, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", terminal.file)
    monkeypatch.setattr(_progress, "DELAY", 30.0)
    layer = RemoteModule("worker0/cpu", torch.nn.Linear, args=(4, 4))
    layer.load_remote_state_dict(layer.remote_state_dict())
    assert terminal.text == ""


def test_no_terminal_no_bar(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_progress, "DELAY", 0.0)
    monkeypatch.setattr(_progress, "_show", None)  # would raise
    layer = RemoteModule("worker0/cpu", torch.nn.Linear, args=(4, 4))
    assert set(layer.remote_state_dict()) == {"weight", "bias"}


def test_errors_come_through(
    cluster: LocalCluster, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", terminal.file)
    with pytest.raises(ValueError, match="boom"):
        _progress.wait(rpc.rpc_async("worker0", helpers.fail, ("boom",)), "state")
