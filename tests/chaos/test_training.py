"""A training run whose broker is killed and whose links break: its losses are as if undisturbed."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

import pytest
import torch

from tensorplay.distributed import rpc
from tensorplay.distributed.nn import RemoteModule
from tensorplay.distributed.optim import DistributedOptimizer
from tests.chaos.proxy import Network
from tests.e2e.test_broker_restart import Crashing

STEPS = 40
#: How often something breaks meanwhile; what breaks heals within the broker's grace period.
FAULTS = 8


def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        inputs = torch.randn(16, 8, generator=generator)
        yield inputs, inputs.square().sum(1, keepdim=True)


def undisturbed(state: dict[str, torch.Tensor]) -> list[float]:
    layer = torch.nn.Linear(8, 1)
    layer.load_state_dict(state)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01, momentum=0.9)
    losses = []
    for inputs, targets in batches():
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(layer(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.timeout(110)
def test_losses_are_those_of_an_undisturbed_run(free_port: int) -> None:
    running = Crashing(free_port)
    chooser = random.Random(4)
    try:
        with Network(free_port, ["client"]) as network:
            rpc.init_rpc("client", broker=network.address("client"))
            rpc.wait_for_workers(["w"], timeout=60)
            layer = RemoteModule("w", torch.nn.Linear, (8, 1))
            weight, bias = (p.to_here().detach() for p in layer.remote_parameters())
            expected = undisturbed({"weight": weight, "bias": bias})
            optimizer = DistributedOptimizer(
                torch.optim.SGD, layer.remote_parameters(), lr=0.01, momentum=0.9
            )
            disturbing = threading.Thread(target=disturb, args=(running, network, chooser))
            disturbing.start()
            losses = []
            for inputs, targets in batches():
                optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(layer(inputs), targets)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                progress.release()
            disturbing.join(60)
            assert not disturbing.is_alive()
            assert losses == pytest.approx(expected, rel=1e-5)
            rpc.shutdown(graceful=False)
    finally:
        if rpc._is_current_rpc_agent_set():
            rpc.shutdown(graceful=False)
        running.close()


#: Released at each step, so that what breaks does so during the run.
progress = threading.Semaphore(0)


def disturb(running: Crashing, network: Network, chooser: random.Random) -> None:
    pause = threading.Event()
    for number in range(FAULTS):
        for _ in range(STEPS // FAULTS - 1):
            progress.acquire(timeout=60)
        pause.wait(chooser.uniform(0.0, 0.01))  # anywhere within a step
        if number % 2:
            network.set("client", whole=False)
            pause.wait(0.2)
            network.set("client")
        else:
            running.kill()
            running.start()
