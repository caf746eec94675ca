"""Pieces of the tests of shared memory, and functions that they run on workers."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch

from tensorplay.distributed import rpc
from tensorplay.protocol.messages import PeerInfo

#: Incarnation of the process that the tests' slabs belong to.
ME = 0x1234ABCD

LARGE = 1 << 18


def this_process(incarnation: int = ME, pid: int | None = None) -> PeerInfo:
    return PeerInfo("me", -2, incarnation, pid=os.getpid() if pid is None else pid)


def slab_descriptors() -> list[str]:
    """Returns what this process has open of slabs."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            link = os.readlink(entry)  # noqa: PTH115
        except OSError:  # closed meanwhile
            continue
        if link.startswith("/memfd:tensorplay-"):
            found.append(link)
    return found


def mapped_slabs() -> set[str]:
    """Returns the names of the slabs that this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.partition("/memfd:")[2] for line in lines if "/memfd:tensorplay-" in line}


def stats() -> dict[str, float]:
    """Returns what this process counts of shared memory, as it is now."""
    shared = rpc._get_current_rpc_agent().shared
    return {**shared.stats(), **shared._pool.stats()}


def share_with(worker: str) -> None:
    """Returns when this process and a worker have found that they share memory."""
    deadline = time.monotonic() + 30
    rpc.rpc_sync(worker, echo, args=(torch.ones(LARGE),))
    agent = rpc._get_current_rpc_agent()
    known = agent.shared._peers[agent.peer(worker).incarnation]
    while not known.shares or rpc.rpc_sync(worker, stats)["slab_peers"] < 1:
        assert time.monotonic() < deadline
        time.sleep(0.01)


# What runs on workers.

kept: dict[str, torch.Tensor] = {}


def keep(name: str, tensor: torch.Tensor) -> float:
    kept[name] = tensor
    return float(tensor.sum())


def kept_sum(name: str) -> float:
    return float(kept[name].sum())


def kept_fill(name: str, value: float) -> None:
    kept[name].fill_(value)


def take_kept(name: str) -> torch.Tensor:
    return kept[name]


def drop(name: str) -> None:
    kept.pop(name, None)


def full(count: int, value: float) -> torch.Tensor:
    return torch.full((count,), value)


def length(tensor: torch.Tensor) -> int:
    return tensor.numel()


def echo(value: Any) -> Any:
    return value


def end_and_answer(count: int) -> torch.Tensor:
    """Has this worker end when it has answered."""
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, signal.SIGTERM)
    return torch.ones(count)
