"""Put any ``torch.nn.Module`` on another process or machine, call it and train through it.

Importing this package is cheap: what needs torch is imported at first use.  The broker,
``tensorplay.broker``, never needs it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tensorplay.version import __version__

if TYPE_CHECKING:
    from torch import Tensor, compile, device

    from tensorplay import distributed, errors, nn
    from tensorplay.cluster import LocalCluster, local_cluster
    from tensorplay.profiling import Profile, profile

__all__ = [
    "LocalCluster",
    "Profile",
    "Tensor",
    "__version__",
    "compile",
    "device",
    "distributed",
    "errors",
    "local_cluster",
    "nn",
    "profile",
]

_MODULES = (
    "address",
    "broker",
    "cli",
    "cluster",
    "commands",
    "demo",
    "distributed",
    "errors",
    "keys",
    "logs",
    "nn",
    "profiling",
    "protocol",
    "version",
    "worker",
)
_MEMBERS = {
    "LocalCluster": "tensorplay.cluster",
    "Profile": "tensorplay.profiling",
    "local_cluster": "tensorplay.cluster",
    "profile": "tensorplay.profiling",
}


def __getattr__(name: str) -> Any:
    """Resolves the package's own names, and every other public name to torch's."""
    value: Any
    if name in _MODULES:
        return importlib.import_module(f"tensorplay.{name}")
    if name in _MEMBERS:
        value = getattr(importlib.import_module(_MEMBERS[name]), name)
    elif name.startswith("_"):
        raise AttributeError(f"module 'tensorplay' has no attribute {name!r}")
    else:
        try:
            value = getattr(importlib.import_module("torch"), name)
        except AttributeError:
            raise AttributeError(
                f"neither tensorplay nor torch has an attribute {name!r}"
            ) from None
    globals()[name] = value
    return value
