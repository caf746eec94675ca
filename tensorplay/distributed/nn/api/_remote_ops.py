"""What a handle has its module's owner do; each function runs there.

They take the RRef of the module first and answer with values, or with RRefs of what stays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch.nn import Module, Parameter

from tensorplay.distributed import rpc
from tensorplay.distributed.nn.api._moving import home_of, is_host, to_home, to_host
from tensorplay.distributed.nn.api._shell import ModuleShell
from tensorplay.distributed.rpc.allow import check_method, wire_safe

__all__ = ["LoadReport", "Placement"]


@wire_safe(builds=True, calls=False)
class Placement(NamedTuple):
    """A module that its owner holds.

    Attributes:
        module_rref: Refers to it.
        module_type: Its class's name.
        training: Whether it is in training mode.
    """

    module_rref: rpc.RRef[Module]
    module_type: str
    training: bool


@wire_safe(builds=True, calls=False)
class LoadReport(NamedTuple):
    """What became of a state dict; the lists are those of ``nn.Module.load_state_dict``."""

    missing_keys: list[str]
    unexpected_keys: list[str]
    error_msgs: list[str]


@wire_safe(vets=(0,))
def _create_module(
    module_cls: Callable[..., Module], args: tuple[Any, ...], kwargs: dict[str, Any], device: str
) -> Module:
    module = module_cls(*args, **kwargs)
    if not isinstance(module, Module):
        raise ValueError(
            f"module_cls(*args, **kwargs) must return a tensorplay.nn.Module, got {type(module)!r}"
        )
    if isinstance(module, ModuleShell):
        raise ValueError(
            f"module_cls(*args, **kwargs) returned {module!r}, which is the handle of a remote "
            "module: use that handle, or a module that has it as a child"
        )
    module.to(device)
    return module


@wire_safe(vets=(0,))
def _place_module(
    module_cls: Callable[..., Module], args: tuple[Any, ...], kwargs: dict[str, Any], device: str
) -> Placement:
    return _placed(_create_module(module_cls, args, kwargs, device))


@wire_safe(vets=(0,))
def _restore_module(
    module_cls: Callable[..., Module],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: str,
    state: Mapping[str, Any] | None,
    training: bool,
) -> Placement:
    """Places a module that has the state and mode of one that was lost."""
    module = _create_module(module_cls, args, kwargs, device)
    if state is not None:
        module.load_state_dict(state)
    return _placed(module.train(training))


@wire_safe()
def _describe_module(module_rref: rpc.RRef[Module]) -> tuple[str, bool]:
    """Returns class name and training mode of the module."""
    module: Any = module_rref.local_value()
    if not isinstance(module, Module) or isinstance(module, ModuleShell):
        raise ValueError(f"module_rref must refer to a tensorplay.nn.Module, got {type(module)!r}")
    return type(module).__name__, module.training


@wire_safe()
def _remote_forward(
    module_rref: rpc.RRef[Module],
    device: str,
    is_device_map_set: bool,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    # Calls the module, not its forward(), so that hooks on it run and compile() has an effect.
    module = _module(module_rref)
    home = home_of(module, device)
    if home.type != "cpu":
        args, kwargs = to_home((args, kwargs), home)
    result = module(*args, **kwargs)
    return result if is_device_map_set or is_host(home) else to_host(result)


@wire_safe()
def _param_rrefs(module_rref: rpc.RRef[Module], recurse: bool) -> list[rpc.RRef[Parameter]]:
    return [rpc.RRef(parameter) for parameter in _module(module_rref).parameters(recurse)]


@wire_safe()
def _set_training(module_rref: rpc.RRef[Module], mode: bool) -> None:
    _module(module_rref).train(mode)


@wire_safe()
def _compile(module_rref: rpc.RRef[Module], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    check_method(_module(module_rref), "compile")
    _module(module_rref).compile(*args, **kwargs)


@wire_safe()
def _get_tensor(module_rref: rpc.RRef[Module], method: str, target: str) -> Any:
    """Returns a parameter or buffer; ``method`` is the name of nn.Module's method."""
    if method not in ("get_parameter", "get_buffer"):
        raise ValueError(f"no tensor is had with {method!r}")
    path, _, name = target.rpartition(".")
    parent, rest = _descend(_module(module_rref), path)
    return getattr(parent, method)(f"{rest}.{name}" if rest else name)


