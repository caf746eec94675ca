"""Rounds of calls, remote references and backward passes, and what each process has after each."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch

from tensorplay.cluster import LocalCluster
from tensorplay.distributed import rpc
from tests.rpc import helpers

#: The first rounds fill caches and pools, and are not counted.
WARM_UP = 4
#: Bytes that a process may have grown by since: allocators keep some of what they had.
LIMIT_BYTES = 24 << 20
#: Threads that come and go: those of the pools.
LIMIT_THREADS = 8


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is to be done in all rounds together.

    Attributes:
        calls: Calls, most of them small, some with a tensor.
        rrefs: Remote objects that are made, used and dropped.
        passes: Pairs of forward and backward.
        rounds: How many rounds.
    """

    calls: int
    rrefs: int
    passes: int
    rounds: int = 20


@dataclass
class Process:
    """What a process had after each round.

    Attributes:
        bytes: Resident memory.
        descriptors: Open files.
        threads: Threads.
    """

    bytes: list[int] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)

    def complaints(self, name: str) -> list[str]:
        """Returns what has grown since the warm-up."""
        found = []
        grown = self.bytes[-1] - max(self.bytes[WARM_UP - 1 : WARM_UP + 1])
        if grown > LIMIT_BYTES:
            found.append(f"{name} grew by {grown / 2**20:.1f} MiB")
        if self.descriptors[-1] > max(self.descriptors[:WARM_UP]):
            found.append(f"{name} has {self.descriptors} open files")
        if self.threads[-1] > max(self.threads[:WARM_UP]) + LIMIT_THREADS:
            found.append(f"{name} has {self.threads} threads")
        return found


def run(
    cluster: LocalCluster, plan: Plan, say: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Carries out a plan from this process on a cluster's workers, and returns figures."""
    pids = {"broker": cluster.broker_pid, "client": os.getpid(), **cluster.pids}
    processes = {name: Process() for name in pids}
    start = time.monotonic()
    for number in range(plan.rounds):
        for worker in cluster.workers:
            share = plan.rounds * len(cluster.workers)
            _call(worker, plan.calls // share)
            _refer(worker, plan.rrefs // share)
            _train(worker, plan.passes // share)
        gc.collect()
        left = _wait_until_clean(cluster.workers)
        for name, pid in pids.items():
            _measure(processes[name], pid)
        say(f"round {number + 1} of {plan.rounds}")
    complaints = [what for name, process in processes.items() for what in process.complaints(name)]
    return {
        "calls": plan.calls,
        "rrefs": plan.rrefs,
        "passes": plan.passes,
        "seconds": round(time.monotonic() - start, 1),
        "processes": {
            name: {
                "first_mib": round(process.bytes[WARM_UP - 1] / 2**20, 1),
                "last_mib": round(process.bytes[-1] / 2**20, 1),
                "descriptors": [process.descriptors[WARM_UP - 1], process.descriptors[-1]],
                "threads": [process.threads[WARM_UP - 1], process.threads[-1]],
            }
            for name, process in processes.items()
        },
        "complaints": complaints + left,
    }


def markdown(found: dict[str, Any]) -> str:
    """Returns the figures as a table."""
    lines = [
        f"{found['calls']:,} calls, {found['rrefs']:,} remote references and {found['passes']:,} "
        f"pairs of forward and backward in {found['seconds']:.0f} s:",
        "",
        "| process | MiB after the warm-up | MiB at the end | open files | threads |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, row in found["processes"].items():
        files, threads = (" → ".join(map(str, row[key])) for key in ("descriptors", "threads"))
        lines.append(f"| {name} | {row['first_mib']} | {row['last_mib']} | {files} | {threads} |")
    return "\n".join(lines) + "\n"


def _call(worker: str, count: int) -> None:
    tensor = torch.ones(1000)
    large = torch.ones(300_000)  # beyond one chunk
    for number in range(0, count, 50):
        futures = [rpc.rpc_async(worker, helpers.add, (number, 1)) for _ in range(40)]
        assert {future.wait() for future in futures} == {number + 1}
        for _ in range(8):
            assert rpc.rpc_sync(worker, helpers.fill_and_sum, (tensor,)) == 1000.0
        assert rpc.rpc_sync(worker, helpers.fill_and_sum, (large,)) == 300_000.0
        with suppress(ValueError):
            rpc.rpc_sync(worker, helpers.fail, ("on purpose",))


def _refer(worker: str, count: int) -> None:
    for _ in range(count):
        counter = rpc.remote(worker, helpers.Counter, (1,))
        assert counter.rpc_sync().increment() == 2


def _train(worker: str, count: int) -> None:
    weight = torch.ones(20, requires_grad=True)
    for _ in range(count):
        result = rpc.rpc_sync(worker, helpers.add, (weight, weight))
        result.sum().backward()
        assert weight.grad is not None
        assert float(weight.grad[0]) == 2.0
        weight.grad = None


def _wait_until_clean(workers: list[str]) -> list[str]:
    """Waits until the workers hold nothing for this process; returns what they still do."""
    deadline = time.monotonic() + 20.0
    while True:
        left = []
        for worker in workers:
            stats = rpc.rpc_sync(worker, _stats)
            for name in ("rrefs_owned", "rrefs_used", "graphs", "calls_in_flight"):
                if stats.get(name):
                    left.append(f"{worker} has {stats[name]:.0f} of {name}")
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.02)


def _stats() -> dict[str, float]:
    gc.collect()
    return rpc._get_current_rpc_agent().stats()


def _measure(process: Process, pid: int) -> None:
    found = psutil.Process(pid)
    process.bytes.append(found.memory_info().rss)
    process.descriptors.append(found.num_fds())
    process.threads.append(found.num_threads())
