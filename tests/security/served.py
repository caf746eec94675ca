"""A module that a worker lets others use, with what should not get out by it."""

from __future__ import annotations

import functools
import os
import subprocess
from subprocess import run
from typing import Any

import torch

__all__ = ["Counter", "Net", "add", "run", "subprocess"]

#: What the attacks would do: counted, so that a test sees that none did.
executed: list[str] = []


def add(a: Any, b: Any) -> Any:
    """May be called."""
    return a + b


def hand_out() -> Any:
    """Returns something that may not be called."""
    return os.system


def make_adder() -> Any:
    """Returns a function of this module."""
    return lambda a, b: a + b


def _private(command: str) -> None:
    executed.append(command)


@functools.wraps(add)
def disguised(command: str, *args: Any) -> None:
    executed.append(command)


class Meta(type):
    """A class of classes."""


class Counter:
    """May be made, and asked."""

    total = 0

    def __init__(self, start: int = 0) -> None:
        self.value = start

    def count(self) -> int:
        self.value += 1
        return self.value

    @classmethod
    def starting_at(cls, start: int) -> Counter:
        return cls(start)

    @property
    def doubled(self) -> int:
        executed.append("property")
        return 2 * self.value

    def _secret(self) -> None:
        executed.append("_secret")

    class Inner:
        """A class in a class."""

    os = os


class Reduced:
    """Says itself how it is made: code that is allowed."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __reduce__(self) -> Any:
        return Reduced, (self.value,)


class Restored:
    """Restores itself: code that is allowed."""

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state)


class Listing(list):  # type: ignore[type-arg]
    """A list."""


class Net(torch.nn.Module):
    """A module."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        return out
