"""What stands in a parameter group for a parameter that another process owns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tensorplay.distributed.optim import gradients
from tensorplay.distributed.optim.shard import ParamInfo
from tensorplay.distributed.rpc import RRef

_HOST = torch.device("cpu")


class RemoteParameter(torch.Tensor):
    """A parameter of another process: shape, dtype and a reference, but no data.

    An entry of ``DistributedOptimizer.param_groups[...]["params"]``. What would need its data
    raises, or gives a tensor without data, of the meta device.

    Attributes:
        rref: The reference.
    """

    rref: RRef[Any]

    # What is computed from it is a plain tensor.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(rref: RRef[Any], info: ParamInfo) -> RemoteParameter:
        """Returns the stand-in of the parameter that ``rref`` refers to."""
        data = torch.empty(info.shape, dtype=info.dtype, device="meta")
        requires_grad = info.requires_grad
        parameter = torch.Tensor._make_subclass(RemoteParameter, data, requires_grad)
        assert isinstance(parameter, RemoteParameter)
        parameter.rref = rref
        return parameter

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Where its state and its gradient come to when they are fetched: host memory."""
        return _HOST

    @property
    def grad(self) -> RemoteGradient:
        """Stands for the gradient at the owner, whether it has one or not.

        ``tensorplay.distributed.nn.get_grads`` fetches it. Setting this to a tensor or to
        None sets it at the owner.
        """
        return RemoteGradient.of(self)

    @grad.setter
    def grad(self, new: torch.Tensor | None) -> None:
        gradients.set_grads([self.rref], [new])

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return (
            f"RemoteParameter({tuple(self.shape)}, dtype={self.dtype}, "
            f"owner={self.rref.owner_name()!r})"
        )


class RemoteGradient(torch.Tensor):
    """The gradient of a remote parameter, without its data.

    It is there for what ``torch.amp.GradScaler`` does with gradients, which is done at the
    owner. Anything else raises ``TypeError``.
    """

    parameter: RemoteParameter

    @staticmethod
    def of(parameter: RemoteParameter) -> RemoteGradient:
        """Returns the stand-in of the gradient of ``parameter``."""
        data = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        gradient = torch.Tensor._make_subclass(RemoteGradient, data)
        assert isinstance(gradient, RemoteGradient)
        gradient.parameter = parameter
        return gradient

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Where it comes to when it is fetched: host memory."""
        return _HOST

    @property
    def is_sparse(self) -> bool:  # type: ignore[override]
        """Always False: the owner sees to it if it is sparse."""
        return False

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch._amp_foreach_non_finite_check_and_unscale_:
            return _unscale(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") == "__get__":  # an attribute: shape, dtype, ...
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise TypeError(
            f"{getattr(func, '__name__', func)} needs the data of a gradient that is with the "
            "owner of its parameter: fetch it with tensorplay.distributed.nn.get_grads, or use "
            "clip_grad_norm_ and clip_grad_value_ of tensorplay.distributed.nn"
        )

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return f"RemoteGradient({self.parameter!r})"


def _unscale(
    grads: Sequence[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor
) -> None:
    """Multiplies gradients by ``inv_scale``; sets ``found_inf`` to 1 if one is not finite."""
    here = [grad for grad in grads if not isinstance(grad, RemoteGradient)]
    if here:
        torch._amp_foreach_non_finite_check_and_unscale_(here, found_inf, inv_scale)
    remote = [grad.parameter.rref for grad in grads if isinstance(grad, RemoteGradient)]
    if gradients.unscale(remote, inv_scale.item()):
        found_inf.fill_(1.0)
