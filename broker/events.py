"""What the broker's state is told, and what it tells the server to do."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from tensorplay.protocol.messages import Route


class Received(msgspec.Struct, frozen=True, gc=False):
    """Event: a message has come.

    Attributes:
        identity: The connection it came by.
        header: Its first frame.
        size: Bytes of the frames behind the header.
        key: The public key of the connection, if the broker asks for keys.
    """

    identity: bytes
    header: bytes
    size: int = 0
    key: str = ""


class Unreachable(msgspec.Struct, frozen=True, gc=False):
    """Event: the connection is gone, or not read.

    Attributes:
        identity: The connection.
        reason: Why, for people; by default how long it has been silent.
    """

    identity: bytes
    reason: str = ""


class Reachable(msgspec.Struct, frozen=True, gc=False):
    """Event: the connection stood when it was probed."""

    identity: bytes


class Tick(msgspec.Struct, frozen=True, gc=False):
    """Event: time has passed."""


class Send(msgspec.Struct, frozen=True, gc=False):
    """Command: send a control message by a connection."""

    identity: bytes
    header: bytes


class Probe(msgspec.Struct, frozen=True, gc=False):
    """Command: send a heartbeat, and tell at once whether the connection stands.

    A connection that cannot take it now stands; it need not be repeated.
    """

    identity: bytes
    header: bytes


class Forward(msgspec.Struct, frozen=True, gc=False):
    """Command: pass the message that was just received on, as it is.

    Attributes:
        identity: The receiver's connection.
        sender: The sender's connection.
        route: Its header.
        size: Bytes of the frames behind the header.
    """

    identity: bytes
    sender: bytes
    route: Route
    size: int


class Forget(msgspec.Struct, frozen=True, gc=False):
    """Command: throw away what waits for a connection."""

    identity: bytes


class Overflowed(msgspec.Struct, frozen=True, gc=False):
    """Event: a message could not be kept for a receiver that is too slow."""

    forward: Forward


Event: TypeAlias = Received | Unreachable | Reachable | Tick | Overflowed
Command: TypeAlias = Send | Probe | Forward | Forget
