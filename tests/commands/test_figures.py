"""Numbers as people read them."""

from __future__ import annotations

import pytest

from tensorplay.commands import figures


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0 µs"),
        (0.000087, "87 µs"),
        (0.00123, "1.23 ms"),
        (0.9996, "1 s"),
        (3.44, "3.44 s"),
        (59.99, "1 min 0 s"),
        (125, "2 min 5 s"),
        (7500, "2 h 5 min"),
        (400000, "4 d 15 h"),
    ],
)
def test_durations(value: float, text: str) -> None:
    assert figures.seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (999, "999 B"), (1536, "1.5 KiB"), (20 << 30, "20 GiB"), (3 << 40, "3 TiB")],
)
def test_bytes(value: float, text: str) -> None:
    assert figures.size(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.42, "0.4"), (9.96, "10"), (1250, "1,250")]
)
def test_rates(value: float, text: str) -> None:
    assert figures.rate(value) == text
