"""What the machine is, and how busy others keep it."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter
from typing import Any

import psutil
import torch


@dataclass(frozen=True)
class Load:
    """What else went on while something was measured, as shares of all cores.

    Attributes:
        seconds: How long it took.
        foreign: Share that processes of others used.
        steal: Share that the host withheld from this virtual machine.
        average: The load average over a minute at the end; it counts the benchmark's own, too.
    """

    seconds: float
    foreign: float
    steal: float
    average: float


class LoadMeter:
    """Measures the load from its making to ``stop``.

    Args:
        own_seconds: The processor time of the benchmark's own processes so far.
    """

    def __init__(self, own_seconds: float) -> None:
        self._own = own_seconds
        self._times = psutil.cpu_times()
        self._start = perf_counter()

    def stop(self, own_seconds: float) -> Load:
        """Returns the load.

        Args:
            own_seconds: As for the making, at the end.
        """
        seconds = perf_counter() - self._start
        capacity = seconds * (os.cpu_count() or 1)
        times = psutil.cpu_times()
        busy = _busy(times) - _busy(self._times)
        foreign = busy - (own_seconds - self._own)
        steal = getattr(times, "steal", 0.0) - getattr(self._times, "steal", 0.0)
        return Load(
            seconds=seconds,
            foreign=max(foreign / capacity, 0.0),
            steal=max(steal / capacity, 0.0),
            average=os.getloadavg()[0],
        )


def _busy(times: Any) -> float:
    # Linux counts guests under user, too.
    names = ("user", "nice", "system", "irq", "softirq")
    return float(sum(getattr(times, name, 0.0) for name in names))


def describe() -> dict[str, Any]:
    """Returns what a reader of the numbers should know about the machine."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "shared_memory_bytes": _shared_memory_bytes(),
        "system": f"{platform.system()} {platform.release()}",
        "python": sys.version.split()[0],
        "packages": {name: found for name in _PACKAGES if (found := _version(name))},
        "memory_copy_bytes_per_second": {
            str(nbytes): copy_bandwidth(nbytes) for nbytes in (1 << 20, 16 << 20, 128 << 20)
        },
    }


_PACKAGES = ("tensorplay-broker", "torch", "pyzmq", "msgspec", "ray")


def copy_bandwidth(nbytes: int) -> float:
    """Returns the bytes a second of a warm copy in memory by one thread; the best of many."""
    source = torch.ones(nbytes // 4)
    target = torch.empty_like(source)
    best, end = float("inf"), perf_counter() + _COPY_SECONDS
    while (start := perf_counter()) < end or best == float("inf"):
        target.copy_(source)
        best = min(best, perf_counter() - start)
    return nbytes / best


#: How long copies of one size are tried.
_COPY_SECONDS = 0.3


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _shared_memory_bytes() -> int:
    folder = Path("/dev/shm")
    return psutil.disk_usage(str(folder)).total if folder.is_dir() else 0


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
