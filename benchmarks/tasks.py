"""The measured loops: the same for every system, run in a client's process.

Each task is given the peer, how many seconds it may take, and its arguments; it warms up, measures
and returns named numbers.  Times are in seconds, rates in calls a second, bandwidths in bytes a
second; ``calls`` counts those of the warm-up, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

import torch

from benchmarks import functions
from benchmarks.results import percentile
from benchmarks.systems.base import Peer, Pending

Numbers = dict[str, float]
Task = Callable[..., Numbers]

#: How often a loop runs before it is measured.
WARM_UP = 3
#: Even the slowest loop is measured so often, after it has run once to be warm.
LEAST = 1


def latency(peer: Peer, seconds: float, worker: int = 0) -> Numbers:
    """Calls that do nothing, one after the other."""
    target = peer.workers[worker]
    return _latencies(lambda: peer.call(target, functions.nothing), seconds)


def forward(peer: Peer, seconds: float, width: int = 8, worker: int = 0) -> Numbers:
    """Calls of a remote ``Linear`` on one row, whose result can be trained."""
    layer = peer.layer(peer.workers[worker], width)
    row = torch.ones(1, width)
    return _latencies(lambda: layer(row), seconds)


def rate(
    peer: Peer, seconds: float, in_flight: int = 1000, elements: int = 0, spread: bool = False
) -> Numbers:
    """Calls of which so many are always under way.

    Args:
        peer: The client.
        seconds: How long.
        in_flight: How many are under way.
        elements: Size of the tensor that each takes there and back doubled; 0 is an empty call.
        spread: Whether the calls go to all workers in turn, rather than to the first.
    """
    targets = list(peer.workers) if spread else [peer.workers[0]]
    call = _submitter(peer, elements)
    under_way: deque[Pending] = deque()

    def turn() -> None:
        for target in targets:
            under_way.append(call(target))

    warm = 0
    while warm < 2 * in_flight:
        turn()
        warm += len(targets)
        _drop(under_way, len(under_way) - in_flight)
    done, start = 0, perf_counter()
    end = start + seconds
    while (now := perf_counter()) < end:
        for _ in range(_BETWEEN_LOOKS):
            turn()
            _drop(under_way, len(targets))
        done += _BETWEEN_LOOKS * len(targets)
    _drop(under_way, len(under_way))
    return {"rate": done / (now - start), "calls": done + warm}


#: Turns between two looks at the clock.
_BETWEEN_LOOKS = 50


def push(peer: Peer, seconds: float, nbytes: int, worker: int = 0) -> Numbers:
    """Sends a tensor, and gets nothing back."""
    target, tensor = peer.workers[worker], functions.payload(nbytes)
    return _bandwidth(lambda: peer.call(target, functions.swallow, tensor), seconds, nbytes)


def pull(peer: Peer, seconds: float, nbytes: int, worker: int = 0) -> Numbers:
    """Gets a tensor that lies at the worker."""
    target = peer.workers[worker]
    return _bandwidth(
        lambda: peer.call(target, functions.give, nbytes), seconds, nbytes, expected=nbytes
    )


def echo(peer: Peer, seconds: float, nbytes: int, worker: int = 0) -> Numbers:
    """Sends a tensor and gets it back; the bytes of one way are counted."""
    target, tensor = peer.workers[worker], functions.payload(nbytes)
    return _bandwidth(
        lambda: peer.call(target, functions.echo, tensor), seconds, nbytes, expected=nbytes
    )


def train(peer: Peer, seconds: float, width: int, batch: int) -> Numbers:
    """Steps of training through a layer on each worker."""
    torch.manual_seed(0)
    inputs, targets = torch.randn(batch, width), torch.randn(batch, width)
    step = peer.trainer(peer.workers, width)
    first = step(inputs, targets)
    numbers = _latencies(lambda: step(inputs, targets), seconds)
    if not step(inputs, targets) < first:
        raise RuntimeError("the training step does not train: its loss has not fallen")
    return numbers


def fan_out(peer: Peer, seconds: float, nbytes: int = 0) -> Numbers:
    """Rounds of one call to each worker, and a wait for all of them."""
    call = _submitter(peer, nbytes // 4)

    def turn() -> None:
        for pending in [call(worker) for worker in peer.workers]:
            pending.wait()

    numbers = _latencies(turn, seconds)
    numbers["calls"] *= len(peer.workers)
    return numbers


def _submitter(peer: Peer, elements: int) -> Callable[[Any], Pending]:
    if not elements:
        return lambda worker: peer.submit(worker, functions.nothing)
    tensor = torch.ones(elements)
    return lambda worker: peer.submit(worker, functions.double, tensor)


def _drop(under_way: deque[Pending], count: int) -> None:
    for _ in range(count):  # none, if it is negative
        under_way.popleft().wait()


def _bandwidth(call: Callable[[], Any], seconds: float, nbytes: int, expected: int = 0) -> Numbers:
    """Measures a transfer, after a look at whether what comes back is all of it."""
    looked = False

    def look_once() -> None:
        nonlocal looked
        got = call()
        if not looked and expected and got.nbytes != expected:
            raise RuntimeError(f"expected {expected} bytes back, got {got.nbytes}")
        looked = True

    numbers = _latencies(look_once, seconds)
    return {"bandwidth": nbytes / numbers["p50"], "calls": numbers["calls"]}


def _latencies(call: Callable[[], Any], seconds: float) -> Numbers:
    warm = perf_counter()
    for before in range(1, WARM_UP + 1):  # noqa: B007
        call()
        if perf_counter() - warm > seconds:
            break
    times = sorted(_timed(call, seconds))
    return {
        "p50": percentile(times, 50),
        "p99": percentile(times, 99),
        "calls": before + len(times),
    }


def _timed(call: Callable[[], Any], seconds: float) -> Iterator[float]:
    end, count = perf_counter() + seconds, 0
    while (start := perf_counter()) < end or count < LEAST:
        call()
        yield perf_counter() - start
        count += 1


TASKS: dict[str, Task] = {
    task.__name__: task for task in (latency, forward, rate, push, pull, echo, train, fan_out)
}
