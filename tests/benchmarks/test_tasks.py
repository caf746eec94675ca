"""The measured loops, on the system that needs no other process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import functions, tasks
from benchmarks.systems.base import PeerSpec, Shape, Step
from benchmarks.systems.local_system import LocalPeer

SECONDS = 0.005


@pytest.fixture
def peer() -> LocalPeer:
    return LocalPeer(PeerSpec("local", Shape(workers=3), 0, ""))


@pytest.mark.parametrize(
    ("task", "arguments", "numbers"),
    [
        ("latency", {}, {"p50", "p99"}),
        ("forward", {"width": 4}, {"p50", "p99"}),
        ("rate", {"in_flight": 10}, {"rate"}),
        ("rate", {"in_flight": 10, "elements": 4, "spread": True}, {"rate"}),
        ("push", {"nbytes": 1024}, {"bandwidth"}),
        ("pull", {"nbytes": 1024}, {"bandwidth"}),
        ("echo", {"nbytes": 1024}, {"bandwidth"}),
        ("train", {"width": 4, "batch": 2}, {"p50", "p99"}),
        ("fan_out", {}, {"p50", "p99"}),
        ("fan_out", {"nbytes": 1024}, {"p50", "p99"}),
    ],
)
def test_a_task_returns_its_numbers(
    peer: LocalPeer, task: str, arguments: dict[str, Any], numbers: set[str]
) -> None:
    measured = tasks.TASKS[task](peer, SECONDS, **arguments)
    assert set(measured) == {*numbers, "calls"}
    assert all(value > 0 for value in measured.values())


def test_a_slow_call_is_measured_once_after_it_has_run_once(peer: LocalPeer) -> None:
    assert tasks.push(peer, 0.0, nbytes=1024)["calls"] == 1 + tasks.LEAST


def test_so_many_calls_are_under_way(peer: LocalPeer) -> None:
    under_way, most = 0, 0

    class Counted:
        def __init__(self) -> None:
            nonlocal under_way, most
            under_way += 1
            most = max(most, under_way)

        def wait(self) -> None:
            nonlocal under_way
            under_way -= 1

    peer.submit = lambda *args: Counted()  # type: ignore[assignment, method-assign]
    tasks.rate(peer, SECONDS, in_flight=30, spread=True)
    assert under_way == 0
    assert 30 <= most <= 30 + len(peer.workers)


def test_too_few_bytes_back_are_an_error(peer: LocalPeer) -> None:
    peer.call = lambda *args: torch.ones(1)  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="expected 1024 bytes back, got 4"):
        tasks.pull(peer, SECONDS, nbytes=1024)


def test_a_step_that_does_not_train_is_an_error(peer: LocalPeer) -> None:
    def trainer(workers: object, width: int) -> Step:
        return lambda inputs, targets: 1.0

    peer.trainer = trainer  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="its loss has not fallen"):
        tasks.train(peer, SECONDS, width=4, batch=2)


def test_of_large_tensors_one_is_kept() -> None:
    small = functions.payload(1024)
    assert functions.payload(1024) is small
    assert functions.give(1024) is small
    assert functions.payload(functions._LARGE + 4).nbytes == functions._LARGE + 4
    assert functions.payload(1024) is not small
