"""``tensorplay kill``: end a peer now."""

from __future__ import annotations

import click

from tensorplay.commands import asking
from tensorplay.version import __version__


@click.command(
    name="kill", context_settings={"max_content_width": 100, "help_option_names": ["-h", "--help"]}
)
@click.argument("name")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@asking.options
@click.version_option(__version__, prog_name="tensorplay kill")
def main(operator: asking.Operator, name: str, yes: bool) -> None:
    """End the peer NAME at once; calls in flight to it fail with WorkerLostError.

    A worker's process ends; a client's goes on without its registration. The others lose the
    peer even if its process hangs.

    Exit codes: 0 ended, 1 not ended (nobody answered, or no such peer), 2 wrong usage.
    """
    if not yes:
        click.confirm(f"Kill {name} in namespace {operator.address.namespace}?", abort=True)
    operator.ask("kill", name)
    click.echo(f"{name} was killed")
