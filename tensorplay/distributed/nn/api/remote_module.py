"""The handle of a module that lives on a worker.

remote_module    the handle: where its module is, and how it is called (this file)
_shell           what the handle is as an nn.Module
_remote_ops      what the module's owner runs for it
_recovery        making the module afresh after its worker was lost
_moving          between host memory and the module's device
"""

from __future__ import annotations

import collections
import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch.nn import Module
from typing_extensions import Self

from tensorplay.distributed import rpc
from tensorplay.distributed.nn.api import _remote_ops as ops
from tensorplay.distributed.nn.api._moving import is_host
from tensorplay.distributed.nn.api._parts import RemoteParts, call_unrecorded
from tensorplay.distributed.nn.api._recovery import OnLost, Recovery, check_on_lost
from tensorplay.distributed.nn.api._remote_ops import Placement
from tensorplay.distributed.nn.api._shell import MODULE_TABLES
from tensorplay.distributed.nn.jit import instantiator
from tensorplay.distributed.nn.jit.instantiator import CallTarget, FirstCall
from tensorplay.distributed.remote_device import _remote_device
from tensorplay.distributed.rpc import api
from tensorplay.distributed.rpc.allow import check_class, wire_safe
from tensorplay.distributed.rpc.internal import _internal_rpc_pickler
from tensorplay.errors import ConfigError

__all__ = ["RemoteModule", "interface"]

T = TypeVar("T")

# What a handle is sent as, in this order.
_REMOTE_MODULE_PICKLED_ATTRIBUTES = (
    "on",
    "device",
    "is_device_map_set",
    "is_scriptable",
    "generated_methods",
    "module_rref",
)
# What every handle has beside; all else was added by the user, and stays.
_REMOTE_MODULE_ATTRIBUTES_IGNORE_FOR_PICKLING = (
    "training",
    "_parameters",
    "_buffers",
    "_non_persistent_buffers_set",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_is_full_backward_hook",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_always_called",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
    "_modules",
    "forward_async",
    "forward",
)

_SerializedRemoteModule = collections.namedtuple(  # type: ignore[misc]
    "_SerializedRemoteModule", _REMOTE_MODULE_PICKLED_ATTRIBUTES
)

_CLASSIFIED = MODULE_TABLES.union(
    _REMOTE_MODULE_PICKLED_ATTRIBUTES, _REMOTE_MODULE_ATTRIBUTES_IGNORE_FOR_PICKLING
)
_warned_of: set[str] = set()


def interface(cls: type[T]) -> type[T]:
    """Marks a class as the interface of remote modules.

    Its ``forward`` gives the signature that a handle's ``forward`` and ``forward_async``
    have; a call that does not fit it raises TypeError before anything is sent.
    """
    setattr(cls, instantiator.INTERFACE_MARKER, True)
    return cls


