"""Dask places the workers: one beside each worker of a Dask cluster.

    pip install distributed
    python examples/dask_workers.py
    python examples/dask_workers.py --scheduler tcp://HOST:8786 --broker tcp://HOST:5555

Dask knows which machines there are and starts processes on them. A plugin of 15 lines has each of
its workers start a tensorplay worker, which goes when that Dask worker does. The model is then
spread over them, and trained from here; Dask takes no part in the calls.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from contextlib import ExitStack

import torch
from distributed import Client, LocalCluster, Worker, WorkerPlugin
from torch import nn

from tensorplay.distributed import rpc
from tensorplay.distributed.nn import RemoteModule, all_parameters
from tensorplay.distributed.optim import DistributedOptimizer
from tensorplay.worker.launcher import local_broker

STEPS = 20


class TensorPlayWorker(WorkerPlugin):
    """Runs a tensorplay worker beside each worker of Dask.

    Args:
        broker: Its broker, at an address that the machines of the cluster can reach.
    """

    name = "tensorplay"

    def __init__(self, broker: str) -> None:
        self.broker = broker

    def setup(self, worker: Worker) -> None:
        """Starts it; called by Dask on each worker, also on those that come later."""
        arguments = ["--broker", self.broker, "--name", f"dask-{worker.name}"]
        self.process = subprocess.Popen([sys.executable, "-m", "tensorplay.worker", *arguments])

    def teardown(self, worker: Worker) -> None:
        """Ends it: it finishes the calls under way."""
        self.process.terminate()
        self.process.wait()


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
    parser.add_argument("--scheduler", metavar="ADDRESS", help="that of a Dask cluster which runs")
    parser.add_argument("--broker", metavar="ADDRESS", help="a broker that the cluster can reach")
    given = parser.parse_args()
    if given.scheduler and not given.broker:
        parser.error("a cluster of other machines needs a --broker that they can reach")
    with ExitStack() as stack:
        broker = given.broker or stack.enter_context(local_broker())[1]
        cluster = given.scheduler or stack.enter_context(
            LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None)
        )
        dask = stack.enter_context(Client(cluster))
        dask.register_plugin(TensorPlayWorker(broker))
        workers = [f"dask-{worker['id']}" for worker in dask.scheduler_info()["workers"].values()]
        rpc.init_rpc("client", broker=broker)
        rpc.wait_for_workers(workers, timeout=60)
        train(workers)
        rpc.shutdown(graceful=False)
        dask.unregister_worker_plugin(TensorPlayWorker.name)
