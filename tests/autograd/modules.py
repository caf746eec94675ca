"""Modules that the tests put on workers, and functions that they have workers run."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tensorplay.distributed import autograd, rpc
from tensorplay.distributed.rpc import RRef
from tests.rpc import helpers


def numbers(*shape: int, requires_grad: bool = False, seed: int = 1) -> Tensor:
    """Returns a float64 tensor of random numbers, which are always the same."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    return values.requires_grad_(requires_grad)


def make(cls: type[nn.Module], args: tuple[Any, ...] = ()) -> nn.Module:
    """Returns a module whose parameters are the same wherever it is made."""
    with _generator, torch.random.fork_rng():
        torch.manual_seed(0)
        return cls(*args).double()


#: The random number generator is the process's, and calls run in threads.
_generator = threading.Lock()


def place(module: RRef[nn.Module], *args: Any, **kwargs: Any) -> Any:
    """Calls a module where it is."""
    return module.local_value()(*args, **kwargs)


def gradients(module: RRef[nn.Module]) -> list[Tensor | None]:
    return [parameter.grad for parameter in module.local_value().parameters()]


def buffers(module: RRef[nn.Module]) -> list[Tensor]:
    return list(module.local_value().buffers())


def sgd_step(module: RRef[nn.Module]) -> None:
    with torch.no_grad():
        for parameter in module.local_value().parameters():
            if parameter.grad is not None:
                parameter.sub_(0.1 * parameter.grad)
                parameter.grad = None


class Net(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))  # type: ignore[no-any-return]


class Plain(nn.Module):
    """Has no parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sin() * 2


class Generator(nn.Module):
    """Has parameters, and needs no input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1.0, 1.0, 3))

    def forward(self, count: int) -> Tensor:
        return self.weight.expand(count, 3) ** 2


class Pair(NamedTuple):
    left: Tensor
    right: Any


@dataclass
class Record:
    """A result that is no container of torch's."""

    value: Tensor
    name: str


class Nested(nn.Module):
    """Several inputs, outputs in all sorts of containers, and things that are no tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 3))

    def forward(self, x: Tensor, others: dict[str, Any], *, scale: float = 1.0) -> dict[str, Any]:
        y = others["y"]
        return {
            "pair": Pair(x * self.weight, [y * scale, "text", None]),
            "record": Record((x * y).sum(0), "sum"),
            "constant": torch.ones(2, dtype=torch.float64),
            "count": 3,
            "index": torch.arange(3),
            "tuple": (x.detach(), (self.weight * y,)),
        }


class Echo(nn.Module):
    """Returns its inputs, views of them, and twice the same tensor."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        product = x * y
        return x, y[1:], x.t(), product, product, product[0]


class InPlace(nn.Module):
    """Writes into its input."""

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(3)
        x[0].exp_()
        return x * 2


class Noisy(nn.Module):
    """Its forward changes its state and the random number generator's."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.calls.add_(1)
        mask = self.dropout(torch.ones_like(x))
        return self.norm(x) * mask, mask.detach()


class Modes(nn.Module):
    """Tells in which modes it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        y = self.linear(x)
        return y, {
            "grad": torch.is_grad_enabled(),
            "inference": torch.is_inference_mode_enabled(),
            "autocast": {d: torch.is_autocast_enabled(d) for d in ("cpu", "cuda")},
            "dtype": torch.get_autocast_dtype("cpu"),
            "result": (y.dtype, y.requires_grad, y.is_inference()),
        }


def modes() -> tuple[bool, bool, bool, bool]:
    """The modes of a worker outside of what a caller asks for."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"),
    )


class Failing(torch.autograd.Function):
    """Raises in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ArithmeticError("no gradient today")


class FailsInBackward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return Failing.apply(x * self.weight)  # type: ignore[no-any-return]


class Relay(nn.Module):
    """A layer in front of a module that is elsewhere, or here.

    Args:
        inner: An RRef of the module that follows, or the module.
    """

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = [inner]
        self.front = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return call(self.inner[0], torch.relu(self.front(x)))  # type: ignore[no-any-return]


