"""Where the broker is: the forms of an address, and what they mean to ZeroMQ."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from tensorplay.errors import ConfigError
from tensorplay.protocol.messages import DEFAULT_NAMESPACE

_FORMS = '"tcp://host:port[/namespace]" or "ipc://path[?namespace]"'


@dataclass(frozen=True)
class BrokerAddress:
    """A broker's endpoint and a namespace in it.

    Attributes:
        endpoint: What ZeroMQ connects to, such as ``"tcp://127.0.0.1:5555"``.
        namespace: The namespace to join.
    """

    endpoint: str
    namespace: str = DEFAULT_NAMESPACE

    @classmethod
    def parse(cls, text: str) -> BrokerAddress:
        """Returns the address that ``text`` gives.

        Args:
            text: ``"tcp://host:port[/namespace]"`` or ``"ipc://path[?namespace]"``.

        Raises:
            ConfigError: If it has another form.
        """
        if text.startswith("ipc://"):
            path, _, namespace = text.removeprefix("ipc://").partition("?")
            if path:
                return cls(f"ipc://{path}", namespace or DEFAULT_NAMESPACE)
        elif text.startswith("tcp://"):
            parts = urlsplit(text)
            try:
                port = parts.port
            except ValueError:
                port = None
            if parts.hostname and port:
                host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
                return cls(f"tcp://{host}:{port}", parts.path.strip("/") or DEFAULT_NAMESPACE)
        raise ConfigError(f"{text!r} is no address of a broker; expected {_FORMS}")

    def __str__(self) -> str:
        if self.namespace == DEFAULT_NAMESPACE:
            return self.endpoint
        return f"{self.endpoint}{'?' if self.endpoint.startswith('ipc') else '/'}{self.namespace}"

    def resolve(self) -> list[str]:
        """Returns the numeric addresses behind a TCP endpoint, for messages to people."""
        if not self.endpoint.startswith("tcp://"):
            return [self.endpoint]
        parts = urlsplit(self.endpoint)
        try:
            found = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_STREAM)
        except OSError as error:
            return [f"{parts.hostname}: {error}"]
        return list(dict.fromkeys(f"{entry[4][0]!s}:{entry[4][1]!s}" for entry in found))

    def needs_ipv6(self) -> bool:
        """Returns whether the host is reached by IPv6 alone.

        A name may stand for an IPv4 and an IPv6 address of which one answers; libzmq tries
        a single one. IPv4 is preferred unless only IPv6 exists or answers.
        """
        if not self.endpoint.startswith("tcp://"):
            return False
        parts = urlsplit(self.endpoint)
        try:
            found = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_STREAM)
        except OSError:
            return False
        families = {entry[0] for entry in found}
        if socket.AF_INET6 not in families:
            return False
        if socket.AF_INET not in families:
            return True
        return _answers(found, socket.AF_INET6) and not _answers(found, socket.AF_INET)


def _answers(found: Sequence[tuple[Any, ...]], family: socket.AddressFamily) -> bool:
    for entry in found:
        if entry[0] != family:
            continue
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.settimeout(1.0)
            if probe.connect_ex(entry[4]) == 0:
                return True
    return False
