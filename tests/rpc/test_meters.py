"""Durations in buckets, and what is told of them."""

from __future__ import annotations

import random

import pytest

from tensorplay.distributed.rpc.meters import BOUNDS, Histogram, Meters


@pytest.mark.parametrize("seconds", [2e-6, 1.5e-5, 3.3e-4, 0.0012, 0.05, 0.9, 7.0, 300.0])
def test_a_quantile_is_near_the_duration(seconds: float) -> None:
    histogram = Histogram()
    histogram.add(seconds)
    (median,) = histogram.recent(0.5)
    assert median == pytest.approx(seconds, rel=0.125)


def test_quantiles_are_those_of_a_sorted_list() -> None:
    rng = random.Random(1)
    durations = [rng.lognormvariate(-6, 1.5) for _ in range(5000)]
    histogram = Histogram()
    for seconds in durations:
        histogram.add(seconds)
    durations.sort()
    median, high = histogram.recent(0.5, 0.99)
    assert median == pytest.approx(durations[2500], rel=0.2)
    assert high == pytest.approx(durations[4950], rel=0.2)
    assert histogram.count == 5000
    assert histogram.total == pytest.approx(sum(durations))


def test_quantiles_forget_what_is_long_past() -> None:
    histogram = Histogram()
    histogram.add(5.0)
    for _ in range(20):
        histogram.recent(0.5)
    assert histogram.recent(0.5, 0.99) == [0.0, 0.0]
    histogram.add(0.001)
    assert histogram.recent(0.99)[0] == pytest.approx(0.001, rel=0.125)
    assert histogram.count == 2


@pytest.mark.parametrize("seconds", [0.0, -1.0, 1e-12, 1e9])
def test_absurd_durations_are_counted_at_an_end(seconds: float) -> None:
    histogram = Histogram()
    histogram.add(seconds)
    assert histogram.count == 1


def test_the_told_buckets_grow() -> None:
    histogram = Histogram()
    for seconds in (5e-5, 2e-3, 0.2, 100.0):
        histogram.add(seconds)
    below = histogram.below()
    assert below == sorted(below)
    assert below[0] == 1
    assert below[BOUNDS.index(3e-3)] == 2
    assert below[-1] == 3


def test_errors_are_told_once_and_are_bounded() -> None:
    meters = Meters()
    for number in range(100):
        meters.error("client", f"ValueError: {number}" + "x" * 1000)
    errors = meters.take_errors()
    assert len(errors) == 16
    assert all(len(error) <= 300 for error in errors)
    assert meters.take_errors() == []
    assert meters.stats()["calls_failed"] == 100


def test_a_process_without_calls_says_little() -> None:
    stats = Meters().stats()
    assert stats["calls_made"] == stats["calls_served"] == 0
    assert stats["memory_bytes"] > 0
    assert "call_p50" not in stats
