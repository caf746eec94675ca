"""The report of a run: JSON to keep, Markdown to read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.plan import Stage
from benchmarks.results import UNITS, Cell, Results
from benchmarks.runner import Report
from benchmarks.targets import TARGETS, Verdict

_MARKS: dict[Verdict, str] = {
    "stretch": "met, stretch too",
    "met": "met",
    "missed": "**missed**",
    "not measured": "not measured",
}
#: What systems are compared with, the first that was measured.
_BASES = ("torch", "frames", "tensorplay")
_DISTURBED = " ~"


def to_json(report: Report) -> str:
    """Returns everything of a run as JSON."""
    results = report.results
    return json.dumps(
        {
            "started": report.started,
            "seconds": report.seconds,
            "machine": report.machine,
            "settings": asdict(report.settings),
            "cells": [
                {
                    "measurement": measurement,
                    "number": number,
                    "unit": UNITS[number][0],
                    "system": system,
                    **cell.to_json(),
                }
                for (measurement, number, system), cell in results.cells.items()
            ],
            "missing": [
                {"measurement": measurement, "system": system, "reason": reason}
                for (measurement, system), reason in results.missing.items()
            ],
            "targets": [
                {
                    "title": target.title,
                    "target": target.text,
                    "ratio": target.ratio(results),
                    "verdict": target.verdict(results),
                    "disturbed": target.disturbed(results),
                }
                for target in TARGETS
            ],
        },
        indent=1,
    )


def to_markdown(report: Report, stages: Iterable[Stage]) -> str:
    """Returns the report as Markdown.

    Args:
        report: The run.
        stages: Its plan.
    """
    parts = [_header(report), targetstable(report.results)]
    parts += [_stage(report.results, stage) for stage in stages]
    if report.results.missing:
        parts.append(_missing(report.results))
    return "\n\n".join(part for part in parts if part) + "\n"


def targetstable(results: Results) -> str:
    """Returns the table of the targets that were measured, and whether they were met."""
    rows = [
        (
            target.title,
            target.text,
            f"{ratio:.2f}x{_DISTURBED if target.disturbed(results) else ''}",
            _MARKS[target.verdict(results)],
        )
        for target in TARGETS
        if (ratio := target.ratio(results)) is not None
    ]
    if not rows:
        return ""
    met = sum("missed" not in row[-1] for row in rows)
    text = table(("target", "ratio to reach (stretch)", "measured", ""), rows)
    return f"## Targets: {met} of {len(rows)} met\n\n{text}"


def _header(report: Report) -> str:
    machine, settings = report.machine, report.settings
    packages = ", ".join(f"{name} {found}" for name, found in machine["packages"].items())
    copies = ", ".join(
        f"{rate / 1e9:.1f} GB/s at {int(size) >> 20} MiB"
        for size, rate in machine["memory_copy_bytes_per_second"].items()
    )
    return (
        f"# Benchmark report\n\n"
        f"Measured {report.started} in {report.seconds:.0f} s, the median of {settings.repeats} "
        f"repeats of {settings.seconds:g} s each, {settings.threads} thread"
        f"{'s' if settings.threads > 1 else ''} for torch's operators in each process.\n\n"
        f"{machine['cores']} cores of {machine['processor']}, "
        f"{machine['memory_bytes'] / (1 << 30):.0f} GiB of memory, {machine['system']}, "
        f"Python {machine['python']}, {packages}. One thread copies memory at {copies}.\n\n"
        f"A number with{_DISTURBED} was disturbed: others used the machine meanwhile, or its "
        "repeats lie far apart; the JSON file says what it was."
    )


def _stage(results: Results, stage: Stage) -> str:
    keys = [
        (measurement.name, number)
        for measurement in stage.measurements
        for number in UNITS
        if any((measurement.name, number, system) in results.cells for system in stage.groups)
    ]
    systems = [
        system for system in stage.groups if any((*key, system) in results.cells for key in keys)
    ]
    if not systems:
        return ""
    base = next((system for system in _BASES if system in systems), systems[0])
    others = [system for system in systems if system != base]
    head = ["", *systems, *(f"{system} / {base}" for system in others)]
    rows = []
    for measurement, number in keys:
        ratios = [results.ratio(measurement, number, system, base) for system in others]
        rows.append(
            (
                f"{measurement}, {number}",
                *(_cell(results.cell(measurement, number, system), number) for system in systems),
                *("" if ratio is None else f"{ratio:.2f}x" for ratio in ratios),
            )
        )
    return f"## {stage.name[:1].upper()}{stage.name[1:]}\n\n{table(head, rows)}"


def _missing(results: Results) -> str:
    rows = [(*key, reason.replace("|", "/")) for key, reason in results.missing.items()]
    return f"## Not measured\n\n{table(('measurement', 'system', 'why'), rows)}"


def _cell(cell: Cell | None, number: str) -> str:
    if cell is None:
        return ""
    return with_unit(cell.median, UNITS[number][0]) + (_DISTURBED if cell.disturbances else "")


def with_unit(value: float, unit: str) -> str:
    """Returns a number with its unit, to three digits, for people."""
    if unit in ("s", "s/call"):
        for factor, name in ((1.0, "s"), (1e3, "ms")):
            if value * factor >= 1:
                return f"{value * factor:.3g} {name}"
        return f"{value * 1e6:.3g} us"
    if unit == "B/s":
        return f"{value / 1e9:.3g} GB/s" if value >= 1e8 else f"{value / 1e6:.3g} MB/s"
    if unit == "B":
        return f"{value / (1 << 20):,.1f} MiB"
    if unit == "calls/s":
        return f"{value:,.0f} /s"
    return f"{value:.2%} of a core"


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Returns a Markdown table whose columns line up."""
    rows = [tuple(head), *(tuple(map(str, row)) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in rows]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)
