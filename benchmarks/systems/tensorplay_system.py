"""tensorplay: a broker in a process of its own, peers that dial out to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from benchmarks.systems.base import PeerSpec, Step
from benchmarks.systems.rpc_peer import RpcPeer
from tensorplay import keys
from tensorplay.distributed import rpc
from tensorplay.distributed.nn import RemoteModule
from tensorplay.distributed.optim import DistributedOptimizer
from tensorplay.protocol.messages import Role
from tensorplay.worker.launcher import end_with_input, spawn


class TensorPlayLauncher:
    """Runs the broker.

    Args:
        options: ``curve`` encrypts all connections, by keys that are made for the group.
    """

    starts_workers = True
    stops_when_idle = False

    def __init__(self, options: Mapping[str, str]) -> None:
        self._folder = TemporaryDirectory(prefix="tensorplay-benchmark-")
        self.environment: Mapping[str, str] = {}
        arguments = ["--bind", "tcp://127.0.0.1:0", "--log-level", "warning"]
        if "curve" in options:
            _make_keys(Path(self._folder.name))
            arguments += ["--curve-dir", self._folder.name]
            self.environment = {
                "TENSORPLAY_CURVE_DIR": self._folder.name,
                "TENSORPLAY_CURVE_KEY": _PEERS_KEY,
            }
        self._process = spawn("tensorplay.broker", *arguments, "--exit-with-parent")
        assert self._process.stdout is not None
        self.broker_pid: int | None = self._process.pid
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the broker ended with exit code {self._process.wait()}")
        self.address = line.split()[-1]

    def close(self) -> None:
        """Ends the broker."""
        end_with_input(self._process)
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._folder.cleanup()


#: The key that all peers of an encrypted group share.
_PEERS_KEY = "peers"


def _make_keys(folder: Path) -> None:
    for name in (keys.BROKER_NAME, _PEERS_KEY):
        keys.create(folder, name)
    keys.allow(folder, _PEERS_KEY, names=("*",))


class TensorPlayPeer(RpcPeer):
    """A peer of a tensorplay group."""

    def trainer(self, workers: Sequence[str], width: int) -> Step:
        """Trains as on one machine: ``loss.backward()`` and ``optimizer.step()``."""
        layers = [self.remote(worker, width) for worker in workers]
        parameters = [each for layer in layers for each in layer.remote_parameters()]
        optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=1e-3)

        def step(inputs: Tensor, targets: Tensor) -> float:
            optimizer.zero_grad()
            outputs = inputs
            for layer in layers:
                outputs = layer(outputs)
            loss = torch.nn.functional.mse_loss(outputs, targets)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            return loss.item()

        return step


def launch(options: Mapping[str, str]) -> TensorPlayLauncher:
    """Starts a broker."""
    return TensorPlayLauncher(options)


def join(spec: PeerSpec) -> TensorPlayPeer:
    """Registers this process with the broker."""
    rpc.init_rpc(
        spec.name,
        rank=-1 if spec.is_client else spec.index,
        broker=spec.address,
        role=Role.CLIENT if spec.is_client else Role.WORKER,
    )
    peer = TensorPlayPeer(spec, rpc, RemoteModule)
    rpc.wait_for_workers(list(peer.workers) if spec.is_client else [spec.name], timeout=60)
    return peer
