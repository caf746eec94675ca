"""No other process at all: what the same work costs where it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from benchmarks.systems.base import PeerSpec, Step


class LocalLauncher:
    """Starts nothing."""

    starts_workers = False
    stops_when_idle = False
    address = ""
    broker_pid: int | None = None
    environment: Mapping[str, str] = MappingProxyType({})

    def close(self) -> None:
        """Has nothing to end."""


class _Done:
    """The result of a call that has been made at once."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def wait(self) -> Any:
        return self._value


class LocalPeer:
    """Runs in its own process what it is asked to run on a worker."""

    def __init__(self, spec: PeerSpec) -> None:
        self.workers: Sequence[int] = range(spec.shape.workers)

    def call(self, worker: int, function: Callable[..., Any], *args: Any) -> Any:
        """Calls the function."""
        del worker
        return function(*args)

    def submit(self, worker: int, function: Callable[..., Any], *args: Any) -> _Done:
        """Calls the function, too."""
        return _Done(self.call(worker, function, *args))

    def layer(self, worker: int, width: int) -> Callable[[Tensor], Tensor]:
        """Makes the layer here."""
        del worker
        module: Callable[[Tensor], Tensor] = torch.nn.Linear(width, width)
        return module

    def trainer(self, workers: Sequence[int], width: int) -> Step:
        """Trains a sequence of layers."""
        model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in workers))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

        def step(inputs: Tensor, targets: Tensor) -> float:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            return loss.item()

        return step

    def close(self) -> None:
        """Has nothing to leave."""


def launch(options: Mapping[str, str]) -> LocalLauncher:
    """Starts nothing."""
    del options
    return LocalLauncher()


def join(spec: PeerSpec) -> LocalPeer:
    """Makes the peer."""
    return LocalPeer(spec)
