"""Sending TorchScript modules, which pickle refuses, as what ``torch.jit.save`` writes."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch.jit import _script

from tensorplay.distributed.rpc.internal import _internal_rpc_pickler


def _script_module_receiver(saved: bytes) -> Any:
    return torch.jit.load(io.BytesIO(saved))  # type: ignore[no-untyped-call]


def _script_module_reducer(module: Any) -> tuple[Any, tuple[bytes]]:
    buffer = io.BytesIO()
    torch.jit.save(module, buffer)
    return _script_module_receiver, (buffer.getvalue(),)


_internal_rpc_pickler._register_reducer(_script.RecursiveScriptModule, _script_module_reducer)
