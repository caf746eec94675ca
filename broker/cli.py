"""The command line of the broker."""

from __future__ import annotations

import logging
import os
import resource
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import click

from tensorplay import logs
from tensorplay.broker.config import DEFAULT_BIND, BrokerConfig
from tensorplay.errors import BrokerError, ConfigError
from tensorplay.heap import keep_freed_memory
from tensorplay.version import __version__

if TYPE_CHECKING:
    from tensorplay.broker.server import Broker

_log = logging.getLogger("tensorplay.broker")

#: Seconds that the peers of an embedded broker have to leave when its parent has ended.
DRAIN_SECONDS = 5.0
#: Seconds that a broker has to answer a check.
CHECK_SECONDS = 2.0


@click.command(
    name="broker",
    context_settings={"max_content_width": 100, "help_option_names": ["-h", "--help"]},
)
@click.option(
    "--bind",
    multiple=True,
    default=(DEFAULT_BIND,),
    envvar="TENSORPLAY_BIND",
    metavar="ENDPOINT",
    show_default=True,
    show_envvar=True,
    help="Listen at tcp://HOST:PORT or ipc://PATH; may be repeated (in the variable: separated "
    "by spaces). Port 0 is a free port; the line that is printed says which.",
)
@click.option(
    "--heartbeat-interval",
    type=float,
    default=BrokerConfig.heartbeat_interval,
    envvar="TENSORPLAY_HEARTBEAT_INTERVAL",
    metavar="SECONDS",
    show_default=True,
    show_envvar=True,
    help="Time between two heartbeats, both ways.",
)
@click.option(
    "--heartbeat-timeout",
    type=float,
    default=BrokerConfig.heartbeat_timeout,
    envvar="TENSORPLAY_HEARTBEAT_TIMEOUT",
    metavar="SECONDS",
    show_default=True,
    show_envvar=True,
    help="A peer whose host or process does not answer for so long is given up. A peer that "
    "computes is never silent in this sense.",
)
@click.option(
    "--reconnect-grace",
    type=float,
    default=BrokerConfig.reconnect_grace,
    envvar="TENSORPLAY_RECONNECT_GRACE",
    metavar="SECONDS",
    show_default=True,
    show_envvar=True,
    help="A peer whose connection broke has so long to come back before it counts as lost.",
)
@click.option(
    "--max-message-bytes",
    type=int,
    default=BrokerConfig.max_message_bytes,
    envvar="TENSORPLAY_MAX_MESSAGE_BYTES",
    metavar="BYTES",
    show_default=True,
    show_envvar=True,
    help="Largest request or reply; larger ones are errors at their sender.",
)
@click.option(
    "--queue-bytes",
    type=int,
    default=BrokerConfig.queue_bytes,
    envvar="TENSORPLAY_QUEUE_BYTES",
    metavar="BYTES",
    show_default=True,
    show_envvar=True,
    help="What is kept for one peer that reads slowly; what is more is sent again later.",
)
@click.option(
    "--max-peers",
    type=int,
    default=BrokerConfig.max_peers,
    envvar="TENSORPLAY_MAX_PEERS",
    metavar="NUMBER",
    show_default=True,
    show_envvar=True,
    help="Most peers that may be registered at once.",
)
@click.option(
    "--curve-dir",
    type=click.Path(file_okay=False),
    envvar="TENSORPLAY_CURVE_DIR",
    metavar="DIR",
    show_envvar=True,
    help="Let in only those whose public keys are in DIR/authorized, see `tensorplay keys`, and "
    "encrypt what is sent. DIR has the broker's own key, too.",
)
@click.option(
    "--handshake-timeout",
    type=float,
    default=BrokerConfig.handshake_timeout,
    envvar="TENSORPLAY_HANDSHAKE_TIMEOUT",
    metavar="SECONDS",
    show_default=True,
    show_envvar=True,
    help="Time that a new connection has to say who it is.",
)
@click.option(
    "--http",
    envvar="TENSORPLAY_HTTP",
    metavar="HOST:PORT",
    show_envvar=True,
    help="Serve a dashboard, /metrics for Prometheus, /healthz and /readyz there; needs the "
    'extra "http". Port 0 is a free port; the line that is printed says which.',
)
@click.option(
    "--http-token-file",
    type=click.Path(dir_okay=False),
    envvar="TENSORPLAY_HTTP_TOKEN_FILE",
    metavar="FILE",
    show_envvar=True,
    help="A file with the token that readers of the dashboard must show, as a bearer token or as "
    "the password that a browser asks for. Needed if other hosts can reach it.",
)
@click.option(
    "--drain-timeout",
    type=float,
    default=BrokerConfig.drain_timeout,
    envvar="TENSORPLAY_DRAIN_TIMEOUT",
    metavar="SECONDS",
    show_default=True,
    show_envvar=True,
    help="Time that what waits for slow peers has to go out on SIGTERM.",
)
@click.option(
    "--insecure",
    is_flag=True,
    envvar="TENSORPLAY_INSECURE",
    show_envvar=True,
    help="Allow endpoints that other hosts can reach. Whoever reaches the broker can run code "
    "on its workers.",
)
@click.option(
    "--exit-with-parent",
    is_flag=True,
    envvar="TENSORPLAY_EXIT_WITH_PARENT",
    show_envvar=True,
    help="End when standard input does, once the peers have left or after "
    f"{DRAIN_SECONDS:.0f} s, and leave Ctrl-C to the parent.",
)
@click.option(
    "--check",
    is_flag=True,
    help="Start nothing: ask the broker that runs at the first --bind on this host whether it is "
    f"well. Exit code 1 if it does not answer within {CHECK_SECONDS:.0f} s.",
)
@logs.options()
@click.version_option(__version__, prog_name="tensorplay broker")
def main(
    bind: tuple[str, ...],
    heartbeat_interval: float,
    heartbeat_timeout: float,
    reconnect_grace: float,
    max_message_bytes: int,
    queue_bytes: int,
    max_peers: int,
    curve_dir: str | None,
    handshake_timeout: float,
    http: str | None,
    http_token_file: str | None,
    drain_timeout: float,
    insecure: bool,
    exit_with_parent: bool,
    check: bool,
    log_level: str,
    log_json: bool,
) -> None:
    """Run the broker that workers and clients connect to.

    Prints "tensorplay broker ready at ENDPOINT" for each endpoint once it can be connected
    to, and runs until SIGTERM or Ctrl-C; then it passes on what waits for slow peers. A second
    one ends it at once.

    Exit codes: 0 ended as told, 1 failed (such as an address in use), 2 wrong usage.
    """
    logs.configure(log_level, json=log_json)
    keep_freed_memory()
    try:
        config = BrokerConfig(
            bind=bind,
            heartbeat_interval=heartbeat_interval,
            heartbeat_timeout=heartbeat_timeout,
            reconnect_grace=reconnect_grace,
            max_message_bytes=max_message_bytes,
            queue_bytes=queue_bytes,
            max_peers=max_peers,
            curve_dir=curve_dir,
            handshake_timeout=handshake_timeout,
            http=http,
            http_token=_http_token(http_token_file),
            drain_timeout=drain_timeout,
            insecure=insecure,
        )
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
    if check:
        _check(config)
        return
    from tensorplay.broker.server import Broker

    try:
        broker = Broker(config)
        broker.bind()
    except (BrokerError, ConfigError) as error:
        raise click.ClickException(str(error)) from None
    _allow_open_files(max_peers)
    _end_on_signals(broker, interrupt=not exit_with_parent)
    if exit_with_parent:
        threading.Thread(target=_end_with_input, args=(broker,), daemon=True).start()
    if insecure:
        _log.warning(
            "insecure: whoever can reach this broker can run code on its workers and clients"
        )
    for address in broker.addresses:
        click.echo(f"tensorplay broker ready at {address}")
    if broker.url is not None:
        click.echo(f"tensorplay broker dashboard at {broker.url}")
    try:
        broker.run()
    finally:
        broker.close()
    _log.info("ended")


