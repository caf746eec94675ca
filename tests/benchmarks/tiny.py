"""``python -m tests.benchmarks.tiny FOLDER``: the whole benchmark, as small as it can be."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks import picture, report
from benchmarks.plan import MIB, Limits, Stage, full_plan
from benchmarks.runner import Settings, run

LIMITS = Limits(largest=MIB, workers=2, idle_workers=2, clients=(1, 2), wide=16)
SETTINGS = Settings(repeats=1, seconds=0.01, pause=0.0)


def tiny_plan() -> list[Stage]:
    return full_plan(LIMITS, ray=False)


def main(folder: Path) -> None:
    stages = tiny_plan()
    measured = run(stages, SETTINGS, print)
    (folder / "report.json").write_text(report.to_json(measured), encoding="utf-8")
    (folder / "report.md").write_text(report.to_markdown(measured, stages), encoding="utf-8")
    picture.draw(measured.results, folder / "report.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
