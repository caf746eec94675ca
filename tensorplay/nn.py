"""``torch.nn`` under tensorplay's name: the modules that run here or on a worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn as _nn
from torch.nn import Module, Parameter

if TYPE_CHECKING:
    from torch.nn import *  # noqa: F403

__all__ = ["Module", "Parameter"]


def __getattr__(name: str) -> Any:
    return getattr(_nn, name)


def __dir__() -> list[str]:
    return dir(_nn)
