"""The Grafana dashboard asks for metrics that there are."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tensorplay.broker.metrics import render
from tensorplay.broker.status import snapshot
from tensorplay.distributed.rpc.meters import BOUNDS
from tensorplay.protocol.messages import Heartbeat
from tests.broker.test_state import Driver

FILE = Path(__file__).parents[2] / "docker" / "grafana" / "tensorplay.json"


def test_every_query_names_metrics_that_there_are() -> None:
    driver = Driver()
    driver.join("A", "worker0", 1)
    stats: dict[str, float] = {f"made_le_{bound:g}": 1 for bound in BOUNDS}
    stats |= {"calls_made": 1, "made_seconds": 1, "calls_served": 1, "calls_failed": 0}
    stats |= {"requests_in_progress": 0, "requests_queued": 0}
    stats |= {"memory_bytes": 1, "cuda_memory_bytes": 1}
    driver.send("A", Heartbeat(1.0, stats))
    text = render(json.loads(snapshot(driver.state, driver.now))).decode()
    known = {
        sample.name for family in text_string_to_metric_families(text) for sample in family.samples
    }
    dashboard: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [one["query"] for one in dashboard["templating"]["list"]]
    asked = {name for query in queries for name in re.findall(r"tensorplay_\w+", query)}
    assert len(asked) > 10
    assert asked <= known


def test_the_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(FILE.read_text(encoding="utf-8"))["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken
        assert at["x"] + at["w"] <= 24
        taken |= cells
