"""What a handle is as an ``nn.Module``: a module with nothing in it.

Called on the handle itself, the methods that would look into a module are refused.  Inside a
local container the handle takes part in what torch does with the container, as a child without
parameters, buffers or children.  The two are told apart by how torch reaches a child:

    named_modules   with the ``memo`` of the walk
    state_dict      with the ``destination`` to fill
    to, half, ...   through ``_apply``, which the handle answers for itself
    apply           with nothing that tells; here the calling frame is looked at
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeVar

from torch.nn import Module, Parameter
from typing_extensions import Self

__all__ = ["MODULE_TABLES", "ModuleShell"]

S = TypeVar("S", bound="ModuleShell")

#: The attributes that nn.Module gives each instance: hook tables, children and so on.
MODULE_TABLES = frozenset(vars(Module()))

_REFUSED = (
    "register_buffer",
    "register_parameter",
    "add_module",
    "cuda",
    "ipu",
    "xpu",
    "mtia",
    "cpu",
    "type",
    "float",
    "double",
    "half",
    "bfloat16",
    "to",
    "register_backward_hook",
    "register_forward_pre_hook",
    "register_forward_hook",
    "load_state_dict",
    "named_parameters",
    "buffers",
    "named_buffers",
    "children",
    "named_children",
    "modules",
    "requires_grad_",
    "zero_grad",
    "share_memory",
    "extra_repr",
)


def _raise_not_supported(name: str) -> NoReturn:
    raise ValueError(f"Method {name!r} is not supported by RemoteModule")


def _refuse(names: tuple[str, ...]) -> Callable[[type[S]], type[S]]:
    """Has a class refuse those methods of nn.Module, whatever the arguments."""

    def refusing(cls: type[S]) -> type[S]:
        for name in names:
            setattr(cls, name, _refusal(name))
        return cls

    return refusing


def _refusal(name: str) -> Callable[..., NoReturn]:
    def method(self: Module, *args: Any, **kwargs: Any) -> NoReturn:
        _raise_not_supported(name)

    original = getattr(Module, name, None)  # torch versions differ in which devices they know
    if original is not None:
        functools.update_wrapper(method, original, assigned=("__name__", "__annotations__"))
    method.__doc__ = f"Not supported: raises ValueError. The module's ``{name}`` is remote."
    return method


@_refuse(_REFUSED)
class ModuleShell(Module):
    """An ``nn.Module`` without state of its own.

    Attributes:
        training: Whether the module is in training mode, as far as this handle knows.
    """

    # Not in __dict__, which holds what travels and what the user added.
    __slots__ = ("_module_type", "training")

    _module_type: str | None

    def __getattr__(self, name: str) -> Any:
        # A handle that came over the wire makes nn.Module's tables when one is first needed.
        if name in MODULE_TABLES and name != "training":
            for table, empty in vars(Module()).items():
                if table != "training":
                    self.__dict__.setdefault(table, empty)
            return self.__dict__[name]
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, (Module, Parameter)):
            kind = "Module" if isinstance(value, Module) else "Parameter"
            raise ValueError(
                f"cannot assign a {kind} as attribute {name!r} of a RemoteModule, it would stay "
                f"local: use set_submodule({name!r}, ...) or register_module({name!r}, ...) to "
                "put a module into the remote one"
            )
        super().__setattr__(name, value)

    def parameters(self, recurse: bool = True) -> Iterator[Parameter]:
        """Not supported: raises ValueError; see ``remote_parameters``."""
        raise ValueError("Use remote_parameters() to access remote parameters")

    def named_modules(
        self,
        memo: set[Module] | None = None,
        prefix: str = "",
        remove_duplicate: bool = True,
    ) -> Iterator[tuple[str, Module]]:
        """Not supported: raises ValueError. As a child, yields the handle and no more."""
        if memo is None:
            _raise_not_supported("named_modules")
        if self in memo:
            return iter(())
        if remove_duplicate:
            memo.add(self)
        return iter([(prefix, self)])

    def apply(self, fn: Callable[[Module], Any]) -> Self:
        """Not supported: raises ValueError. As a child, gives ``fn`` the handle."""
        if sys._getframe(1).f_code is not Module.apply.__code__:
            _raise_not_supported("apply")
        fn(self)
        return self

    def _apply(self, fn: Callable[[Any], Any], recurse: bool = True) -> Self:
        return self  # there is nothing local to convert

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Not supported: raises ValueError; see ``remote_state_dict``.

        As a child, puts the remote state into the container's.
        """
        if not args and kwargs.get("destination") is None:
            _raise_not_supported("state_dict")
        return super().state_dict(*args, **kwargs)

    def __getstate__(self) -> NoReturn:
        raise RuntimeError("RemoteModule can only be serialized by the RPC pickler")

    def __setstate__(self, state: Any) -> NoReturn:
        raise RuntimeError("RemoteModule can only be restored by the RPC pickler")
