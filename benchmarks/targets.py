"""What is to be reached, in ratios of medians within one run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from benchmarks.results import Results

Verdict = Literal["stretch", "met", "missed", "not measured"]


@dataclass(frozen=True)
class Target:
    """A ratio to reach: subject over base.

    Attributes:
        title: What the report calls it.
        number: Which number of the measurement.
        measurement: The subject's measurement.
        system: The subject's system.
        base_system: The other system.
        base_measurement: The other measurement; empty for the same.
        limit: The ratio to reach.
        stretch: The ratio to hope for.
        at_most: Whether less is better.
    """

    title: str
    number: str
    measurement: str
    system: str
    limit: float
    stretch: float
    at_most: bool = False
    base_system: str = "torch"
    base_measurement: str = ""

    def ratio(self, results: Results) -> float | None:
        """Returns the ratio, or None if a side was not measured."""
        mine = results.cell(self.measurement, self.number, self.system)
        base = results.cell(
            self.base_measurement or self.measurement, self.number, self.base_system
        )
        if mine is None or base is None or not base.median:
            return None
        return mine.median / base.median

    def verdict(self, results: Results) -> Verdict:
        """Says whether it was reached."""
        ratio = self.ratio(results)
        if ratio is None:
            return "not measured"
        sign = 1 if self.at_most else -1
        if sign * ratio <= sign * self.stretch:
            return "stretch"
        return "met" if sign * ratio <= sign * self.limit else "missed"

    @property
    def text(self) -> str:
        """The target in words."""
        word = "at most" if self.at_most else "at least"
        return f"{word} {self.limit:g}x ({self.stretch:g}x)"

    def disturbed(self, results: Results) -> bool:
        """Whether a cell that it rests on was disturbed."""
        cells = (
            results.cell(self.measurement, self.number, self.system),
            results.cell(self.base_measurement or self.measurement, self.number, self.base_system),
        )
        return any(cell is not None and cell.disturbances for cell in cells)


#: For each size: over shared memory, its stretch; over frames, its stretch.
_TRANSFERS: tuple[tuple[str, tuple[float, float], tuple[float, float] | None], ...] = (
    ("64 KiB", (1.2, 1.5), (0.9, 1.2)),
    ("1 MiB", (1.4, 2.0), (1.0, 1.3)),
    ("16 MiB", (2.0, 3.0), (0.6, 1.0)),
    ("128 MiB", (6.0, 9.0), (1.3, 2.0)),
    ("1 GiB", (6.0, 9.0), None),
)


def _transfers() -> list[Target]:
    targets = []
    for size, shared, frames in _TRANSFERS:
        for task in ("push", "pull"):
            name = f"{task} {size}"
            targets.append(Target(f"{name}, same host", "bandwidth", name, "tensorplay", *shared))
            if frames is not None:
                targets.append(Target(f"{name}, over frames", "bandwidth", name, "frames", *frames))
    return sorted(targets, key=lambda target: target.system, reverse=True)


TARGETS: tuple[Target, ...] = (
    Target("empty call, p50", "p50", "empty call", "tensorplay", 1.0, 0.6, at_most=True),
    Target(
        "RemoteModule forward, p50",
        "p50",
        "RemoteModule forward",
        "tensorplay",
        0.67,
        0.5,
        at_most=True,
    ),
    Target("empty calls a second", "rate", "empty calls", "tensorplay", 20, 40),
    Target("one-tensor calls a second", "rate", "one-tensor calls", "tensorplay", 6, 10),
    *_transfers(),
    Target(
        "small training step",
        "p50",
        "training step, 2 x 64x64, batch 8",
        "tensorplay",
        0.6,
        0.4,
        at_most=True,
    ),
    Target(
        "p99 of an empty call while 1 GiB is pushed, against an idle broker",
        "p99",
        "empty call, 1 GiB pushed meanwhile",
        "frames",
        3.0,
        1.5,
        at_most=True,
        base_system="frames",
        base_measurement="empty call, idle broker",
    ),
)
