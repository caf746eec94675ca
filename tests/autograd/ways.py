"""Ways to call a module: as it is, or on a worker, by each of the means there are.

A test is a program that is run once for each way; what it returns must not differ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tensorplay.distributed import rpc
from tensorplay.distributed.nn import RemoteModule
from tests.autograd import modules


class Way:
    """Modules of this process: what all others are compared with."""

    def module(self, cls: type[nn.Module], *args: Any, on: str = "worker0") -> Any:
        """Makes a module whose initial state depends on nothing but the arguments."""
        return modules.make(cls, args)

    def call(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls it."""
        return module(*args, **kwargs)

    def ask(self, module: Any, function: Callable[..., Any]) -> Any:
        """Has a function see the module where it is, without gradients."""
        return function(_Here(module))

    def gradients(self, module: Any) -> list[Tensor | None]:
        """Returns a copy of what ``.grad`` of the parameters is."""
        return [g if g is None else g.clone() for g in self.ask(module, modules.gradients)]

    def __repr__(self) -> str:
        return type(self).__name__.lower()


class _Here:
    """Looks like an RRef."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def local_value(self) -> nn.Module:
        return self._module


class Sync(Way):
    """``rpc_sync`` with an RRef of the module."""

    def module(self, cls: type[nn.Module], *args: Any, on: str = "worker0") -> Any:
        return rpc.remote(on, modules.make, (cls, args))

    def call(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        return rpc.rpc_sync(module.owner(), modules.place, (module, *args), kwargs)

    def ask(self, module: Any, function: Callable[..., Any]) -> Any:
        with torch.no_grad():
            return rpc.rpc_sync(module.owner(), function, (module,))


class Async(Sync):
    """``rpc_async``."""

    def call(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        return rpc.rpc_async(module.owner(), modules.place, (module, *args), kwargs).wait()


class Remote(Sync):
    """``remote().to_here()``."""

    def call(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        return rpc.remote(module.owner(), modules.place, (module, *args), kwargs).to_here()


class Proxy(Sync):
    """``RRef.rpc_sync()``."""

    def call(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        return module.rpc_sync().__call__(*args, **kwargs)


class Handle(Way):
    """``RemoteModule``."""

    def module(self, cls: type[nn.Module], *args: Any, on: str = "worker0") -> Any:
        return RemoteModule(on, modules.make, (cls, args))

    def ask(self, module: Any, function: Callable[..., Any]) -> Any:
        rref = module.get_module_rref()
        with torch.no_grad():
            return rpc.rpc_sync(rref.owner(), function, (rref,))


LOCAL = Way()
WAYS = (Sync(), Async(), Remote(), Proxy(), Handle())

Program = Callable[[Way], Any]


def outcome(program: Program, way: Way) -> Any:
    """Runs a program; an error is a result, too."""
    try:
        return program(way)
    except RuntimeError as error:
        return (RuntimeError, str(error).splitlines()[0])


def assert_same_as_local(program: Program, way: Way) -> Any:
    """Runs a program both ways and compares; returns what it has returned locally."""
    local = outcome(program, LOCAL)
    assert_equal(outcome(program, way), local)
    return local


def assert_equal(actual: Any, expected: Any) -> None:
    """Compares nested values with tensors in them, and what gradients these have."""
    assert type(actual) is type(expected), (actual, expected)
    if isinstance(expected, Tensor):
        torch.testing.assert_close(actual, expected)
        assert actual.requires_grad == expected.requires_grad
    elif isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for key in expected:
            assert_equal(actual[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), (actual, expected)
        for one, other in zip(actual, expected, strict=True):
            assert_equal(one, other)
    elif is_dataclass(expected):
        for field in fields(expected):
            assert_equal(getattr(actual, field.name), getattr(expected, field.name))
    else:
        assert actual == expected
