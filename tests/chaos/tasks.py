"""What the clients have the workers do.

Each call of a function that has an effect is entered in a ledger, a file for each process, as
soon as the function runs: a line survives whatever happens to the process afterwards.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from tensorplay.distributed import rpc

_ledger = -1


def open_ledger(folder: Path) -> None:
    """Begins the ledger of this process."""
    global _ledger
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    _ledger = os.open(folder / f"executed-{os.getpid()}", flags, 0o600)


def enter(call: str) -> None:
    """Notes that a call has begun to run."""
    os.write(_ledger, f"{call}\n".encode())


def executed(folder: Path) -> dict[str, int]:
    """Returns how often each call has run, from the ledgers of all processes."""
    counts: dict[str, int] = {}
    for ledger in folder.glob("executed-*"):
        for call in ledger.read_text().splitlines():
            counts[call] = counts.get(call, 0) + 1
    return counts


def echo(call: str, value: Any) -> Any:
    enter(call)
    return value


def fail(call: str) -> None:
    enter(call)
    raise ValueError(call)


def total(call: str, tensor: torch.Tensor) -> float:
    enter(call)
    return float(tensor.double().sum())


def ramp(call: str, size: int) -> torch.Tensor:
    """Returns the float32 numbers from 0 to ``size - 1``."""
    enter(call)
    return torch.arange(size, dtype=torch.float32)


def relay(call: str, name: str, inner: str, timeout: float) -> str:
    """Calls another worker in turn."""
    enter(call)
    answer: str = rpc.rpc_sync(name, echo, (inner, inner), timeout=timeout)
    return answer


def weigh(call: str, inputs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    enter(call)
    return (inputs @ weights).relu()


class Cell:
    """A number that only its owner changes."""

    def __init__(self, call: str) -> None:
        enter(call)
        self.value = 0

    def add(self, call: str) -> int:
        enter(call)
        self.value += 1
        return self.value

    def read(self) -> int:
        return self.value


def stats() -> dict[str, float]:
    """Returns what this process keeps for others, and what is under way."""
    return rpc._get_current_rpc_agent().stats()
