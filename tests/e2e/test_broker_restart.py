"""The broker is killed and started again: nothing is lost, nothing is done twice."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from tensorplay.distributed import rpc
from tests.rpc import helpers

#: Far above what a restart takes on a loaded machine; a call that is lost would take it all.
TIMEOUT = 60.0


class Crashing:
    """A broker that can be killed and started again at its address, and its one worker."""

    def __init__(self, port: int) -> None:
        self.address = f"tcp://127.0.0.1:{port}"
        self.broker: subprocess.Popen[bytes] | None = None
        self.start()
        self.worker = subprocess.Popen(
            [sys.executable, "-m", "tensorplay.worker", "--broker", self.address, "--name", "w"]
        )

    def start(self) -> None:
        command = [sys.executable, "-m", "tensorplay.broker", "--bind", self.address]
        self.broker = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self.broker.stdout is not None
        assert self.broker.stdout.readline()

    def kill(self) -> None:
        assert self.broker is not None
        assert self.broker.stdout is not None
        self.broker.kill()
        self.broker.wait()
        self.broker.stdout.close()

    def close(self) -> None:
        self.worker.kill()
        self.worker.wait()
        self.kill()


@pytest.fixture
def crashing(free_port: int) -> Iterator[Crashing]:
    running = Crashing(free_port)
    try:
        rpc.init_rpc("client", broker=running.address)
        rpc.wait_for_workers(["w"], timeout=TIMEOUT)
        yield running
    finally:
        if rpc._is_current_rpc_agent_set():
            rpc.shutdown(graceful=False)
        running.close()


def test_calls_survive_that_are_in_flight_or_made_meanwhile(crashing: Crashing) -> None:
    counter = rpc.remote("w", helpers.Counter, (0,))
    assert counter.rpc_sync().increment() == 1
    waiting = rpc.rpc_async("w", helpers.wait_event, ("go", TIMEOUT), timeout=TIMEOUT)
    before = [counter.rpc_async(timeout=TIMEOUT).increment() for _ in range(100)]
    crashing.kill()
    between = [counter.rpc_async(timeout=TIMEOUT).increment() for _ in range(100)]
    crashing.start()
    after = [counter.rpc_async(timeout=TIMEOUT).increment() for _ in range(100)]
    rpc.rpc_sync("w", helpers.set_event, ("go",), timeout=TIMEOUT)
    assert waiting.wait(TIMEOUT)
    # Each was done, and once: the numbers from 2 on, in whatever order threads took them.
    results = [future.wait(TIMEOUT) for future in (*before, *between, *after)]
    assert sorted(results) == list(range(2, 302))


def test_a_large_payload_is_whole_though_its_way_broke(crashing: Crashing) -> None:
    values = torch.arange(32 << 20, dtype=torch.uint8)
    echoes = [rpc.rpc_async("w", torch.neg, (values,), timeout=TIMEOUT) for _ in range(3)]
    for _ in range(3):
        crashing.kill()
        crashing.start()
    for echo in echoes:
        assert torch.equal(echo.wait(TIMEOUT), values.neg())


def test_remote_modules_and_graphs_are_still_there(crashing: Crashing) -> None:
    from tensorplay.distributed.nn import RemoteModule

    layer = RemoteModule("w/cpu", torch.nn.Linear, args=(4, 2))
    inputs = torch.ones(3, 4, requires_grad=True)
    loss = layer(inputs).sum()
    crashing.kill()
    crashing.start()
    loss.backward()
    weight = layer.remote_parameters()[0].to_here(timeout=TIMEOUT)
    assert inputs.grad is not None
    assert torch.allclose(inputs.grad, weight.detach().sum(0).expand(3, 4))
