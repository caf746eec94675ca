"""Ray places the workers: an actor for each, with the resources that it asks for.

    pip install ray
    python examples/ray_workers.py
    python examples/ray_workers.py --ray auto --broker tcp://HOST:5555

Ray knows which machines there are and which of them have room. An actor of a few lines runs a
tensorplay worker and is placed by Ray as any other: with ``num_gpus=1`` on a GPU of its own. The
model is spread over them and trained from here; Ray takes no part in the calls.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from contextlib import ExitStack

import ray
import torch
from torch import nn

from tensorplay.distributed import rpc
from tensorplay.distributed.nn import RemoteModule, all_parameters
from tensorplay.distributed.optim import DistributedOptimizer
from tensorplay.worker.launcher import local_broker

STEPS = 20


@ray.remote(num_cpus=1)
class TensorPlayWorker:
    """Runs a tensorplay worker, which goes with this actor.

    Args:
        name: Its name.
        broker: Its broker, at an address that the machines of the cluster can reach.
    """

    def __init__(self, name: str, broker: str) -> None:
        arguments = ["--broker", broker, "--name", name]
        self.process = subprocess.Popen([sys.executable, "-m", "tensorplay.worker", *arguments])

    def end(self) -> int:
        """Ends it: it finishes the calls under way. Returns its exit code."""
        self.process.terminate()
        return self.process.wait()


def train(names: list[str]) -> None:
    """Trains a model with a layer on each worker."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for name in names:
        layers += [RemoteModule(name, nn.Linear, (8, 8)), nn.Tanh()]
    model = nn.Sequential(*layers, nn.Linear(8, 1))
    optimizer = DistributedOptimizer(torch.optim.Adam, all_parameters(model), lr=0.02)
    x = torch.randn(64, 8)
    y = x.mean(1, keepdim=True)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"a layer on each of {', '.join(names)}")
    print(f"loss at first {losses[0]:.3f}, in the end {losses[-1]:.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ray", metavar="ADDRESS", help="that of a Ray cluster which runs")
    parser.add_argument("--broker", metavar="ADDRESS", help="a broker that the cluster can reach")
    parser.add_argument("--workers", type=int, default=2, help="how many (default: 2)")
    given = parser.parse_args()
    if given.ray and not given.broker:
        parser.error("a cluster of other machines needs a --broker that they can reach")
    with ExitStack() as stack:
        broker = given.broker or stack.enter_context(local_broker())[1]
        local = {} if given.ray else {"num_cpus": given.workers, "include_dashboard": False}
        ray.init(given.ray, log_to_driver=False, **local)
        stack.callback(ray.shutdown)
        workers = [f"ray-{rank}" for rank in range(given.workers)]
        actors = [TensorPlayWorker.remote(name, broker) for name in workers]
        rpc.init_rpc("client", broker=broker)
        rpc.wait_for_workers(workers, timeout=60)
        train(workers)
        rpc.shutdown(graceful=False)
        ray.get([actor.end.remote() for actor in actors])