@wire_safe(builds=True, calls=False)
class _RemoteModule(RemoteParts):
    """``RemoteModule`` with an interface.

    Args:
        remote_device: See ``RemoteModule``.
        module_cls: See ``RemoteModule``.
        args: See ``RemoteModule``.
        kwargs: See ``RemoteModule``.
        _module_interface_cls: A class marked with ``interface``; None takes any arguments.
        on_lost: See ``RemoteModule``.

    Attributes:
        on: Name or rank of the worker, as it was given.
        device: The module's device there, as text.
        is_device_map_set: Whether tensors to that worker keep to a device map.
        is_scriptable: Whether there is an interface.
        generated_methods: ``forward_async`` and ``forward``.
        module_rref: Refers to the module.
    """

    # Not in __dict__: it does not travel with the handle.
    __slots__ = ("_first_call", "_recovery")

    _first_call: FirstCall
    _recovery: Recovery | None  # where the module can be made afresh
    on: str | int
    is_device_map_set: bool
    is_scriptable: bool
    generated_methods: instantiator.GeneratedMethods

    def __init__(
        self,
        remote_device: str | torch.device,
        module_cls: Callable[..., Module],
        args: tuple[Any, ...] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        _module_interface_cls: type | None = None,
        *,
        on_lost: OnLost = "raise",
    ) -> None:
        super().__init__()
        arguments = tuple(args or ()), dict(kwargs or {})
        if check_on_lost(on_lost) == "recreate":
            self._recovery = Recovery(module_cls, *arguments)
        self._init_template(_module_interface_cls, self._prepare_init(remote_device))
        self._adopt(
            call_unrecorded(self.on, ops._place_module, module_cls, *arguments, self.device)
        )

    @classmethod
    def init_from_module_rref(
        cls,
        remote_device: str | torch.device,
        module_rref: rpc.RRef[Module],
        _module_interface_cls: type | None = None,
    ) -> Self:
        """Returns a handle of a module that is there already.

        Handles of one module share it: what one trains, the others call.

        Args:
            remote_device: Where it is; see ``RemoteModule``.
            module_rref: Refers to it; waits until it has been made.
            _module_interface_cls: A class marked with ``interface``; None takes any arguments.

        Raises:
            ValueError: If it refers to something that is no module.
        """
        handle = object.__new__(cls)
        handle._init_template(_module_interface_cls, handle._prepare_init(remote_device))
        described = api._call_owner(module_rref, ops._describe_module, hooks=False).wait()
        handle._adopt(Placement(module_rref, *described))
        return handle

    # Calling.

    def forward(self, *input: Any, **kwargs: Any) -> Any:
        """Calls the module on its worker and returns the result.

        Host tensors among the arguments move to the module's device, also in lists, tuples,
        dicts, named tuples and dataclasses. Tensors of the result come back to host memory
        unless a device map is set. Gradients flow back to the arguments and to the module's
        parameters. Call the handle itself to have hooks on the handle run.
        """
        return self._generated("forward")(*input, **kwargs)

    def forward_async(self, *input: Any, **kwargs: Any) -> rpc.Future[Any]:
        """Calls the module on its worker and returns the future of the result."""
        future: rpc.Future[Any] = self._generated("forward_async")(*input, **kwargs)
        return future

    def train(self, mode: bool = True) -> Self:
        """Sets the module's training mode on its worker; no weights move."""
        self._on_owner(ops._set_training, bool(mode))
        self.training = bool(mode)
        return self

    def eval(self) -> Self:
        """Sets the module to evaluation mode on its worker; no weights move."""
        return self.train(False)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compiles the module on its worker; the arguments are those of ``torch.compile``."""
        self._on_owner(ops._compile, args, kwargs)

    # Making it afresh.

    def checkpoint(self) -> None:
        """Takes a copy of the module's state, from which it is made afresh if it is lost.

        The copy replaces that of the last time. It is kept in this process's memory, and does
        not travel with the handle. Hooks of this handle do not run.

        Raises:
            ConfigError: If the handle was not made with ``on_lost="recreate"``.
        """
        recovery = self._own_recovery()
        if recovery is None:
            raise ConfigError(
                f"{self!r} keeps no checkpoints: it was not made here with on_lost='recreate'. Use "
                "remote_state_dict() to read its state"
            )
        recovery.state = self._moved(f"state from {self.on}", ops._save_state, False)

    def _live_module(self) -> rpc.RRef[Module]:
        recovery = self._own_recovery()
        if recovery is not None and self.module_rref._is_lost():
            with recovery.lock:
                if self.module_rref._is_lost():  # no other thread was quicker
                    placement = recovery.make(self.module_rref, self.device, self.training)
                    self.module_rref, self._module_type, self.training = placement
                    self._first_call = FirstCall()
        return self.module_rref

    def _own_recovery(self) -> Recovery | None:
        return getattr(self, "_recovery", None)

    # Making.

    def _prepare_init(self, remote_device: str | torch.device) -> bool:
        """Finds the worker; returns whether host tensors have to move to the module's device."""
        if not api._is_current_rpc_agent_set():
            raise AssertionError(
                "RemoteModule requires an initialized RPC runtime: call "
                "tensorplay.distributed.rpc.init_rpc first"
            )
        place = _remote_device(remote_device)
        on = place.rank() if place.worker_name() is None else place.worker_name()
        worker = rpc.get_worker_info(on)  # whoever asks, if only a device was given
        self.on = worker.name if on is None else on
        self.device = str(place.device())
        options = api._get_current_rpc_agent().options
        self.is_device_map_set = bool(options.device_maps.get(worker.name))
        return not is_host(place.device())

    def _init_template(
        self, module_interface_cls: type | None, enable_moving_cpu_tensors_to_cuda: bool
    ) -> None:
        if module_interface_cls is None:
            template = instantiator.instantiate_non_scriptable_remote_module_template()
        else:
            template = instantiator.instantiate_scriptable_remote_module_template(
                module_interface_cls, enable_moving_cpu_tensors_to_cuda
            )
        self.is_scriptable = module_interface_cls is not None
        self.generated_methods = template._generated_methods

    def _adopt(self, placement: Placement) -> None:
        self.module_rref, self._module_type, self.training = placement
        self._install_generated_methods()
        self._check_attribute_picklability()

    def _handle_of(self, placement: Placement) -> Module:
        handle = object.__new__(RemoteModule)
        for name in ("on", "device", "is_device_map_set"):
            setattr(handle, name, getattr(self, name))
        handle._init_template(None, not is_host(torch.device(self.device)))
        handle._adopt(placement)
        return handle

    def _install_generated_methods(self) -> None:
        if self._own_recovery() is not None:
            return  # its methods look each time where the module is
        for method in self.generated_methods:
            name = method.__name__
            if getattr(type(self), name) is getattr(_RemoteModule, name):  # not overridden
                setattr(self, name, self._generated(name))

    def _generated(self, name: str) -> functools.partial[Any]:
        method = next(method for method in self.generated_methods if method.__name__ == name)
        module = self._live_module()
        first = getattr(self, "_first_call", None)
        if first is None:
            first = self._first_call = FirstCall()
        target = CallTarget(module, self.device, self.is_device_map_set, first)
        return functools.partial(method, target)

    def _check_attribute_picklability(self) -> None:
        for name in vars(self):
            if name not in _CLASSIFIED:
                raise AttributeError(
                    f"Attribute {name!r} must be explicitly classified for RPC serialization: "
                    "set it after RemoteModule.__init__, and it stays in this process"
                )

    def __repr__(self) -> str:
        name = type(self).__name__
        rref = vars(self).get("module_rref")
        if rref is None:
            return f"{name}(not created)"
        return f"{name}({rref.owner_name()}/{self.device}, {self._module_type})"


