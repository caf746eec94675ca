"""The figures of a run, for people (Markdown) and programs (JSON)."""

from __future__ import annotations

import platform
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from tests.chaos.driver import HEARTBEAT_TIMEOUT, Plan, Result
from tests.chaos.judge import Judge, outcomes

#: The columns of the table of calls, and which outcomes each holds.
COLUMNS = {
    "done once": ("ok",),
    "timed out": ("RpcTimeoutError",),
    "peer lost": ("WorkerLostError", "OwnerLostError", "WorkerNotFoundError"),
    "state lost": ("RRefError", "GraphLostError"),
    "caller killed": ("client died",),
}


def figures(plan: Plan, result: Result) -> dict[str, Any]:
    """Returns the figures of a run."""
    judge = Judge(result.faults, result.executed, HEARTBEAT_TIMEOUT)
    complaints = [*result.complaints, *judge.complaints(result.calls.values())]
    return {
        "seed": plan.seed,
        "workers": plan.workers,
        "clients": plan.clients,
        "seconds": round(result.seconds, 1),
        "faults": dict(Counter(_name(f.kind, f.target) for f in result.faults).most_common()),
        "calls": {kind: dict(table) for kind, table in outcomes(result.calls.values()).items()},
        "executed_twice": sum(count > 1 for count in result.executed.values()),
        "broker_peak_mib": round(result.peaks.get("broker", 0.0), 1),
        "complaints": complaints,
        "python": platform.python_version(),
    }


def markdown(found: dict[str, Any]) -> str:
    """Returns the figures as two tables."""
    total = sum(found["faults"].values())
    lines = [
        f"{total:,} faults in {found['seconds']:.0f} s (seed {found['seed']}, "
        f"{found['workers']} workers, {found['clients']} clients of three threads each):",
        "",
        "| fault | times |",
        "|---|---:|",
        *(f"| {name} | {count:,} |" for name, count in found["faults"].items()),
        "",
        f"| call | {' | '.join(COLUMNS)} | anything else |",
        f"|---|{'---:|' * (len(COLUMNS) + 1)}",
    ]
    sums: Counter[str] = Counter()
    for kind, table in sorted(found["calls"].items()):
        cells = {name: sum(table.get(o, 0) for o in which) for name, which in COLUMNS.items()}
        cells["anything else"] = sum(table.values()) - sum(cells.values())
        sums.update(cells)
        lines.append(f"| {kind} | " + " | ".join(f"{n:,}" for n in cells.values()) + " |")
    row = " | ".join(f"{sums[name]:,}" for name in [*COLUMNS, "anything else"])
    lines += [
        f"| **all {sum(sums.values()):,}** | {row} |",
        "",
        f"Calls that ran twice: {found['executed_twice']}. Broken promises: "
        f"{len(found['complaints'])}. Most memory of the broker: {found['broker_peak_mib']} MiB.",
    ]
    return "\n".join(lines) + "\n"


def write(found: dict[str, Any], folder: Path) -> None:
    """Writes ``chaos.json`` and ``chaos.md``."""
    folder.mkdir(parents=True, exist_ok=True)
    formatted = msgspec.json.format(msgspec.json.encode(found), indent=2)
    (folder / "chaos.json").write_bytes(formatted + b"\n")
    (folder / "chaos.md").write_text(markdown(found), encoding="utf-8")


def _name(kind: str, target: str) -> str:
    who = {"b": "the broker", "w": "a worker", "c": "a client"}[target[0]]
    verbs = {
        "kill": "kill -9 {}",
        "terminate": "SIGTERM to {}",
        "stop": "SIGSTOP {}, resume",
        "cut": "cut the link of {}, heal",
        "silence": "half-open link of {}, heal",
        "delay": "slow link of {}",
        "fragment": "chop up the traffic of {}",
    }
    return verbs[kind].format(who)
