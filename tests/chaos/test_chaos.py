"""A short run; ``python -m tests.chaos`` makes long ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos import report
from tests.chaos.driver import Driver, Plan


@pytest.mark.timeout(110)
def test_every_call_is_accounted_for(tmp_path: Path) -> None:
    plan = Plan(faults=25, seed=7, workers=2, clients=2, pace=0.25)
    found = report.figures(plan, Driver(plan, tmp_path).run())
    assert found["complaints"] == [], report.markdown(found)
    assert sum(found["faults"].values()) == 25
    assert sum(sum(table.values()) for table in found["calls"].values()) > 100
