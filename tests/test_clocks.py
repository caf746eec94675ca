"""Deadlines and liveness use the monotonic clock: a clock that jumps changes nothing."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

#: Files that show the time of day to people, or compare the clocks of hosts; nothing waits by it.
SHOW_THE_TIME = {
    "broker/health.py",
    "tensorplay/commands/checks.py",
    "tensorplay/commands/status.py",
    "tensorplay/distributed/rpc/orders.py",
}
#: What tells the time of day.
WALL_CLOCKS = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today"}
#: What waits by the clock that it is given: an absolute time of day would be a mistake.
SOURCES = sorted((ROOT / "tensorplay").rglob("*.py")) + sorted((ROOT / "broker").rglob("*.py"))


def wall_clocks(source: Path) -> list[str]:
    tree = ast.parse(source.read_text(encoding="utf-8"))
    found = [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node) in WALL_CLOCKS
    ]
    found += [
        f"from time import {alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "time"
        for alias in node.names
        if alias.name in ("time", "time_ns")
    ]
    return found


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_is_decided_by_the_time_of_day(source: Path) -> None:
    name = str(source.relative_to(ROOT))
    if name.startswith("tensorplay/broker/"):  # the link to broker/
        return
    if name not in SHOW_THE_TIME:
        assert not wall_clocks(source)


def test_those_that_show_it_do() -> None:
    assert all(wall_clocks(ROOT / name) for name in SHOW_THE_TIME)