@wire_safe(builds=True, calls=False)
class RemoteModule(_RemoteModule):
    """A module that lives on a worker, used like one that lives here.

    Calling the handle runs the module on its worker; gradients flow through the call. The
    handle can be a child of a local module, an argument of a call, or a child of another
    remote module: only the reference travels, and the module stays where it is until the last
    handle is gone.

    Args:
        remote_device: Where to put it: ``"<worker>/<device>"``, ``"rank:<rank>/<device>"``,
            ``"<worker>"`` for its host memory, or ``"<device>"`` for this process.
        module_cls: The class, or any callable that returns the module.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        on_lost: What becomes of this handle when its worker is lost. With ``"raise"`` its uses
            raise ``OwnerLostError`` for good. With ``"recreate"`` the next use waits, as long
            as a call may take, for a worker of that name to come back, and makes the module
            afresh there: from the constructor's arguments and the state that the last
            ``checkpoint()`` took. A call that was in flight raises ``WorkerLostError`` all the
            same. Handles that other processes got, and references to the lost module, to its
            parts and parameters stay lost.

    Raises:
        AssertionError: If RPC is not initialized.
        ConfigError: If ``on_lost`` is another value.
        ValueError: If there is no such worker or device, or what was made is no module.
        Exception: Whatever the constructor raised on the worker.
    """

    def __init__(
        self,
        remote_device: str | torch.device,
        module_cls: Callable[..., Module],
        args: tuple[Any, ...] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        *,
        on_lost: OnLost = "raise",
    ) -> None:
        super().__init__(remote_device, module_cls, args, kwargs, on_lost=on_lost)


@wire_safe(builds=True, calls=False)
def _remote_module_receiver(
    cls: type[_RemoteModule], module_type: str, training: bool, *attributes: Any
) -> _RemoteModule:
    check_class(cls, _RemoteModule)
    handle = object.__new__(cls)
    vars(handle).update(_SerializedRemoteModule._make(attributes)._asdict())
    if not isinstance(handle.generated_methods, instantiator.GeneratedMethods):
        raise TypeError("a handle of a remote module came without its methods")
    handle._module_type = module_type
    handle.training = training
    handle._install_generated_methods()
    return handle


def _remote_module_reducer(handle: _RemoteModule) -> tuple[Any, tuple[Any, ...]]:
    attributes = vars(handle)
    for name in attributes:
        if name not in _CLASSIFIED and name not in _warned_of:
            _warned_of.add(name)
            warnings.warn(
                f"the attribute {name!r} of a RemoteModule is not sent with it: only "
                f"{', '.join(_REMOTE_MODULE_PICKLED_ATTRIBUTES)} are",
                stacklevel=2,
            )
    values = (attributes[name] for name in _REMOTE_MODULE_PICKLED_ATTRIBUTES)
    return _remote_module_receiver, (
        type(handle),
        handle._module_type,
        handle.training,
        *values,
    )


_internal_rpc_pickler._register_reducer(_RemoteModule, _remote_module_reducer)
_internal_rpc_pickler._register_reducer(RemoteModule, _remote_module_reducer)
