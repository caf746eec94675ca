"""The broker: knows who is there, passes messages on, never looks inside them.

``python -m tensorplay.broker`` runs one; ``Broker(BrokerConfig())`` embeds one.  Nothing
here imports torch, numpy or a pickler: the broker starts fast and stays small.

    events            what the state is told, and what it tells the server to do
    registry          who is registered where: names, ids, connections
    state             BrokerState.handle(event, now) -> [commands]; no socket, no clock
    outbound          what waits for peers that do not read fast enough
    server            the loop around one ROUTER socket
    status            the state as JSON
    check             asks a broker whether it is well
    rights            what the keys of those who connect let them do
    authenticator     answers ZeroMQ's question whether a key may connect
    config, cli       options and the command line
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if __name__ != "tensorplay.broker":
    raise ImportError(
        f"this package is tensorplay.broker, but it was imported as {__name__!r}; "
        "run `python -m tensorplay.broker` from an installed tensorplay"
    )

if TYPE_CHECKING:
    from tensorplay.broker.config import BrokerConfig as BrokerConfig
    from tensorplay.broker.server import Broker as Broker

__all__ = ["Broker", "BrokerConfig"]


def __getattr__(name: str) -> Any:
    if name == "Broker":
        from tensorplay.broker.server import Broker

        return Broker
    if name == "BrokerConfig":
        from tensorplay.broker.config import BrokerConfig

        return BrokerConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
