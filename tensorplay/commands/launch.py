"""The command line that starts a broker and workers on this machine."""

from __future__ import annotations

import sys

import click

from tensorplay import logs
from tensorplay.errors import TensorPlayError
from tensorplay.version import __version__

_DEFAULT_BIND = "tcp://127.0.0.1:0"


@click.command(
    name="launch",
    context_settings={
        "max_content_width": 100,
        "help_option_names": ["-h", "--help"],
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
    },
)
@click.option(
    "--local",
    "workers",
    type=click.IntRange(min=1),
    required=True,
    envvar="TENSORPLAY_LOCAL",
    show_envvar=True,
    metavar="N",
    help="Start N workers on this machine: worker0, worker1, ..., whose ranks are their numbers.",
)
@click.option(
    "--bind",
    default=_DEFAULT_BIND,
    envvar="TENSORPLAY_BIND",
    metavar="ENDPOINT",
    show_default=True,
    show_envvar=True,
    help="Where the broker listens; port 0 is a free one.",
)
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    default=16,
    envvar="TENSORPLAY_THREADS",
    show_default=True,
    show_envvar=True,
    help="How many calls each worker runs at a time.",
)
@click.option(
    "--device",
    "devices",
    multiple=True,
    envvar="TENSORPLAY_DEVICE",
    show_envvar=True,
    metavar="DEVICE",
    help="Device of the workers as others see it; may be repeated: they take turns. By default "
    "cpu.",
)
@click.option(
    "--import",
    "imports",
    multiple=True,
    metavar="MODULE",
    envvar="TENSORPLAY_IMPORT",
    show_envvar=True,
    help="Have each worker import this module at its start; may be repeated.",
)
@logs.options("warning", json=False)
@click.version_option(__version__, prog_name="tensorplay launch")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def main(
    workers: int,
    bind: str,
    threads: int,
    devices: tuple[str, ...],
    imports: tuple[str, ...],
    log_level: str,
    command: tuple[str, ...],
) -> None:
    """Start a broker and workers on this machine, and end them all together.

    Prints the broker's address once all workers are registered, and runs until Ctrl-C or
    SIGTERM, or until one of its processes ends. With a COMMAND, such as "python train.py", it
    runs that instead of printing, with the address in TENSORPLAY_BROKER, and ends with it.

    Exit codes: 0 ended as told, 1 failed (such as a worker that ended by itself), 2 wrong usage;
    that of the COMMAND if there is one.
    """
    logs.configure(log_level)
    from tensorplay.worker.local import LocalWorld  # needs torch, which takes seconds

    world = LocalWorld(
        workers=workers, bind=bind, threads=threads, devices=devices or ("cpu",), imports=imports
    )
    try:
        code = world.run(command, ready=click.echo)
    except TensorPlayError as error:
        raise click.ClickException(str(error)) from None
    sys.exit(code)
