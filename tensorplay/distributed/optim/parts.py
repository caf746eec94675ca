"""The parts of a distributed optimizer as the process that has it knows them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tensorplay.distributed.optim import shard as remote
from tensorplay.distributed.optim.owners import Call, call_all, owner
from tensorplay.distributed.optim.shard import Shard
from tensorplay.distributed.rpc import RRef
from tensorplay.protocol.messages import PeerInfo


@dataclass
class Part:
    """The shard of one process, and which parameters it has.

    Attributes:
        peer: The process; None is this one.
        shard: The shard there.
        groups: The groups it has parameters of, in the order it has them, each with the
            positions in that group.
    """

    peer: PeerInfo | None
    shard: Shard | RRef[Shard]
    groups: dict[int, list[int]]

    def call(self, function: Callable[..., Any], *args: Any) -> Call:
        """Returns the call ``function(shard, *args)``.

        Raises:
            OwnerLostError: If the process is gone.
        """
        peer = owner(self.shard) if isinstance(self.shard, RRef) else None
        return Call(peer, function, (self.shard, *args))


class State(Mapping[torch.Tensor, Any]):
    """What the optimizers keep for the parameters; each look fetches it all."""

    def __init__(self, parts: list[Part], groups: list[dict[str, Any]]) -> None:
        self._parts = parts
        self._groups = groups

    def __getitem__(self, param: torch.Tensor) -> Any:
        return self._fetch()[param]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._fetch())

    def __len__(self) -> int:
        return len(self._fetch())

    def items(self) -> Any:
        """Returns the pairs; one round trip, where a loop over the keys would make many."""
        return self._fetch().items()

    def values(self) -> Any:
        """Returns the values; one round trip."""
        return self._fetch().values()

    def _fetch(self) -> dict[Any, Any]:
        found = call_all([part.call(remote.state) for part in self._parts])
        by_param: dict[Any, Any] = {}
        for part, state in zip(self._parts, found, strict=True):
            params = params_of(part, self._groups)
            for key, kept in state.items():
                by_param[params[key] if isinstance(key, int) else key] = kept
        return by_param


def params_of(part: Part, groups: Sequence[dict[str, Any]]) -> list[Any]:
    """Returns the parameters of a shard, in its order."""
    return [
        groups[group]["params"][position]
        for group, positions in part.groups.items()
        for position in positions
    ]
