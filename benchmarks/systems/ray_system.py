"""Ray: actors, one for each worker; measured where Ray is installed."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from benchmarks.systems.base import PeerSpec, Step


class RayLauncher:
    """Starts nothing: the client starts Ray, and Ray the actors."""

    starts_workers = False
    stops_when_idle = False
    address = ""
    broker_pid: int | None = None
    environment: Mapping[str, str] = MappingProxyType({})

    def close(self) -> None:
        """Has nothing to end: Ray ends with its client."""


class Actor:
    """What each of Ray's actors is."""

    def __init__(self) -> None:
        self._layers: list[torch.nn.Module] = []

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Runs a function."""
        return function(*args)

    def make(self, width: int) -> int:
        """Makes a layer and returns its number."""
        self._layers.append(torch.nn.Linear(width, width))
        return len(self._layers) - 1

    def forward(self, number: int, inputs: Tensor) -> Tensor:
        """Runs a layer."""
        with torch.no_grad():  # Ray cannot send what requires grad
            outputs: Tensor = self._layers[number](inputs)
        return outputs


class _Pending:
    """A reference that can be waited for."""

    def __init__(self, ray: Any, reference: Any) -> None:
        self._ray = ray
        self._reference = reference

    def wait(self) -> Any:
        return self._ray.get(self._reference)


class RayPeer:
    """The client of a group of actors."""

    def __init__(self, spec: PeerSpec) -> None:
        ray: Any = importlib.import_module("ray")
        root = str(Path(__file__).parents[2])
        os.environ["PYTHONPATH"] = os.pathsep.join((root, os.environ.get("PYTHONPATH", "")))
        ray.init(
            num_cpus=max(spec.shape.workers, 1),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=4 << 30,
        )
        self._ray = ray
        kind = ray.remote(Actor)
        self.workers: Sequence[Any] = [kind.remote() for _ in range(spec.shape.workers)]
        ray.get([worker.make.remote(1) for worker in self.workers])

    def call(self, worker: Any, function: Callable[..., Any], *args: Any) -> Any:
        """Has an actor run a function."""
        return self._ray.get(worker.run.remote(function, *args))

    def submit(self, worker: Any, function: Callable[..., Any], *args: Any) -> _Pending:
        """Has an actor start to run a function."""
        return _Pending(self._ray, worker.run.remote(function, *args))

    def layer(self, worker: Any, width: int) -> Callable[[Tensor], Tensor]:
        """Makes a layer in an actor."""
        number = self._ray.get(worker.make.remote(width))

        def forward(inputs: Tensor) -> Tensor:
            outputs: Tensor = self._ray.get(worker.forward.remote(number, inputs))
            return outputs

        return forward

    def trainer(self, workers: Sequence[Any], width: int) -> Step:
        """Is not there: Ray has no autograd between actors."""
        raise NotImplementedError("Ray has no autograd between actors")

    def close(self) -> None:
        """Ends Ray and its actors."""
        self._ray.shutdown()


def launch(options: Mapping[str, str]) -> RayLauncher:
    """Starts nothing yet."""
    del options
    return RayLauncher()


def join(spec: PeerSpec) -> RayPeer:
    """Starts Ray and its actors."""
    return RayPeer(spec)
