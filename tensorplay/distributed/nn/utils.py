"""Gradients and parameters of models whose parts are in several processes.

Wherever parameters are taken, they can be parameters of this process, RRefs of parameters of
any worker, RemoteModules for all of theirs, and entries of an optimizer's ``param_groups``, in
any mix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.nn import Module

from tensorplay.distributed.optim import gradients
from tensorplay.distributed.optim.owners import Param, Params, flatten

__all__ = [
    "all_parameters",
    "clip_grad_norm_",
    "clip_grad_value_",
    "get_grads",
    "get_total_grad_norm",
]


def all_parameters(module: Module) -> Iterator[Param]:
    """Yields the parameters of a model of which parts are remote.

    Args:
        module: A local module with RemoteModules in it, or a RemoteModule.

    Yields:
        Parameters of this process and RRefs of the others, in the order in which
        ``parameters()`` of the same model gives them when all of it is local. So an optimizer
        over them and one over the local model can load each other's state.
    """
    seen: set[int] = set()
    for child in _modules(module):
        remote: Callable[[], list[Param]] | None = getattr(child, "remote_parameters", None)
        if remote is not None:
            yield from remote()
            continue
        for parameter in child._parameters.values():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter


def get_grads(parameters: Params) -> list[torch.Tensor | None]:
    """Returns ``.grad`` of each parameter; one round trip to all the owners.

    Args:
        parameters: Parameters of any processes, or one of them.

    Returns:
        In the same order, the gradients of this process's parameters themselves, and copies
        in host memory of the others; None where there is none.

    Raises:
        OwnerLostError: If an owner is gone.
    """
    return gradients.get_grads(flatten(parameters))


def get_total_grad_norm(
    parameters: Params,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Returns the norm of all the gradients as one vector; one round trip.

    Args:
        parameters: Parameters of any processes.
        norm_type: Order of the norm; ``float("inf")`` for the largest magnitude.
        error_if_nonfinite: Whether a norm that is not finite is an error.
        foreach: Whether to use one kernel for many tensors; by default where that works.

    Returns:
        A scalar in host memory; 0 if there is no gradient.

    Raises:
        RuntimeError: If the norm is not finite and ``error_if_nonfinite``.
        OwnerLostError: If an owner is gone.
    """
    norms = gradients.norms(flatten(parameters), float(norm_type), foreach)
    if not len(norms):
        return torch.tensor(0.0)
    total: torch.Tensor = torch.linalg.vector_norm(norms, float(norm_type))
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"The total norm of order {float(norm_type)} for gradients from `parameters` is "
            f"non-finite ({total.item()}), so nothing was clipped. Pass "
            "`error_if_nonfinite=False` to have them scaled by it all the same"
        )
    return total


def clip_grad_norm_(
    parameters: Params,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scales the gradients down so that their norm as one vector is at most ``max_norm``.

    Does what ``torch.nn.utils.clip_grad_norm_`` does, over parameters of any processes, with
    one round trip, or two if there is something to clip.

    Args:
        parameters: Parameters of any processes.
        max_norm: The largest norm.
        norm_type: Order of the norm; ``float("inf")`` for the largest magnitude.
        error_if_nonfinite: Whether a norm that is not finite is an error.
        foreach: Whether to use one kernel for many tensors; by default where that works.

    Returns:
        The norm before, a scalar in host memory; 0 if there is no gradient.

    Raises:
        RuntimeError: If the norm is not finite and ``error_if_nonfinite``; nothing is
            changed then.
        OwnerLostError: If an owner is gone.
    """
    flat = flatten(parameters)
    total = get_total_grad_norm(flat, norm_type, error_if_nonfinite, foreach)
    factor = torch.clamp(float(max_norm) / (total + 1e-6), max=1.0)
    if factor != 1.0:  # also if it is not a number: then all the gradients become so
        gradients.scale(flat, factor, foreach)
    return total


def clip_grad_value_(parameters: Params, clip_value: float, foreach: bool | None = None) -> None:
    """Clamps the elements of the gradients to [-clip_value, clip_value]; one round trip.

    Args:
        parameters: Parameters of any processes.
        clip_value: The largest magnitude.
        foreach: Whether to use one kernel for many tensors; by default where that works.

    Raises:
        OwnerLostError: If an owner is gone.
    """
    gradients.clip(flatten(parameters), float(clip_value), foreach)


def _modules(module: Module) -> Iterator[Module]:
    """Yields a module and those in it, a RemoteModule as one, each once."""
    if hasattr(module, "remote_parameters"):
        return iter([module])
    return module.modules()