def _http_token(file: str | None) -> str | None:
    if file is None:
        return None
    try:
        return Path(file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the token cannot be read from {file}: {error}") from None


def _check(config: BrokerConfig) -> None:
    from tensorplay.broker.check import check

    try:
        status = check(config.bind[0], CHECK_SECONDS, config.curve_dir)
    except (BrokerError, ConfigError) as error:
        raise click.ClickException(str(error)) from None
    peers = sum(len(namespace["peers"]) for namespace in status["namespaces"].values())
    click.echo(f"well: up for {status['uptime']:.0f} s, {peers} peers are registered")


def _allow_open_files(peers: int) -> None:
    """Raises this process's limit of open files, as far as it may, to what the peers need."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * peers + 256  # a peer that reconnects has two connections for a while
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _end_on_signals(broker: Broker, *, interrupt: bool) -> None:
    def end(number: int, frame: FrameType | None) -> None:
        if broker.stopping:
            os._exit(128 + number)
        broker.stop(broker.config.drain_timeout)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end if interrupt else signal.SIG_IGN)


def _end_with_input(broker: Broker) -> None:
    # Not sys.stdin: a thread inside its buffer would break the interpreter's exit.
    while os.read(sys.stdin.fileno(), 4096):
        pass
    broker.drain(DRAIN_SECONDS)
