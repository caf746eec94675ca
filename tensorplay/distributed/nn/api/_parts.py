"""Looking into a remote module, changing what it consists of, reading and loading its state."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.utils.hooks import RemovableHandle
from typing_extensions import Self

from tensorplay.distributed import rpc
from tensorplay.distributed.nn.api import _progress
from tensorplay.distributed.nn.api import _remote_ops as ops
from tensorplay.distributed.nn.api._shell import ModuleShell
from tensorplay.distributed.rpc import api
from tensorplay.distributed.rpc.constants import FIRST_CALL_FACTOR

__all__ = ["RemoteParts", "call_unrecorded"]

P = ParamSpec("P")
T = TypeVar("T")


class RemoteParts(ModuleShell):
    """A module whose parts and state are those of a module on a worker.

    Attributes:
        device: The module's device there, as text.
        module_rref: Refers to the module.
    """

    device: str
    module_rref: rpc.RRef[Module]

    def _handle_of(self, placement: ops.Placement) -> Module:
        """Returns a handle of another module of the same worker."""
        raise NotImplementedError

    def _install_generated_methods(self) -> None:
        """Binds the methods that call the module to where it is now."""
        raise NotImplementedError

    def _on_owner(self, function: Callable[..., T], *args: Any) -> T:
        """Has the module's owner run ``function`` on it, unseen by autograd."""
        return api._call_owner(self._live_module(), function, args, hooks=False).wait()

    def _moved(self, what: str, function: Callable[..., T], *args: Any) -> T:
        """Does the same with a function that takes or returns all that the module has."""
        future = api._call_owner(self._live_module(), function, args, hooks=False)
        return _progress.wait(future, what)

    def _live_module(self) -> rpc.RRef[Module]:
        """Returns the reference to the module, which may have to be made afresh first."""
        return self.module_rref

    def get_module_rref(self) -> rpc.RRef[Module]:
        """Returns the reference to the remote module."""
        return self.module_rref

    def remote_parameters(self, recurse: bool = True) -> list[rpc.RRef[Parameter]]:
        """Returns references to the module's parameters, for a ``DistributedOptimizer``.

        Args:
            recurse: Whether those of submodules are included.
        """
        return self._on_owner(ops._param_rrefs, recurse)

    def get_parameter(self, target: str) -> Parameter:
        """Returns a copy of a parameter of the remote module.

        Args:
            target: Its dotted name.

        Raises:
            AttributeError: If there is no parameter of that name.
        """
        parameter: Parameter = self._on_owner(ops._get_tensor, "get_parameter", target)
        return parameter

    def get_buffer(self, target: str) -> Tensor:
        """Returns a copy of a buffer of the remote module.

        Args:
            target: Its dotted name.

        Raises:
            AttributeError: If there is no buffer of that name.
        """
        buffer: Tensor = self._on_owner(ops._get_tensor, "get_buffer", target)
        return buffer

    def get_submodule(self, target: str) -> Module:
        """Returns a handle of a submodule, which stays where it is.

        Args:
            target: Its dotted name; this handle itself is returned for an empty one.

        Raises:
            AttributeError: If there is no submodule of that name.
        """
        if not target:
            return self
        found = self._on_owner(ops._get_submodule, target)
        if isinstance(found, Module):
            return found
        return self._handle_of(found)

    def set_submodule(self, target: str, module: Module, strict: bool = False) -> None:
        """Replaces or adds a submodule of the remote module.

        A copy of ``module`` is sent, and moved to the device of its new parent. A handle is
        sent as a handle.

        Args:
            target: The dotted name; the parent must exist.
            module: What to put there.
            strict: Whether it must replace one that exists.

        Raises:
            ValueError: If the name is empty or ``module`` is no module.
            AttributeError: If the parent does not exist, what is to be replaced is no module,
                or ``strict`` is set and there is nothing to replace.
        """
        if not target:
            raise ValueError("set_submodule needs the name of a submodule, got an empty one")
        if not isinstance(module, Module):
            raise ValueError(f"set_submodule needs an nn.Module, got {type(module)!r}")
        self._on_owner(ops._set_submodule, target, module, strict, self.device)

    def register_module(self, name: str, module: Module | None) -> None:
        """Adds a child to the remote module; a copy of ``module`` is sent.

        Raises:
            TypeError: If it is no module.
            KeyError: If the name is taken by another attribute or cannot be a child's.
        """
        self._on_owner(ops._register_module, name, module, self.device)

    def to_empty(self, *, device: str | torch.device | int | None, recurse: bool = True) -> Self:
        """Moves the remote module's parameters and buffers without copying their values.

        Args:
            device: A device of its worker.
            recurse: Whether submodules move, too.
        """
        self.device = self._on_owner(ops._to_empty, device, recurse, self.device)
        self._install_generated_methods()
        return self

    # Its state.

    def get_extra_state(self) -> Any:
        """Returns what the remote module's ``get_extra_state`` returns."""
        return self._on_owner(ops._get_extra_state)

    def set_extra_state(self, state: Any) -> None:
        """Gives ``state`` to the remote module's ``set_extra_state``."""
        self._on_owner(ops._set_extra_state, state)

    def remote_state_dict(self, *, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:
        """Returns a copy of the remote module's state, in host memory.

        State-dict hooks of this handle run here, those of the remote module there.

        Args:
            prefix: Put before each key.
            keep_vars: Whether parameters stay ``Parameter``; they are copies all the same.
        """
        return Module.state_dict(self, prefix=prefix, keep_vars=keep_vars)

    def load_remote_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Loads a state dict into the remote module.

        Hooks run as in ``remote_state_dict``.

        Args:
            state_dict: Keys and tensors as ``remote_state_dict`` returns them.
            strict: Whether the keys must be exactly the module's.
            assign: Whether the tensors replace the module's instead of being copied into them.

        Returns:
            A named tuple of the lists ``missing_keys`` and ``unexpected_keys``.

        Raises:
            RuntimeError: If keys or shapes do not fit; the text is that of
                ``nn.Module.load_state_dict``.
        """
        return Module.load_state_dict(self, state_dict, strict, assign)

    def register_state_dict_pre_hook(
        self, hook: Callable[[Module, str, bool], None]
    ) -> RemovableHandle:
        """Has ``hook(handle, prefix, keep_vars)`` run here before the remote state is read."""
        return _register("register_state_dict_pre_hook", self, hook)

    def register_state_dict_post_hook(
        self, hook: Callable[[Module, dict[str, Any], str, dict[str, Any]], None]
    ) -> RemovableHandle:
        """Has ``hook(handle, state_dict, prefix, local_metadata)`` run here after that.

        It may change ``state_dict`` in place.
        """
        return _register("register_state_dict_post_hook", self, hook)

    def register_load_state_dict_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Has a hook run here before a state dict is sent.

        It is called with ``(handle, state_dict, prefix, local_metadata, strict, missing_keys,
        unexpected_keys, error_msgs)``.
        """
        return _register("register_load_state_dict_pre_hook", self, hook)

    def register_load_state_dict_post_hook(
        self, hook: Callable[[Module, Any], None]
    ) -> RemovableHandle:
        """Has ``hook(handle, incompatible_keys)`` run here after a state dict was loaded.

        Keys that it adds or removes count for ``strict``.
        """
        return _register("register_load_state_dict_post_hook", self, hook)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        state = self._moved(f"state from {self.on}", ops._save_state, keep_vars)
        destination.update((prefix + name, value) for name, value in state.items())
        versions = getattr(destination, "_metadata", None)
        if versions is not None:
            for name, entry in getattr(state, "_metadata", {}).items():
                key = prefix + name if name else prefix[:-1]
                versions.setdefault(key, {}).update(entry)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        lists = missing_keys, unexpected_keys, error_msgs
        for hook in self._load_state_dict_pre_hooks.values():
            hook(state_dict, prefix, local_metadata, strict, *lists)
        entries = {name: value for name, value in state_dict.items() if name.startswith(prefix)}
        # torch hands a child its own versions only, but those of its children are wanted, too:
        # they are in a variable of the function that walks the modules, which calls this one.
        versions = sys._getframe(1).f_locals.get("metadata") or {}
        metadata = {name: entry for name, entry in versions.items() if name.startswith(prefix)}
        metadata[prefix[:-1]] = local_metadata
        assign = bool(local_metadata.get("assign_to_params_buffers", False))
        what = f"state to {self.on}"
        report = self._moved(what, ops._load_state, entries, prefix, metadata, assign)
        for ours, theirs in zip(lists, report, strict=True):
            ours.extend(theirs)


def call_unrecorded(
    to: str | int | rpc.WorkerInfo, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Has a worker run a function, unseen by autograd and apart from the caller's grad mode.

    For what handles modules as values: a parameter arrives as a parameter, not as the result
    of a computation. Takes as long as a first call may.
    """
    agent = api._get_current_rpc_agent()
    peer, timeout = agent.peer(to), FIRST_CALL_FACTOR * agent.rpc_timeout
    future: rpc.Future[T] = agent.call(peer, function, args, kwargs, timeout=timeout, hooks=False)
    return _progress.wait(future, f"module to {peer.name}")


def _register(method: str, module: Module, hook: Callable[..., None]) -> RemovableHandle:
    removable: RemovableHandle = getattr(Module, method)(module, hook)
    return removable