def call(module: Any, *args: Any) -> Any:
    """Calls a module, or one behind an RRef."""
    if isinstance(module, RRef):
        return rpc.rpc_sync(module.owner(), place, (module, *args))
    return module(*args)


def apply(function: Any, x: Tensor) -> Tensor:
    return function(x) * x  # type: ignore[no-any-return]


def call_back(worker: str, x: Tensor) -> Tensor:
    """Has another process double a tensor."""
    return rpc.rpc_sync(worker, torch.mul, (x.cos(), 2.0)) + x


class Hooked(nn.Module):
    """A net with hooks on the worker: on a module, a tensor and a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 2)
        self.seen: list[str] = []
        self.net.register_full_backward_hook(lambda *_: self.seen.append("module"))
        self.net.weight.register_hook(self._double)
        self.net.bias.register_post_accumulate_grad_hook(lambda _: self.seen.append("bias"))

    def _double(self, gradient: Tensor) -> Tensor:
        self.seen.append("weight")
        return gradient * 2

    def forward(self, x: Tensor) -> Tensor:
        x.register_hook(lambda _: self.seen.append("input"))
        return self.net(x)  # type: ignore[no-any-return]


def seen(module: RRef[Hooked]) -> list[str]:
    return sorted(module.local_value().seen)


def live_graphs() -> int:
    return autograd.live_graphs()


def add(x: Tensor, y: Tensor) -> Tensor:
    return x + y


def scaled(x: Tensor) -> Tensor:
    return x * 2


def first_and_rest(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[0] ** 2, x[1:] ** 3


def freeze(module: RRef[nn.Module]) -> None:
    for parameter in module.local_value().parameters():
        parameter.requires_grad_(False)


def call_with_kept(module: RRef[nn.Module], kept: RRef[Tensor]) -> Tensor:
    return module.local_value()(kept.local_value())  # type: ignore[no-any-return]


def fetched(kept: RRef[Tensor]) -> Tensor:
    return scaled(kept.to_here())


class Checkpointed(Net):
    """Does not keep its activations."""

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(super().forward, x, use_reentrant=False)
        return checkpoint(torch.sin, y, use_reentrant=True)  # type: ignore[no-any-return]


def call_in_checkpoint(module: Any, x: Tensor) -> Tensor:
    return checkpoint(  # type: ignore[no-any-return]
        lambda x: call(module, x.sin()), x, use_reentrant=False
    )


class Remembering(nn.Module):
    """Has a hidden state, which leads from one call to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.outer = nn.Linear(3, 3)
        self.hidden: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x)
        if self.hidden is not None:
            hidden = hidden + self.outer(self.hidden)
        self.hidden = torch.tanh(hidden)
        return self.hidden


def resident_bytes() -> int:
    import psutil

    return int(psutil.Process().memory_info().rss)


def train_here(x: Tensor) -> float:
    """Runs a whole step of training on what was received."""
    loss = x.square().sum()
    loss.backward()
    return loss.item()


def slow(name: str, x: Tensor) -> Tensor:
    """Waits for an event, then doubles a tensor."""
    helpers.wait_event(name)
    return x * 2


kept: list[Any] = []


def keep_a_result_of(worker: str) -> None:
    kept.append(rpc.rpc_sync(worker, scaled, (torch.ones(3, requires_grad=True),)))


def zero_grad(module: RRef[nn.Module]) -> None:
    module.local_value().zero_grad()


def is_there(value: RRef[Any]) -> bool:
    return value.local_value() is not None


def train_elsewhere(module: RRef[nn.Module], x: Tensor) -> None:
    """One step of another client's."""
    call(module, x).square().sum().backward()
    rpc.rpc_sync(module.owner(), sgd_step, (module,))


def with_a_failing_hook(x: Tensor) -> Tensor:
    def fail(gradient: Tensor) -> None:
        raise LookupError("hooked")

    y = x * 2
    y.register_hook(fail)
    return y.exp()


def fail_in_backward(x: Tensor) -> Tensor:
    return Failing.apply(x)  # type: ignore[no-any-return]
