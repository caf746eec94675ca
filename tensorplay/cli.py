"""The command ``tensorplay``: its subcommands are imported when they are asked for."""

from __future__ import annotations

import importlib

import click

from tensorplay.version import __version__

_COMMANDS = {
    "broker": ("tensorplay.broker.cli", "Run the broker that workers and clients connect to."),
    "doctor": ("tensorplay.commands.doctor", "Look for what could keep this host from working."),
    "drain": ("tensorplay.commands.drain", "Have a worker finish its calls and leave."),
    "kill": ("tensorplay.commands.kill", "End a peer at once."),
    "logs": ("tensorplay.commands.logs", "Show what a worker prints."),
    "ping": ("tensorplay.commands.ping", "Measure round-trip times to the broker and a peer."),
    "ps": ("tensorplay.commands.ps", "List the peers."),
    "status": ("tensorplay.commands.status", "Show the broker, its peers, and what is wrong."),
    "demo": ("tensorplay.demo.cli", "Train a model that is spread over two workers."),
    "keys": ("tensorplay.commands.keys", "Make keys, and say which may connect to a broker."),
    "launch": ("tensorplay.commands.launch", "Start a broker and workers on this machine."),
    "worker": ("tensorplay.worker.cli", "Run a worker: it owns modules and runs calls."),
}


class _LazyGroup(click.Group):
    """Knows its commands by name, and imports one only to run it or to show its help.

    The broker's host need not have torch, and nobody who asks for help should wait for it.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = importlib.import_module(_COMMANDS[cmd_name][0]).main
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in sorted(_COMMANDS.items())])


@click.group(
    cls=_LazyGroup,
    context_settings={"max_content_width": 100, "help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="tensorplay")
def main() -> None:
    """Put modules of a model on other processes and machines, through one broker.

    Start "tensorplay broker" somewhere, "tensorplay worker" wherever there is a device to use,
    and connect from training code with tensorplay.distributed.rpc.init_rpc. Every option can
    also be given as an environment variable; the help of each command names it.
    """
