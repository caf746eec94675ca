"""A picture of how many times as fast as torch.distributed.rpc each thing is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.results import UNITS, Results
from benchmarks.targets import TARGETS

_BASE = "torch"
_COLOURS = {"tensorplay": "#2a6fbb", "frames": "#8fb8de", "ray": "#c98b3c"}
#: Numbers of which a bar is drawn.
_DRAWN = ("p50", "rate", "bandwidth")


def speedups(results: Results) -> dict[str, dict[str, float]]:
    """Returns how many times as fast as torch each system is, by thing measured and system."""
    found: dict[str, dict[str, float]] = {}
    for measurement, number, system in results.cells:
        ratio = results.ratio(measurement, number, system, _BASE)
        if system in _COLOURS and number in _DRAWN and ratio:
            faster = ratio if UNITS[number][1] else 1 / ratio
            found.setdefault(measurement, {})[system] = faster
    return found


def draw(results: Results, path: Path) -> bool:
    """Draws the picture; returns whether there was anything to draw.

    Args:
        results: What was measured.
        path: Where to write it; the suffix says as what.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    bars = speedups(results)
    if not bars:
        return False
    systems = [name for name in _COLOURS if any(name in each for each in bars.values())]
    figure = Figure(figsize=(9, 1.2 + 0.26 * len(bars) * max(len(systems), 1)))
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    height = 0.8 / len(systems)
    for place, system in enumerate(systems):
        rows = [row for row, each in enumerate(bars.values()) if system in each]
        widths = [each[system] for each in bars.values() if system in each]
        axes.barh(
            [row + (place - (len(systems) - 1) / 2) * height for row in rows],
            [width - 1 for width in widths],
            left=1,
            height=height,
            color=_COLOURS[system],
            label=system,
        )
        for row, width in zip(rows, widths, strict=True):
            axes.annotate(
                f"{width:.3g}x",
                (max(width, 1), row + (place - (len(systems) - 1) / 2) * height),
                xytext=(3, 0),
                textcoords="offset points",
                va="center",
                fontsize=7,
            )
    _mark_targets(axes, list(bars))
    axes.set_xscale("log")
    axes.set_yticks(range(len(bars)), labels=list(bars), fontsize=8)
    axes.invert_yaxis()
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("times as fast as torch.distributed.rpc (logarithmic); | is the target")
    axes.margins(x=0.1)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="best", frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    return True


def _mark_targets(axes: Any, names: list[str]) -> None:
    for target in TARGETS:
        if (target.base_system, target.system) != (_BASE, "tensorplay"):
            continue
        if target.measurement in names:
            limit = 1 / target.limit if target.at_most else target.limit
            row = names.index(target.measurement)
            axes.plot(limit, row, "|", color="black", markersize=11)
