"""How the operator's commands reach a broker: a bare socket, no registration, no torch."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

import click
import msgspec
import zmq

from tensorplay.address import BrokerAddress
from tensorplay.errors import BrokerError, ProtocolError, TensorPlayError
from tensorplay.keys import PeerKeys, peer_keys, secure
from tensorplay.protocol import wire
from tensorplay.protocol.messages import (
    Answer,
    Ask,
    Control,
    Status,
    StatusRequest,
    Stranger,
)

_F = TypeVar("_F", bound=Callable[..., Any])

#: Where the broker is unless told otherwise.
DEFAULT_BROKER = "tcp://127.0.0.1:5555"
#: Name of the key that the commands use unless told otherwise.
OPERATOR = "operator"
#: Seconds that an answer may take.
PATIENCE = 5.0


class RefusedError(TensorPlayError):
    """The broker or the peer has answered that it cannot or will not."""


class Operator:
    """Asks a broker, and through it its peers; a context manager.

    Args:
        address: Where the broker is; its namespace is that of the peers that are named.
        keys: The operator's keys, if the broker asks for some.
        timeout: Seconds that each answer may take.
    """

    def __init__(
        self, address: BrokerAddress, keys: PeerKeys | None = None, timeout: float = PATIENCE
    ) -> None:
        self.address = address
        self.timeout = timeout
        self._numbers = itertools.count(1)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IPV6, int(address.needs_ipv6()))
        if keys is not None:
            secure(self._socket, keys)
        self._socket.connect(address.endpoint)

    def __enter__(self) -> Operator:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._context.destroy(linger=0)

    def status(self) -> dict[str, Any]:
        """Returns the broker's status.

        Raises:
            BrokerError: If it does not answer in time.
        """
        status: dict[str, Any]
        self._send(StatusRequest())
        answer = self._receive(lambda message: isinstance(message, Status))
        assert isinstance(answer, Status)
        status = msgspec.json.decode(answer.json)
        return status

    def ask(self, what: str, name: str = "", **arguments: Any) -> dict[str, Any]:
        """Asks a peer, or without a name the broker itself.

        Args:
            what: The question or order.
            name: The peer.
            **arguments: What else there is to say.

        Raises:
            BrokerError: If nobody answers in time.
            RefusedError: If the answer is that it cannot be done; the text says why.
        """
        number = next(self._numbers)
        namespace = self.address.namespace
        self._send(Ask(number, what, name, namespace, msgspec.json.encode(arguments)))
        answer = self._receive(
            lambda message: isinstance(message, Answer) and message.id == number, name
        )
        assert isinstance(answer, Answer)
        if answer.error:
            raise RefusedError(answer.error)
        told: dict[str, Any] = msgspec.json.decode(answer.json)
        return told

    def _send(self, message: Control) -> None:
        self._socket.send(wire.encode(message))

    def _receive(self, wanted: Callable[[Any], bool], name: str = "") -> Any:
        deadline = time.monotonic() + self.timeout
        while self._socket.poll(max(0, int((deadline - time.monotonic()) * 1000))):
            try:
                message = wire.decode(self._socket.recv_multipart()[0])
            except ProtocolError as error:
                raise BrokerError(f"what answers at {self.address} is no broker: {error}") from None
            if wanted(message):
                return message
            if isinstance(message, Stranger):
                raise RefusedError(message.reason)
        if name:
            raise BrokerError(
                f"{name!r} did not answer within {self.timeout:g} s: its process is stopped, or "
                "busy with Python's lock held"
            )
        raise BrokerError(
            f"no broker answered at {self.address} ({', '.join(self.address.resolve())}) within "
            f"{self.timeout:g} s; is one running there (--broker, TENSORPLAY_BROKER), and does it "
            "ask for keys (--curve-dir, TENSORPLAY_CURVE_DIR)?"
        )


def options(command: _F) -> Callable[..., Any]:
    """Gives a command the options that say which broker to ask, and hands it an ``Operator``.

    Errors of the library become one line on standard error and exit code 1.
    """

    @click.option(
        "--broker",
        default=DEFAULT_BROKER,
        envvar="TENSORPLAY_BROKER",
        metavar="ADDRESS",
        show_default=True,
        show_envvar=True,
        help="Where the broker is: tcp://HOST:PORT[/NAMESPACE] or ipc://PATH[?NAMESPACE].",
    )
    @click.option(
        "--timeout",
        type=click.FloatRange(min=0.01),
        default=PATIENCE,
        metavar="SECONDS",
        show_default=True,
        help="Time that an answer may take.",
    )
    @click.option(
        "--curve-dir",
        envvar="TENSORPLAY_CURVE_DIR",
        metavar="DIR",
        show_envvar=True,
        help="Directory with the keys, for a broker that asks for some.",
    )
    @click.option(
        "--curve-key",
        default=OPERATOR,
        envvar="TENSORPLAY_CURVE_KEY",
        metavar="NAME",
        show_default=True,
        show_envvar=True,
        help="Name of the key to use.",
    )
    @click.option(
        "--curve-server",
        envvar="TENSORPLAY_CURVE_SERVER",
        metavar="KEY",
        show_envvar=True,
        help="The broker's public key, or a file with it; by default broker.key in DIR.",
    )
    @functools.wraps(command)
    def run(
        broker: str,
        timeout: float,
        curve_dir: str | None,
        curve_key: str,
        curve_server: str | None,
        **arguments: Any,
    ) -> Any:
        try:
            keys = peer_keys(curve_dir, curve_key, curve_server) if curve_dir else None
            with Operator(BrokerAddress.parse(broker), keys, timeout) as operator:
                return command(operator, **arguments)
        except TensorPlayError as error:
            raise click.ClickException(str(error)) from None

    return run
