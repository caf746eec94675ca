"""Numbers, and what is made of them: medians, spreads, ratios, marks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.machine import Load

#: A cell is marked when others used more than this share of the machine,
MAX_FOREIGN = 0.10
#: the host withheld more than this,
MAX_STEAL = 0.02
#: or half of its repeats lie further apart than this share of their median.
MAX_SPREAD = 0.30

#: What the numbers that tasks return are measured in, and whether more is better.
UNITS = {
    "p50": ("s", False),
    "p99": ("s", False),
    "rate": ("calls/s", True),
    "bandwidth": ("B/s", True),
    "broker CPU": ("s/call", False),
    "idle broker": ("cores", False),
    "idle worker": ("cores", False),
    "broker": ("B", False),
    "worker": ("B", False),
    "client": ("B", False),
}


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Returns the value below which that many percent lie.

    Args:
        ordered: Values in ascending order, at least one.
        percent: From 0 to 100.

    Raises:
        ValueError: If there is no value, or no such percentile.
    """
    if not ordered:
        raise ValueError("a percentile needs at least one value")
    if not 0 <= percent <= 100:
        raise ValueError(f"percent is from 0 to 100, got {percent}")
    return ordered[min(int(len(ordered) * percent / 100), len(ordered) - 1)]


@dataclass
class Cell:
    """All repeats of one number of one system.

    Attributes:
        samples: One value for each repeat.
        loads: What else went on during each.
    """

    samples: list[float] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)

    @property
    def median(self) -> float:
        """The median of the repeats."""
        return median(self.samples)

    @property
    def spread(self) -> float:
        """How far the middle half of the repeats lies apart, as a share of their median."""
        ordered = sorted(self.samples)
        if len(ordered) < 2 or not self.median:
            return 0.0
        quarter = len(ordered) // 4
        return (ordered[-1 - quarter] - ordered[quarter]) / abs(self.median)

    @property
    def disturbances(self) -> list[str]:
        """Why the cell is to be taken with care, in words; empty if nothing was wrong."""
        found = []
        seconds = sum(load.seconds for load in self.loads) or 1.0
        foreign = sum(load.foreign * load.seconds for load in self.loads) / seconds
        steal = sum(load.steal * load.seconds for load in self.loads) / seconds
        if foreign > MAX_FOREIGN:
            found.append(f"others used {foreign:.0%} of the machine")
        if steal > MAX_STEAL:
            found.append(f"the host withheld {steal:.0%}")
        if self.spread > MAX_SPREAD:
            found.append(f"the repeats spread over {self.spread:.0%}")
        return found

    def to_json(self) -> dict[str, Any]:
        """Returns the cell for the JSON file."""
        return {
            "median": self.median,
            "samples": self.samples,
            "spread": self.spread,
            "disturbances": self.disturbances,
            "load_average": max((load.average for load in self.loads), default=None),
        }


@dataclass
class Results:
    """Everything that was measured.

    Attributes:
        cells: By measurement, number and system, in the order in which they were measured.
        missing: Why there is no number, by measurement and system.
    """

    cells: dict[tuple[str, str, str], Cell] = field(default_factory=dict)
    missing: dict[tuple[str, str], str] = field(default_factory=dict)

    def add(
        self, measurement: str, system: str, numbers: dict[str, float], load: Load | None
    ) -> None:
        """Adds the numbers of one repeat."""
        for name, value in numbers.items():
            if name in UNITS:
                cell = self.cells.setdefault((measurement, name, system), Cell())
                cell.samples.append(value)
                if load is not None:
                    cell.loads.append(load)

    def cell(self, measurement: str, number: str, system: str) -> Cell | None:
        """Returns a cell, if it was measured."""
        return self.cells.get((measurement, number, system))

    def ratio(self, measurement: str, number: str, system: str, base: str) -> float | None:
        """Returns the ratio of a system's median to another's, if both were measured."""
        mine = self.cell(measurement, number, system)
        other = self.cell(measurement, number, base)
        if mine is None or other is None or not other.median:
            return None
        return mine.median / other.median
