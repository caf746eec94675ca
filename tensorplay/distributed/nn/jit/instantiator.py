"""The two methods that a handle is given: ``forward`` and ``forward_async``.

They are closures over the signature of an interface, or take any arguments without one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Module

from tensorplay.distributed import rpc
from tensorplay.distributed.nn.api._remote_ops import _remote_forward
from tensorplay.distributed.rpc import api
from tensorplay.distributed.rpc.allow import wire_safe

__all__ = [
    "CallTarget",
    "GeneratedMethods",
    "RemoteModuleTemplate",
    "instantiate_non_scriptable_remote_module_template",
    "instantiate_scriptable_remote_module_template",
]

INTERFACE_MARKER = "__tensorplay_interface__"


class FirstCall:
    """Whether a handle has ever been answered: what comes before may take longer.

    Attributes:
        answered: Whether it has.
    """

    __slots__ = ("answered",)

    def __init__(self) -> None:
        self.answered = False

    def note(self, done: rpc.Future[Any]) -> None:
        """Takes the future of a call that has ended."""
        if done._failure is None:
            self.answered = True


@dataclass(frozen=True, slots=True)
class CallTarget:
    """Where the calls of a handle go.

    The methods of a handle are bound to this, not to the handle: a handle that is part of no
    reference cycle lets go of its module the moment it is dropped.
    """

    module_rref: rpc.RRef[Module]
    device: str
    is_device_map_set: bool
    first: FirstCall


class GeneratedMethods(tuple[Callable[..., Any], ...]):
    """``(forward_async, forward)``, and the interface that they were made from.

    Travels as that interface, so that any process can restore it.
    """

    interface: type | None = None

    @classmethod
    def of(cls, interface: type, methods: Iterable[Callable[..., Any]]) -> GeneratedMethods:
        """Returns the methods that were made from ``interface``."""
        made = cls(methods)
        made.interface = interface
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        if self.interface is None:
            return _generated_methods, ()
        return _generated_methods, (self.interface,)


@dataclass(frozen=True)
class RemoteModuleTemplate:
    """What was generated for one interface, or for none."""

    forward_async: Callable[..., rpc.Future[Any]]
    forward: Callable[..., Any]
    _generated_methods: GeneratedMethods


def forward_async(self: CallTarget, *args: Any, **kwargs: Any) -> rpc.Future[Any]:
    """Calls the remote module and returns the future of its result."""
    arguments = (self.device, self.is_device_map_set, *args)
    if self.first.answered:
        return api._call_owner(self.module_rref, _remote_forward, arguments, kwargs)
    future = api._call_owner(self.module_rref, _remote_forward, arguments, kwargs, first=True)
    # By the base class: the caller's own way to ask for the result stays unused.
    torch.futures.Future.add_done_callback(future, lambda done: self.first.note(future))
    return future


def forward(self: CallTarget, *args: Any, **kwargs: Any) -> Any:
    """Calls the remote module and returns its result."""
    return api._result(forward_async(self, *args, **kwargs))


_NON_SCRIPTABLE = RemoteModuleTemplate(
    forward_async, forward, GeneratedMethods((forward_async, forward))
)


def instantiate_non_scriptable_remote_module_template() -> RemoteModuleTemplate:
    """Returns the methods that pass on whatever they are called with."""
    return _NON_SCRIPTABLE


def instantiate_scriptable_remote_module_template(
    module_interface_cls: type, enable_moving_cpu_tensors_to_cuda: bool = True
) -> RemoteModuleTemplate:
    """Returns methods with the signature of an interface's ``forward``.

    Arguments that do not fit it raise TypeError at the caller, before anything is sent;
    defaults are the interface's.

    Args:
        module_interface_cls: A class marked with ``tensorplay.distributed.nn.interface``.
        enable_moving_cpu_tensors_to_cuda: Has no effect: host tensors always move to the
            module's device.

    Raises:
        AssertionError: If the class is not marked, or has no ``forward``.
    """
    if not getattr(module_interface_cls, INTERFACE_MARKER, False):
        raise AssertionError(
            f"{module_interface_cls!r} is no module interface: decorate the class with "
            "@tensorplay.distributed.nn.interface"
        )
    declared = getattr(module_interface_cls, "forward", None)
    if not inspect.isfunction(declared):
        raise AssertionError(
            f"the interface {module_interface_cls!r} must declare a method `forward`"
        )
    name = f"{module_interface_cls.__qualname__}.forward"
    full = inspect.signature(declared)
    signature = full.replace(parameters=list(full.parameters.values())[1:])  # without self

    def bind(args: tuple[Any, ...], kwargs: dict[str, Any]) -> inspect.BoundArguments:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{name}{signature}: {error}") from None
        bound.apply_defaults()
        return bound

    def checked_forward_async(self: CallTarget, *args: Any, **kwargs: Any) -> rpc.Future[Any]:
        bound = bind(args, kwargs)
        return forward_async(self, *bound.args, **bound.kwargs)

    def checked_forward(self: CallTarget, *args: Any, **kwargs: Any) -> Any:
        bound = bind(args, kwargs)
        return forward(self, *bound.args, **bound.kwargs)

    for generated, original in ((checked_forward_async, forward_async), (checked_forward, forward)):
        generated.__name__ = original.__name__
        generated.__doc__ = original.__doc__
    checked_forward.__signature__ = full  # type: ignore[attr-defined]
    checked_forward_async.__signature__ = full.replace(  # type: ignore[attr-defined]
        return_annotation=rpc.Future
    )
    methods = GeneratedMethods.of(module_interface_cls, (checked_forward_async, checked_forward))
    return RemoteModuleTemplate(checked_forward_async, checked_forward, methods)


@wire_safe(builds=True, calls=False)
def _generated_methods(interface: type | None = None) -> GeneratedMethods:
    if interface is None:
        return _NON_SCRIPTABLE._generated_methods
    return instantiate_scriptable_remote_module_template(interface)._generated_methods
