"""The command line of a worker."""

from __future__ import annotations

import sys
from typing import Any

import click

from tensorplay import logs
from tensorplay.errors import ConfigError
from tensorplay.version import __version__
from tensorplay.worker import output


@click.command(
    name="worker",
    context_settings={"max_content_width": 100, "help_option_names": ["-h", "--help"]},
)
@click.option(
    "--broker",
    envvar="TENSORPLAY_BROKER",
    metavar="ADDRESS",
    show_envvar=True,
    required=True,
    help="Where the broker is: tcp://HOST:PORT[/NAMESPACE] or ipc://PATH[?NAMESPACE]. The worker "
    "waits for it if it is not up yet, and comes back if it goes.",
)
@click.option(
    "--name",
    envvar="TENSORPLAY_NAME",
    show_envvar=True,
    required=True,
    help="Name to register, unique in the namespace.",
)
@click.option(
    "--rank",
    type=click.IntRange(min=0),
    envvar="TENSORPLAY_RANK",
    show_envvar=True,
    help="Rank to take; by default the lowest that is free.",
)
@click.option(
    "--device",
    default="cpu",
    envvar="TENSORPLAY_DEVICE",
    show_default=True,
    show_envvar=True,
    help="Device of this worker as others see it, such as cuda:0.",
)
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    default=16,
    envvar="TENSORPLAY_THREADS",
    show_default=True,
    show_envvar=True,
    help="How many calls run at a time. Calls that wait for further calls do not count.",
)
@click.option(
    "--import",
    "imports",
    multiple=True,
    metavar="MODULE",
    envvar="TENSORPLAY_IMPORT",
    show_envvar=True,
    help="Import this module at the start; may be repeated (in the variable: separated by spaces).",
)
@click.option(
    "--shm/--no-shm",
    default=True,
    envvar="TENSORPLAY_SHM",
    show_default=True,
    show_envvar=True,
    help="Whether large tensors go through shared memory to peers on this host.",
)
@click.option(
    "--shm-limit",
    metavar="SIZE",
    envvar="TENSORPLAY_SHM_LIMIT",
    show_envvar=True,
    help="Shared memory to make at most, such as 512MiB; by default a quarter of the memory.",
)
@click.option(
    "--curve-dir",
    type=click.Path(file_okay=False),
    envvar="TENSORPLAY_CURVE_DIR",
    metavar="DIR",
    show_envvar=True,
    help="The key directory, for a broker that asks for keys, see `tensorplay keys`.",
)
@click.option(
    "--curve-key",
    envvar="TENSORPLAY_CURVE_KEY",
    metavar="KEY",
    show_envvar=True,
    help="Name of this worker's key in it; by default the worker's own name.",
)
@click.option(
    "--curve-server",
    envvar="TENSORPLAY_CURVE_SERVER",
    metavar="KEY",
    show_envvar=True,
    help="The broker's public key, or a file with it; by default DIR/broker.key.",
)
@click.option(
    "--allow",
    multiple=True,
    metavar="NAME",
    envvar="TENSORPLAY_ALLOW",
    show_envvar=True,
    help="Load and call for others only this module, with what is below it, or this class or "
    "function, beside plain values and tensors; may be repeated (in the variable: separated by "
    "spaces).",
)
@click.option(
    "--drain-timeout",
    type=click.FloatRange(min=0),
    default=10.0,
    metavar="SECONDS",
    envvar="TENSORPLAY_DRAIN_TIMEOUT",
    show_default=True,
    show_envvar=True,
    help="Time that calls under way have to finish on SIGTERM.",
)
@click.option(
    "--keep-output",
    type=int,
    default=output.DEFAULT_BYTES,
    metavar="BYTES",
    envvar="TENSORPLAY_KEEP_OUTPUT",
    show_default=True,
    show_envvar=True,
    help='How much of its standard output and error the worker keeps for "tensorplay logs"; 0 '
    "keeps none and leaves both as they are.",
)
@logs.options()
@click.version_option(__version__, prog_name="tensorplay worker")
def main(
    broker: str,
    name: str,
    rank: int | None,
    device: str,
    threads: int,
    imports: tuple[str, ...],
    shm: bool,
    shm_limit: str | None,
    curve_dir: str | None,
    curve_key: str | None,
    curve_server: str | None,
    allow: tuple[str, ...],
    drain_timeout: float,
    keep_output: int,
    log_level: str,
    log_json: bool,
) -> None:
    """Run a worker: a process that owns modules and runs what others ask of it.

    Prints "tensorplay worker NAME ready (rank RANK) at ADDRESS" once it is registered. On
    SIGTERM or Ctrl-C it finishes the calls under way and leaves; a second one ends it at once.

    Exit codes: 0 ended as told, 1 failed (such as a name that is taken), 2 wrong usage.
    """
    try:
        kept = output.keep(keep_output)
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
    logs.configure(log_level, json=log_json, context=lambda: _where(name))
    from tensorplay.worker.serve import WorkerConfig, run  # needs torch, which takes seconds

    try:
        config = WorkerConfig(
            name=name,
            broker=broker,
            rank=rank,
            device=device,
            threads=threads,
            imports=imports,
            shm=shm,
            shm_limit=shm_limit or None,
            drain_timeout=drain_timeout,
            curve_dir=curve_dir,
            curve_key=curve_key,
            curve_server=curve_server,
            allow=allow or None,
        )
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
    sys.exit(run(config, orders={} if kept is None else {"logs": kept.answer}))


def _where(name: str) -> dict[str, Any]:
    """Returns what the log says of the thread that logs."""
    serving = sys.modules.get("tensorplay.distributed.rpc.serving")  # once torch is there
    return {"worker": name, **(serving.log_fields() if serving is not None else {})}
