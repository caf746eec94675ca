"""What is done with gradients where they are; each public function is one round trip.

Parameters are tensors of this process and RRefs, in any mix.  The private functions run at
the owners, on parameters of theirs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tensorplay.distributed.optim.options import detached
from tensorplay.distributed.optim.owners import Call, Param, call_all, call_owners, shares, value
from tensorplay.distributed.rpc import RRef
from tensorplay.distributed.rpc.allow import wire_safe


def get_grads(params: Sequence[Param]) -> list[torch.Tensor | None]:
    """Returns the gradients: those of this process themselves, copies of the others."""
    grads: list[torch.Tensor | None] = [None] * len(params)
    for share, found in call_owners(params, _get_grads):
        for position, grad in zip(share.positions, found, strict=True):
            grads[position] = grad
    return grads


def set_grads(params: Sequence[Param], grads: Sequence[torch.Tensor | None]) -> None:
    """Sets ``.grad`` of each parameter."""
    call_all(
        [
            Call(peer, _set_grads, ([params[i] for i in here], [grads[i] for i in here]))
            for peer, here in shares(params)
        ]
    )


def zero(params: Sequence[Param], set_to_none: bool = True) -> None:
    """Resets the gradients."""
    call_owners(params, _zero, set_to_none)


def norms(params: Sequence[Param], norm_type: float, foreach: bool | None) -> torch.Tensor:
    """Returns the norm of each gradient there is, in order, as one tensor in host memory."""
    found: list[torch.Tensor | None] = [None] * len(params)
    for share, (present, values) in call_owners(params, _norms, norm_type, foreach):
        for index, norm in zip(present, values, strict=True):
            found[share.positions[index]] = norm
    there = [norm for norm in found if norm is not None]
    return torch.stack(there) if there else torch.empty(0)


def scale(params: Sequence[Param], factor: torch.Tensor, foreach: bool | None) -> None:
    """Multiplies the gradients by a scalar tensor."""
    call_owners(params, _scale, factor, foreach)


def clip(params: Sequence[Param], limit: float, foreach: bool | None) -> None:
    """Clamps the elements of the gradients to [-limit, limit]."""
    call_owners(params, _clip, limit, foreach)


def unscale(params: Sequence[Param], factor: float) -> bool:
    """Multiplies the gradients by ``factor``; returns whether one is not finite."""
    return any(found for _, found in call_owners(params, _unscale, factor))


def _grads(params: Sequence[Param]) -> list[torch.Tensor]:
    return [grad for grad in (value(param).grad for param in params) if grad is not None]


@wire_safe()
def _get_grads(params: Sequence[Param]) -> list[torch.Tensor | None]:
    grads = [value(param).grad for param in params]
    if not isinstance(params[0], RRef):
        return grads
    return [None if grad is None else detached(grad) for grad in grads]


@wire_safe()
def _set_grads(params: Sequence[Param], grads: Sequence[torch.Tensor | None]) -> None:
    for param, grad in zip(params, grads, strict=True):
        found = value(param)
        found.grad = None if grad is None else grad.to(found.device)


@wire_safe()
def _zero(params: Sequence[Param], set_to_none: bool) -> None:
    for param in params:
        found = value(param)
        if set_to_none:
            found.grad = None
        elif found.grad is not None:
            found.grad = found.grad.detach().zero_()


@wire_safe()
def _norms(
    params: Sequence[Param], norm_type: float, foreach: bool | None
) -> tuple[list[int], torch.Tensor]:
    """Returns which parameters have a gradient, and the norms of those."""
    grads = [value(param).grad for param in params]
    present = [index for index, grad in enumerate(grads) if grad is not None]
    there = [grad.detach() for grad in grads if grad is not None]
    if foreach is False:
        found = [torch.linalg.vector_norm(grad, norm_type) for grad in there]
    else:
        found = list(torch._foreach_norm(there, norm_type)) if there else []
    return present, torch.stack([norm.cpu() for norm in found]) if found else torch.empty(0)


@wire_safe()
@torch.no_grad()
def _scale(params: Sequence[Param], factor: torch.Tensor, foreach: bool | None) -> None:
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for grad in _grads(params):
        by_device.setdefault(grad.device, []).append(grad)
    for device, grads in by_device.items():
        here = factor.to(device)
        if foreach is False:
            for grad in grads:
                grad.mul_(here)
        else:
            torch._foreach_mul_(grads, here)


@wire_safe()
def _clip(params: Sequence[Param], limit: float, foreach: bool | None) -> None:
    torch.nn.utils.clip_grad_value_([value(param) for param in params], limit, foreach)


@wire_safe()
@torch.no_grad()
def _unscale(params: Sequence[Param], factor: float) -> bool:
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for param in map(value, params):
        grad = param.grad
        if grad is None:
            continue
        if grad.is_sparse:
            # Entries of one index add up, to infinity perhaps, only when it is coalesced.
            if grad.dtype is torch.float16:
                param.grad = grad = grad.coalesce()
            grad = grad._values()
        groups.setdefault((grad.device, grad.dtype), []).append(grad)
    flags = []
    for (device, _), grads in groups.items():
        flag = torch.zeros((), dtype=torch.float32, device=device)
        inverse = torch.full((), factor, dtype=torch.float32, device=device)
        torch._amp_foreach_non_finite_check_and_unscale_(grads, flag, inverse)
        flags.append(flag)
    return any(bool(flag.item()) for flag in flags)
