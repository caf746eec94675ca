from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import picture, report
from benchmarks.machine import Load, LoadMeter, copy_bandwidth
from benchmarks.results import Cell, Results, percentile
from benchmarks.runner import Report, Settings
from benchmarks.targets import Target

QUIET = Load(seconds=1.0, foreign=0.0, steal=0.0, average=0.5)


def results(**medians: float) -> Results:
    """Results of one measurement, ``empty call``, by system."""
    made = Results()
    for system, value in medians.items():
        made.add("empty call", system, {"p50": value, "calls": 3}, QUIET)
    return made


def test_percentiles() -> None:
    values = [float(value) for value in range(100)]
    assert percentile(values, 50) == 50
    assert percentile(values, 99) == 99
    assert percentile([1.0], 99) == 1
    assert percentile(values, 100) == 99
    with pytest.raises(ValueError, match="at least one"):
        percentile([], 50)
    with pytest.raises(ValueError, match="from 0 to 100"):
        percentile([1.0], 101)


def test_numbers_without_a_unit_are_not_kept() -> None:
    assert set(results(torch=1.0).cells) == {("empty call", "p50", "torch")}


@pytest.mark.parametrize(
    ("samples", "load", "words"),
    [
        ([1.0, 1.01, 1.02], QUIET, []),
        ([1.0, 1.0], Load(1.0, 0.3, 0.0, 4.0), ["others used 30% of the machine"]),
        ([1.0, 1.0], Load(1.0, 0.0, 0.05, 1.0), ["the host withheld 5%"]),
        ([1.0, 2.0], QUIET, ["the repeats spread over 67%"]),
        # One repeat of five that went wrong moves neither the median nor the spread.
        ([1.0, 1.0, 1.01, 1.02, 9.0], QUIET, []),
        ([0.0, 0.0], QUIET, []),
    ],
)
def test_disturbed_cells_say_what_disturbed_them(
    samples: list[float], load: Load, words: list[str]
) -> None:
    assert Cell(samples, [load] * len(samples)).disturbances == words


def test_ratios_are_of_medians_and_need_both_sides() -> None:
    made = results(tensorplay=2.0, torch=4.0)
    made.add("empty call", "torch", {"p50": 8.0}, QUIET)
    made.add("empty call", "torch", {"p50": 4.0}, QUIET)
    assert made.ratio("empty call", "p50", "tensorplay", "torch") == 0.5
    assert made.ratio("empty call", "p50", "tensorplay", "ray") is None
    assert made.ratio("empty call", "p99", "tensorplay", "torch") is None


@pytest.mark.parametrize(
    ("mine", "at_most", "verdict"),
    [
        (0.5, True, "stretch"),
        (0.9, True, "met"),
        (1.1, True, "missed"),
        (0.9, False, "missed"),
        (1.0, False, "met"),
        (1.5, False, "stretch"),
    ],
)
def test_verdicts(mine: float, at_most: bool, verdict: str) -> None:
    target = Target(
        "t", "p50", "empty call", "tensorplay", 1.0, 0.6 if at_most else 1.4, at_most=at_most
    )
    assert target.verdict(results(tensorplay=mine, torch=1.0)) == verdict
    assert target.verdict(results(tensorplay=mine)) == "not measured"


def test_targets_say_whether_they_rest_on_disturbed_cells() -> None:
    target = Target("t", "p50", "empty call", "tensorplay", 1.0, 0.6, at_most=True)
    made = results(tensorplay=1.0, torch=1.0)
    assert not target.disturbed(made)
    made.add("empty call", "torch", {"p50": 9.0}, QUIET)
    assert target.disturbed(made)


def test_speedups_count_times_upside_down() -> None:
    made = results(tensorplay=2.0, torch=4.0, local=1.0)
    made.add("push", "tensorplay", {"bandwidth": 6.0}, QUIET)
    made.add("push", "torch", {"bandwidth": 2.0}, QUIET)
    assert picture.speedups(made) == {
        "empty call": {"tensorplay": 2.0},
        "push": {"tensorplay": 3.0},
    }


def test_no_picture_of_nothing(tmp_path: Path) -> None:
    assert not picture.draw(results(local=1.0), tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (1.5, "s", "1.5 s"),
        (2.5e-3, "s", "2.5 ms"),
        (4e-6, "s/call", "4 us"),
        (1.25e9, "B/s", "1.25 GB/s"),
        (5e6, "B/s", "5 MB/s"),
        (3 << 20, "B", "3.0 MiB"),
        (216_000, "calls/s", "216,000 /s"),
        (0.0123, "cores", "1.23% of a core"),
    ],
)
def test_numbers_for_people(value: float, unit: str, text: str) -> None:
    assert report.with_unit(value, unit) == text


def test_what_is_missing_is_reported_with_the_reason() -> None:
    made = results(torch=1.0)
    made.missing["empty call", "ray"] = "did not start: a | b"
    machine = {
        "packages": {"torch": "2"},
        "memory_copy_bytes_per_second": {"1048576": 1e9},
        "cores": 2,
        "processor": "p",
        "memory_bytes": 1 << 30,
        "system": "s",
        "python": "3",
    }
    whole = Report("now", 1.0, machine, Settings(), made)
    assert "| empty call  | ray    | did not start: a / b |" in report.to_markdown(whole, [])
    assert json.loads(report.to_json(whole))["missing"][0]["system"] == "ray"


def test_the_load_of_others_is_what_is_not_ones_own() -> None:
    meter = LoadMeter(own_seconds=0.0)
    load = meter.stop(own_seconds=1e6)  # more than there can have been: nothing is left
    assert load.foreign == 0.0
    assert load.seconds > 0


def test_the_machine_copies_memory() -> None:
    assert copy_bandwidth(4096) > 0
