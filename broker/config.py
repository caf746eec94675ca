"""The broker's options."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field, fields
from typing import Any
from urllib.parse import urlsplit

from tensorplay.errors import ConfigError

#: Where the broker listens unless told otherwise.
DEFAULT_BIND = "tcp://127.0.0.1:5555"
#: ZeroMQ sends a heartbeat's time to live in 16 bits of tenths of a second.
_MAX_TIMEOUT = 6000.0
#: Characters of the shortest token that is taken.
_MIN_TOKEN = 16


@dataclass(frozen=True, kw_only=True)
class BrokerConfig:
    """Options of a broker.

    Args:
        bind: Endpoints to listen at, ``tcp://host:port`` (port 0: a free one) or ``ipc://path``.
        heartbeat_interval: Seconds between two heartbeats, both ways.
        heartbeat_timeout: Seconds of silence after which a peer's connection is given up.
        reconnect_grace: Seconds that a peer has to come back whose connection broke.
        max_message_bytes: Largest request or reply that is passed on, its chunks included.
        queue_bytes: Bytes kept for one peer that reads slower than others send to it; who
            sends more has to send it again.
        max_peers: Most peers that may be registered at once.
        curve_dir: The key directory, see ``tensorplay keys``: who connects must have one of the
            keys in its folder ``authorized``. None asks nobody for a key.
        http: Where the dashboard and the metrics are served, ``"host:port"`` (port 0: a free one);
            None serves none.
        http_token: What their readers must show; needed where other hosts can reach them.
        insecure: Listen at addresses that other hosts can reach, without authentication.
        handshake_timeout: Seconds that a new connection has to say who it is.
        drain_timeout: Seconds that what waits for slow peers has to go out when the broker's
            process is told to end.

    Raises:
        ConfigError: If a value cannot work.
    """

    bind: tuple[str, ...] = (DEFAULT_BIND,)
    heartbeat_interval: float = 1.0
    heartbeat_timeout: float = 5.0
    reconnect_grace: float = 1.0
    max_message_bytes: int = 64 << 30
    queue_bytes: int = 128 << 20
    max_peers: int = 4096
    curve_dir: str | None = None
    http: str | None = None
    http_token: str | None = field(default=None, repr=False)
    insecure: bool = False
    handshake_timeout: float = 5.0
    drain_timeout: float = 5.0

    def __post_init__(self) -> None:
        if not self.bind:
            raise ConfigError("a broker needs at least one endpoint to listen at")
        for endpoint in self.bind:
            self._check_endpoint(endpoint)
        self._check_http()
        if not self.heartbeat_interval >= 0.01:  # nor NaN
            raise ConfigError(
                f"heartbeat_interval must be at least 0.01 s, got {self.heartbeat_interval}"
            )
        if not self.heartbeat_interval < self.heartbeat_timeout <= _MAX_TIMEOUT:
            raise ConfigError(
                f"heartbeat_timeout must be above heartbeat_interval "
                f"({self.heartbeat_interval} s) and at most {_MAX_TIMEOUT:.0f} s, "
                f"got {self.heartbeat_timeout}"
            )
        if not 0.1 <= self.handshake_timeout <= _MAX_TIMEOUT:
            raise ConfigError(
                f"handshake_timeout must be 0.1 to {_MAX_TIMEOUT:.0f} s, "
                f"got {self.handshake_timeout}"
            )
        if self.curve_dir and self.insecure:
            raise ConfigError(
                "curve_dir (--curve-dir) and insecure (--insecure) exclude each other"
            )
        if not 0 <= self.reconnect_grace <= _MAX_TIMEOUT:
            raise ConfigError(
                f"reconnect_grace must be 0 to {_MAX_TIMEOUT:.0f} s, got {self.reconnect_grace}"
            )
        if not 0 <= self.drain_timeout <= _MAX_TIMEOUT:
            raise ConfigError(
                f"drain_timeout must be 0 to {_MAX_TIMEOUT:.0f} s, got {self.drain_timeout}"
            )
        for name in ("max_message_bytes", "queue_bytes", "max_peers"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def http_address(self) -> tuple[str, int] | None:
        """Host and port of the dashboard."""
        if self.http is None:
            return None
        parts = urlsplit(f"//{self.http}")
        try:
            host, port = parts.hostname, parts.port
        except ValueError:
            host, port = None, None
        if not host or port is None or parts.path:
            raise ConfigError(
                f'cannot serve the dashboard at {self.http!r}; expected "host:port" (--http)'
            )
        return host, port

    def _check_http(self) -> None:
        if self.http_token is not None and len(self.http_token) < _MIN_TOKEN:
            raise ConfigError(f"http_token must have at least {_MIN_TOKEN} characters")
        address = self.http_address
        if address is not None and self.http_token is None and not _is_loopback(address[0]):
            raise ConfigError(
                f"the dashboard at {self.http!r} can be reached from other hosts: say a token "
                "(--http-token-file), or serve it at 127.0.0.1"
            )

    def public(self) -> dict[str, Any]:
        """Returns the options that everybody may know who may see the status."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.repr}

    def _check_endpoint(self, endpoint: str) -> None:
        if endpoint.startswith("ipc://") and len(endpoint) > len("ipc://"):
            return
        if not endpoint.startswith("tcp://"):
            raise ConfigError(
                f'cannot listen at {endpoint!r}; expected "tcp://host:port" or "ipc://path"'
            )
        host = _host(endpoint)
        if not (self.curve_dir or self.insecure) and not _is_loopback(host):
            raise ConfigError(
                f"{endpoint!r} can be reached from other hosts, and whoever reaches the broker "
                "can run code on its workers; listen at tcp://127.0.0.1:PORT, or let in only "
                "those whose keys you know, with --curve-dir (curve_dir, see `tensorplay keys`), "
                "or say --insecure (insecure=True) if everybody on that network may do so"
            )


def needs_ipv6(endpoint: str) -> bool:
    """Returns whether ``endpoint`` is a TCP endpoint with an IPv6 address."""
    return endpoint.startswith("tcp://[")


def _host(endpoint: str) -> str:
    try:
        parts = urlsplit(endpoint)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or port is None or parts.path:
        raise ConfigError(
            f"cannot listen at {endpoint!r}; a TCP endpoint is tcp://host:port, with port 0 "
            "for a free one, and has no namespace: that is for peers to say"
        )
    return host


def _is_loopback(host: str) -> bool:
    if host in ("localhost", "lo"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
