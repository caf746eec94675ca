"""The benchmark runs, each of its measurements gives numbers, and its report has all of them.

How long anything takes is not looked at.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.tiny import tiny_plan
from tests.docs.snippets import ROOT

#: Seconds for the whole of it, half a minute on an idle machine.
_LIMIT = 280
pytestmark = pytest.mark.timeout(_LIMIT + 10)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run has written. A process of its own: all that it starts ends with it."""
    folder = tmp_path_factory.mktemp("report")
    ended = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.tiny", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=_LIMIT,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return folder


@pytest.fixture(scope="module")
def report(folder: Path) -> dict[str, Any]:
    """The JSON report."""
    loaded: dict[str, Any] = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    return loaded


def test_every_measurement_gives_numbers_for_every_system(report: dict[str, Any]) -> None:
    assert report["missing"] == []
    measured = {(cell["measurement"], cell["system"]) for cell in report["cells"]}
    for stage in tiny_plan():
        for measurement in stage.measurements:
            for system in measurement.systems or stage.groups:
                assert (measurement.name, system) in measured


def test_every_cell_has_samples_and_their_load(report: dict[str, Any]) -> None:
    for cell in report["cells"]:
        assert len(cell["samples"]) == report["settings"]["repeats"], cell
        # A worker that idles for so short a time may not have been scheduled once.
        assert cell["median"] > 0 or cell["number"].startswith("idle"), cell
        assert cell["unit"]


def test_the_machine_is_described(report: dict[str, Any]) -> None:
    assert report["machine"]["cores"] >= 1
    assert report["machine"]["packages"]["torch"]
    assert all(rate > 0 for rate in report["machine"]["memory_copy_bytes_per_second"].values())


def test_the_targets_that_can_be_are_judged(report: dict[str, Any]) -> None:
    verdicts = {target["title"]: target["verdict"] for target in report["targets"]}
    for title in ("empty call, p50", "push 1 MiB, over frames", "small training step"):
        assert verdicts[title] in ("met", "stretch", "missed")
    assert verdicts["push 1 GiB, same host"] == "not measured"


def test_the_markdown_has_every_stage_and_measurement(folder: Path) -> None:
    text = (folder / "report.md").read_text(encoding="utf-8")
    for stage in tiny_plan():
        assert stage.name.lower() in text.lower()
        for measurement in stage.measurements:
            assert f"| {measurement.name}, " in text
    assert "Targets:" in text


def test_a_picture_is_drawn(folder: Path) -> None:
    assert (folder / "report.png").read_bytes().startswith(b"\x89PNG")
