"""Parameter groups on their way from the user to the owners of their parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tensorplay.distributed.optim.options import Options, options
from tensorplay.distributed.optim.owners import Param, flatten, same_peer, shares, value
from tensorplay.distributed.optim.remote_parameter import RemoteParameter
from tensorplay.distributed.optim.shard import GroupInfo
from tensorplay.distributed.rpc import RRef
from tensorplay.protocol.messages import PeerInfo


@dataclass
class Group:
    """A parameter group as the user gave it.

    Attributes:
        params: Its parameters.
        names: Their names, if it was given named ones.
        options: The options that it sets.
    """

    params: list[Param]
    names: list[str] | None
    options: Options

    def of(self, positions: Sequence[int]) -> dict[str, Any]:
        """Returns a group of some of the parameters, as an optimizer's class takes it."""
        names = self.names and [self.names[i] for i in positions]
        part = Group([self.params[i] for i in positions], names, self.options)
        return {**self.options, "params": part.named(part.params)}

    def named(self, params: Sequence[Any]) -> list[Any]:
        """Returns ``params`` with the names of the group's own, if those have names."""
        return list(params) if self.names is None else list(zip(self.names, params, strict=True))


class Owner(NamedTuple):
    """A process that owns parameters of some groups.

    Attributes:
        peer: The process; None is this one.
        groups: The indexes of the groups, each with the positions in that group.
    """

    peer: PeerInfo | None
    groups: dict[int, list[int]]


def listed(params: Iterable[Any]) -> list[Any]:
    """Returns what a user gave an optimizer as a list.

    Raises:
        TypeError: If it is a single parameter.
        ValueError: If it is empty.
    """
    if isinstance(params, (torch.Tensor, RRef)):
        raise TypeError(
            "params argument given to the optimizer should be an iterable of RRefs, parameters "
            f"or dicts, but got {type(params).__qualname__}"
        )
    items = [params] if hasattr(params, "remote_parameters") else list(params)
    if not items:
        raise ValueError("optimizer got an empty parameter list")
    return items


def as_group(given: Mapping[str, Any]) -> Group:
    """Returns a group that a user gave as a dict.

    Raises:
        TypeError: If it is none, or its parameters are none or have no order.
        ValueError: If only some of its parameters have names.
    """
    if not isinstance(given, Mapping):
        raise TypeError(f"param_group must be a dict, but got {type(given)}")
    params = given["params"]
    if isinstance(params, set):
        raise TypeError("optimizer parameters need an order, but sets have none: use a list")
    if not isinstance(params, (torch.Tensor, RRef)):
        params = list(params)
        named = [isinstance(param, tuple) for param in params]
        if any(named):
            if not all(named):
                raise ValueError("either all parameters of an optimizer have names, or none")
            names = [name for name, _ in params]
            return Group(flatten([param for _, param in params]), names, options(given))
    return Group(flatten(params), None, options(given))


def by_owner(groups: Sequence[Group]) -> list[Owner]:
    """Returns the owners of the parameters, and what each of them has."""
    owners: list[Owner] = []
    for index, group in enumerate(groups):
        for peer, positions in shares(group.params):
            owner = next((owner for owner in owners if same_peer(owner.peer, peer)), None)
            if owner is None:
                owners.append(owner := Owner(peer, {}))
            owner.groups[index] = positions
    return owners


def fill(entries: list[Any], positions: Sequence[int], info: GroupInfo) -> None:
    """Puts the stand-ins of remote parameters, and local parameters, in place of RRefs."""
    for position, param in zip(positions, info.params, strict=True):
        entry = entries[position]
        if not isinstance(entry, RRef):
            continue
        if entry.is_owner():
            entries[position] = value(entry)
        else:
            entries[position] = RemoteParameter.of(entry, param)