@wire_safe()
def _get_submodule(module_rref: rpc.RRef[Module], target: str) -> Placement | Module:
    """Returns where the submodule is; if it is a handle of another module, that handle."""
    module, rest = _descend(_module(module_rref), target)
    if isinstance(module, ModuleShell):
        return module.get_submodule(rest)
    return _placed(module)


@wire_safe()
def _set_submodule(
    module_rref: rpc.RRef[Module], target: str, module: Module, strict: bool, device: str
) -> None:
    path, _, name = target.rpartition(".")
    parent, rest = _descend(_module(module_rref), path)
    if isinstance(parent, ModuleShell):
        parent.set_submodule(f"{rest}.{name}" if rest else name, module, strict)
    else:
        _settle(module, parent, device)
        parent.set_submodule(name, module, strict)


@wire_safe()
def _register_module(
    module_rref: rpc.RRef[Module], name: str, module: Module | None, device: str
) -> None:
    parent = _module(module_rref)
    if isinstance(module, Module):
        _settle(module, parent, device)
    parent.register_module(name, module)


@wire_safe()
def _get_extra_state(module_rref: rpc.RRef[Module]) -> Any:
    return _module(module_rref).get_extra_state()


@wire_safe()
def _set_extra_state(module_rref: rpc.RRef[Module], state: Any) -> None:
    _module(module_rref).set_extra_state(state)


@wire_safe()
def _to_empty(module_rref: rpc.RRef[Module], device: Any, recurse: bool, default: str) -> str:
    """Returns the device that the module is on now."""
    module = _module(module_rref)
    module.to_empty(device=device, recurse=recurse)
    return str(home_of(module, default))


@wire_safe()
def _save_state(module_rref: rpc.RRef[Module], keep_vars: bool) -> Mapping[str, Any]:
    return _module(module_rref).state_dict(keep_vars=keep_vars)


@wire_safe()
def _load_state(
    module_rref: rpc.RRef[Module],
    state_dict: dict[str, Any],
    prefix: str,
    metadata: Mapping[str, Any],
    assign: bool,
) -> LoadReport:
    """Loads the entries below ``prefix``, as ``nn.Module.load_state_dict`` does.

    That method itself would raise what is to be reported, and would not know the prefix that
    names a key in the container's error text.
    """
    root = _module(module_rref)
    report = LoadReport([], [], [])
    if assign and not is_host(home := home_of(root, "cpu")):
        state_dict = to_home(state_dict, home)  # they came over the wire, not from the user's host

    def load(module: Module, entries: dict[str, Any], prefix: str) -> None:
        local_metadata = dict(metadata.get(prefix[:-1], {}))
        if assign:
            local_metadata["assign_to_params_buffers"] = True
        module._load_from_state_dict(entries, prefix, local_metadata, True, *report)
        for name, child in module._modules.items():
            if child is not None:
                below = f"{prefix}{name}."
                load(child, {k: v for k, v in entries.items() if k.startswith(below)}, below)
        keys = torch.nn.modules.module._IncompatibleKeys(*report[:2])
        for hook in module._load_state_dict_post_hooks.values():
            hook(module, keys)

    load(root, state_dict, prefix)
    return report


def _module(module_rref: rpc.RRef[Module]) -> Module:
    module: Any = module_rref.local_value()
    if not isinstance(module, Module):
        raise ValueError(f"module_rref must refer to a tensorplay.nn.Module, got {type(module)!r}")
    return module


def _placed(module: Module) -> Placement:
    return Placement(rpc.RRef(module), type(module).__name__, module.training)


def _settle(module: Module, parent: Module, device: str) -> None:
    """Moves a module that was sent to where its new parent is."""
    home = home_of(parent, device)
    if not is_host(home) and not isinstance(module, ModuleShell):
        module.to(home)


def _descend(module: Module, target: str) -> tuple[Module, str]:
    """Follows a dotted name as ``nn.Module.get_submodule`` does, up to a handle.

    Returns:
        The module, and what is left of the name: that part lies beyond the handle.
    """
    names = target.split(".") if target else []
    for position, name in enumerate(names):
        if isinstance(module, ModuleShell):
            return module, ".".join(names[position:])
        module = module.get_submodule(name)
    return module, ""
