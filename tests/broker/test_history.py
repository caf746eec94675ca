"""The memory of what has happened, and the rates."""

from __future__ import annotations

import pytest

from tensorplay.broker.history import (
    MAX_HAPPENINGS,
    MAX_SAMPLES,
    Counts,
    History,
    Rates,
)


def test_what_happens_again_counts_as_one() -> None:
    history = History()
    for now in (1.0, 2.0, 3.0):
        history.note(now, "error", "n", "w", "it raised")
        history.note(now, "error", "n", "v", "it raised")
    assert [(h.peer, h.count, h.time) for h in history.happenings] == [
        ("w", 3, 3.0),
        ("v", 3, 3.0),
    ]


def test_happenings_and_samples_are_bounded() -> None:
    history = History()
    for number in range(1000):
        history.note(number, "joined", "n", f"w{number}", "")
        history.sample(number, [], 0.0)
    assert len(history.happenings) == MAX_HAPPENINGS
    assert len(history.samples) == MAX_SAMPLES
    assert history.happenings[-1].peer == "w999"


def test_rates_are_differences_over_the_window() -> None:
    rates = Rates()
    assert rates.now() == Counts()
    for second in range(10):
        rates.add(second, Counts(messages_in=10 * second, calls_made=3 * second))
    assert rates.now() == Counts(messages_in=10, calls_made=3)
    rates.add(10, Counts(messages_in=90, calls_made=127))
    assert rates.last().messages_in == 0
    assert rates.last().calls_made == 100


def test_a_clock_that_stands_still_gives_no_rate() -> None:
    rates = Rates()
    rates.add(1.0, Counts(messages_in=1))
    rates.add(1.0, Counts(messages_in=5))
    assert rates.last() == Counts()


def test_a_sample_weighs_the_medians_by_the_calls() -> None:
    quick, slow = Rates(), Rates()
    for second in (0, 1):
        quick.add(second, Counts(calls_made=second * 30, bytes_in=second * 100))
        slow.add(second, Counts(calls_made=second * 10))
    history = History()
    history.sample(
        1.0,
        [
            (quick, {"call_p50": 0.001, "call_p99": 0.002}),
            (slow, {"call_p50": 0.1, "call_p99": 0.5}),
            (Rates(), {"call_p50": 9.0, "call_p99": 9.0}),
        ],
        0.003,
    )
    (sample,) = history.samples
    assert sample.calls == 40
    assert sample.bytes == 100
    assert sample.p50 == pytest.approx((30 * 0.001 + 10 * 0.1) / 40)
    assert sample.p99 == 0.5
    assert sample.peers == 3
    assert sample.loop == 0.003
