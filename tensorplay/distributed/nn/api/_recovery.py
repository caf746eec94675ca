"""Making the module of a handle afresh after its worker was lost and has come back."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from torch.nn import Module

from tensorplay.distributed import rpc
from tensorplay.distributed.nn.api import _remote_ops as ops
from tensorplay.distributed.nn.api._parts import call_unrecorded
from tensorplay.errors import ConfigError, OwnerLostError, WorkerNotFoundError

__all__ = ["OnLost", "Recovery", "check_on_lost"]

_log = logging.getLogger(__name__)

#: What becomes of a handle whose worker was lost: its uses raise, or its module is made afresh.
OnLost = Literal["raise", "recreate"]


def check_on_lost(on_lost: Any) -> OnLost:
    """Returns the argument ``on_lost`` of a handle.

    Raises:
        ConfigError: If it is none of the values that it can have.
    """
    if on_lost not in get_args(OnLost):
        raise ConfigError(f"on_lost is 'raise' or 'recreate', got {on_lost!r}")
    choice: OnLost = on_lost
    return choice


@dataclass(eq=False)
class Recovery:
    """What a module can be made afresh from.

    Attributes:
        module_cls: The class, or any callable that returns the module.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        state: The module's state at the last checkpoint, in host memory; None without one.
        lock: Held while the module is made, so that threads do not make several.
    """

    module_cls: Callable[..., Module]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    state: Mapping[str, Any] | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def make(self, lost: rpc.RRef[Module], device: str, training: bool) -> ops.Placement:
        """Makes the module on the process that has the lost owner's name now.

        Waits for one to come if there is none, at most as long as a call may take.

        Args:
            lost: Refers to the module that was lost with its owner.
            device: The module's device there, as text.
            training: Whether the module is to be in training mode.

        Raises:
            OwnerLostError: If no such process comes in time.
            WorkerLostError: If it is lost, too, meanwhile.
            RuntimeError: If the state does not fit what the constructor makes.
            Exception: Whatever the constructor raises.
        """
        name, seconds = lost.owner_name(), rpc.get_rpc_timeout()
        try:
            rpc.wait_for_workers([name], seconds or None)
        except WorkerNotFoundError as error:
            raise OwnerLostError(
                f"worker {name!r}, which owned the module {lost!r}, is gone and did not come back "
                f"within {seconds} s, the time-out of calls"
            ) from error
        recipe = (self.module_cls, self.args, self.kwargs, device, self.state, training)
        placement = call_unrecorded(name, ops._restore_module, *recipe)
        _log.warning(
            "made the module of %r afresh on worker %r, from its constructor's arguments%s",
            placement.module_type,
            name,
            "" if self.state is None else " and its last checkpoint",
        )
        return placement
