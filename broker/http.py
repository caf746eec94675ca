"""The broker's web pages: dashboard, status, metrics, health checks.

They are served by a thread of their own from the snapshot that the routing thread has
published last.  Neither waits for the other: publishing is one assignment.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import ipaddress
import secrets
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from tensorplay.broker import metrics
from tensorplay.errors import BrokerError

_FOLDER = Path(__file__).parent / "dashboard"
#: Seconds without a new snapshot after which the routing thread counts as stuck.
STALE_SECONDS = 15.0
#: Seconds that requests under way have to finish when the broker ends.
_GRACE = 1
#: Pages that anybody may see: they say nothing but yes or no.
_OPEN = frozenset({"/healthz", "/readyz"})
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}


@dataclass(frozen=True)
class Snapshot:
    """A status at a time.

    Attributes:
        time: When it was taken, by the monotonic clock.
        json: The status.
        ready: Whether the broker takes peers.
    """

    time: float
    json: bytes
    ready: bool


class Site:
    """Serves the pages in a thread.

    Args:
        address: Host and port to listen at; port 0 is a free one.
        token: What readers must show, as a bearer token or as the password of basic
            authentication; None asks for none.

    Raises:
        BrokerError: If the address cannot be listened at.
    """

    def __init__(self, address: tuple[str, int], token: str | None = None) -> None:
        self._snapshot = Snapshot(0.0, b"{}", False)
        self._metrics = (self._snapshot, b"")
        self._socket = _listen(address)
        config = uvicorn.Config(
            self._application(token),
            access_log=False,  # it would have to keep tokens out
            date_header=False,
            http="h11",
            lifespan="off",
            log_config=None,
            log_level="warning",
            loop="asyncio",
            server_header=False,
            timeout_graceful_shutdown=_GRACE,
            ws="none",
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), name="tensorplay-http", daemon=True
        )

    @property
    def url(self) -> str:
        """Where the pages are."""
        host, port = self._socket.getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def start(self) -> None:
        """Begins to serve."""
        self._thread.start()

    def publish(self, json: bytes, *, ready: bool) -> None:
        """Shows a new status from now on; never blocks."""
        self._snapshot = Snapshot(time.monotonic(), json, ready)

    def close(self) -> None:
        """Ends the thread."""
        self._server.should_exit = True
        if self._thread.ident is not None:
            self._thread.join()
        self._socket.close()

    def _application(self, token: str | None) -> Starlette:
        return Starlette(
            routes=[
                Route("/", _index),
                Route("/api/status", self._status),
                Route("/metrics", self._prometheus),
                Route("/healthz", self._health),
                Route("/readyz", self._ready),
                Mount("/static", StaticFiles(directory=_FOLDER)),
            ],
            middleware=[
                Middleware(_Guard, token=token),
                Middleware(GZipMiddleware, minimum_size=2048, compresslevel=5),
            ],
        )

    async def _status(self, request: Request) -> Response:
        return Response(
            self._snapshot.json,
            media_type="application/json",
            headers={"cache-control": "no-store"},
        )

    async def _prometheus(self, request: Request) -> Response:
        snapshot = self._snapshot
        if self._metrics[0] is not snapshot:  # several may scrape
            self._metrics = (snapshot, metrics.render(msgspec.json.decode(snapshot.json)))
        return Response(self._metrics[1], media_type=metrics.CONTENT_TYPE)

    async def _health(self, request: Request) -> Response:
        age = time.monotonic() - self._snapshot.time
        if age > STALE_SECONDS:
            return PlainTextResponse(f"the routing loop is silent for {age:.0f} s\n", 503)
        return PlainTextResponse("well\n")

    async def _ready(self, request: Request) -> Response:
        if not self._snapshot.ready:
            return PlainTextResponse("the broker ends\n", 503)
        return await self._health(request)


async def _index(request: Request) -> Response:
    page = (_FOLDER / "index.html").read_bytes()
    return Response(page, media_type="text/html", headers={"cache-control": "no-cache"})


class _Guard:
    """Lets in who shows the token; without one, only who asks for this host by its name.

    The latter keeps web pages out that have their own name resolve to this host.
    """

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app = app
        self._digest = None if token is None else _digest(token.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        refusal = None if scope["path"] in _OPEN else self._refusal(headers)
        if refusal is not None:
            await refusal(scope, receive, _with_headers(send))
            return
        await self._app(scope, receive, _with_headers(send))

    def _refusal(self, headers: dict[bytes, bytes]) -> Response | None:
        if self._digest is None:
            if _is_own_name(headers.get(b"host", b"").decode("latin-1")):
                return None
            return PlainTextResponse("this host is not known by that name\n", 421)
        if secrets.compare_digest(
            _digest(_shown(headers.get(b"authorization", b""))), self._digest
        ):
            return None
        return PlainTextResponse(
            "a token is needed\n", 401, {"www-authenticate": 'Basic realm="tensorplay"'}
        )


def _with_headers(send: Send) -> Callable[[Any], Awaitable[None]]:
    async def sending(message: Any) -> None:
        if message["type"] == "http.response.start":
            more = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
            message = {**message, "headers": [*message["headers"], *more]}
        await send(message)

    return sending


def _shown(authorization: bytes) -> bytes:
    """Returns the token that a header shows, or nothing."""
    scheme, _, rest = authorization.partition(b" ")
    if scheme.lower() == b"bearer":
        return rest.strip()
    if scheme.lower() == b"basic":
        try:
            return base64.b64decode(rest, validate=True).partition(b":")[2]
        except binascii.Error:
            return b""
    return b""


def _digest(token: bytes) -> bytes:
    # Digests have one length: the comparison then tells nothing of the token's.
    return hashlib.sha256(token).digest()


def _is_own_name(host: str) -> bool:
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


def _listen(address: tuple[str, int]) -> socket.socket:
    host, port = address
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=64)
    except OSError as error:
        reason = error.strerror or str(error)
        raise BrokerError(f"cannot listen at http://{host}:{port}: {reason}") from None
