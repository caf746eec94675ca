"""Modules that the tests put on workers, and functions that they have workers run."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Scale(nn.Module):
    """Multiplies by a parameter, and by what it is called with."""

    def __init__(self, factor: float = 2.0) -> None:
        super().__init__()
        self.offset: Tensor
        self.factor = nn.Parameter(torch.tensor(factor))
        self.register_buffer("offset", torch.zeros(1))
        self.note = "not a module"

    def forward(self, x: Tensor, times: float = 1.0) -> Tensor:
        return torch.addcmul(self.offset, x, self.factor, value=times)


class Net(nn.Module):
    """Linear, batch norm and a nested block: something with a real state dict."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(3, width)
        self.norm = nn.BatchNorm1d(width)
        self.block = nn.Sequential(nn.ReLU(), nn.Linear(width, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.norm(self.first(x)))  # type: ignore[no-any-return]


class Container(nn.Module):
    """A local layer in front of any module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.front = nn.Linear(3, 3)
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.front(x))  # type: ignore[no-any-return]


class Keywords(nn.Module):
    """Returns the names of the keywords it is called with."""

    def forward(self, **kwargs: Any) -> list[str]:
        return sorted(kwargs)


class TypeOf(nn.Module):
    """Says on which device each tensor of a nested input is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, pair: Any, batch: Any = None) -> list[str]:
        nested = [*pair] if batch is None else [*pair, batch["x"][0], batch["more"].x]
        return [value.device.type for value in nested]


class Stateful(nn.Module):
    """A module with extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.state: Any = "initial"

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


class Versioned(nn.Module):
    """Takes a state dict of an unknown version for an old one, whose weight is negated."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any
    ) -> None:
        if local_metadata.get("version", 1) < 2 and f"{prefix}weight" in state_dict:
            state_dict[f"{prefix}weight"] = -state_dict[f"{prefix}weight"]
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


class Counted(nn.Module):
    """Counted by ``count_alive`` on the worker that owns it."""


@dataclass
class Batch:
    x: Tensor
    label: str = "none"


class Pair(NamedTuple):
    a: Tensor
    b: Tensor


@dataclass
class Holder:
    handle: nn.Module


class NotAModule:
    """A class of no module."""


def raise_on_construction() -> nn.Module:
    raise KeyError("no such configuration")


# Run by workers.


def call(handle: Any, *args: Any) -> Any:
    return handle(*args)


def call_all_ways(handle: Any, x: Tensor) -> list[Tensor]:
    sequence = nn.Sequential(handle)
    return [handle(x), handle.forward(x), handle.forward_async(x).wait(), sequence(x)]


def call_within(container: Any, x: Tensor) -> Tensor:
    """Calls the handle inside a list, dict or dataclass."""
    if isinstance(container, Holder):
        container = container.handle
    while isinstance(container, (list, dict)):
        container = container[0] if isinstance(container, list) else container["handle"]
    return container(x)  # type: ignore[no-any-return]


def inspect(handle: Any) -> dict[str, Any]:
    """Uses a handle as the nn.Module that it is."""
    seen: list[str] = []
    removable = handle.register_full_backward_hook(lambda *_: seen.append("hook"))
    handle(torch.ones(1, requires_grad=True)).sum().backward()
    removable.remove()
    return {
        "repr": repr(handle),
        "training": handle.training,
        "is_module": isinstance(handle, nn.Module),
        "type": type(handle).__name__,
        "hooks": seen,
        "attributes": list(vars(handle)),
    }


def identity(rref: Any) -> int:
    return id(rref.local_value())


def is_training(rref: Any) -> bool:
    return rref.local_value().training  # type: ignore[no-any-return]


def training_modes(rref: Any) -> set[bool]:
    return {module.training for module in rref.local_value().modules()}


def attribute(rref: Any, name: str) -> Any:
    return getattr(rref.local_value(), name)


def is_compiled(rref: Any) -> bool:
    return rref.local_value()._compiled_call_impl is not None


def double_on_call(rref: Any) -> None:
    rref.local_value().register_forward_hook(lambda module, args, result: 2 * result)


def own_handle(handle: Any) -> Any:
    return handle


def adopt(remote_device: str, rref: Any) -> Any:
    from tensorplay.distributed.nn import RemoteModule

    return RemoteModule.init_from_module_rref(remote_device, rref)


def count_alive() -> int:
    return sum(type(item).__name__ == "Counted" for item in gc.get_objects())
