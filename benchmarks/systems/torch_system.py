"""torch.distributed.rpc with its TensorPipe backend, as it comes."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from benchmarks.systems.base import PeerSpec, Step, free_port
from benchmarks.systems.rpc_peer import RpcPeer


class TorchLauncher:
    """Chooses the port at which the group meets.

    Its idle peers are stopped while others are measured: TensorPipe's shared-memory transport
    polls, so that each idle process takes a share of a core.
    """

    starts_workers = True
    stops_when_idle = True
    broker_pid: int | None = None
    environment: Mapping[str, str] = MappingProxyType({})

    def __init__(self) -> None:
        self.address = f"127.0.0.1:{free_port()}"

    def close(self) -> None:
        """Has nothing to end."""


class TorchPeer(RpcPeer):
    """A peer of a torch.distributed.rpc group."""

    def trainer(self, workers: Sequence[str], width: int) -> Step:
        """Trains by ``dist_autograd`` and torch's ``DistributedOptimizer``."""
        autograd: Any = importlib.import_module("torch.distributed.autograd")
        optim: Any = importlib.import_module("torch.distributed.optim")

        layers = [self.remote(worker, width) for worker in workers]
        parameters = [each for layer in layers for each in layer.remote_parameters()]
        optimizer = optim.DistributedOptimizer(torch.optim.SGD, parameters, lr=1e-3)

        def step(inputs: Tensor, targets: Tensor) -> float:
            with autograd.context() as context:
                outputs = inputs
                for layer in layers:
                    outputs = layer(outputs)
                loss = torch.nn.functional.mse_loss(outputs, targets)
                autograd.backward(context, [loss])
                optimizer.step(context)
            return loss.item()

        return step


def launch(options: Mapping[str, str]) -> TorchLauncher:
    """Chooses a port; there are no options."""
    del options
    return TorchLauncher()


def join(spec: PeerSpec) -> TorchPeer:
    """Makes this process a member of the fixed world."""
    warnings.filterwarnings("ignore")  # its deprecations are known here
    rpc: Any = importlib.import_module("torch.distributed.rpc")
    module: Any = importlib.import_module("torch.distributed.nn.api.remote_module")

    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = spec.address.split(":")
    rpc.init_rpc(spec.name, rank=spec.index, world_size=spec.shape.workers + spec.shape.clients)
    return TorchPeer(spec, rpc, module.RemoteModule)
