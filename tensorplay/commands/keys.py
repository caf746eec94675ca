"""The command line of keys: make them, let them in, take that back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from tensorplay import keys
from tensorplay.errors import ConfigError
from tensorplay.version import __version__

_F = TypeVar("_F", bound=Callable[..., Any])
_ROLES = [role.value for role in keys.KeyRole]


def _directory(command: _F) -> _F:
    return click.option(
        "--dir",
        "directory",
        type=click.Path(file_okay=False, path_type=Path),
        default=keys.default_directory,
        envvar="TENSORPLAY_CURVE_DIR",
        show_default="~/.tensorplay/keys",
        show_envvar=True,
        metavar="DIR",
        help="The key directory.",
    )(command)


class _Group(click.Group):
    """Shows mistakes in names and files as the user's, in one line."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (ConfigError, OSError) as error:
            raise click.ClickException(str(error)) from None


@click.group(
    name="keys",
    cls=_Group,
    context_settings={"max_content_width": 100, "help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="tensorplay keys")
def main() -> None:
    """Make the keys with which peers and broker know each other, and say who may connect.

    A broker that was started with --curve-dir DIR takes connections only from those whose
    public keys are in DIR/authorized, and sees changes there while it runs.

    Exit codes: 0 done, 1 failed (such as a key that is not there), 2 wrong usage.
    """


@main.command()
@click.argument("name")
@_directory
def new(name: str, directory: Path) -> None:
    """Make the key NAME: DIR/NAME.key, to give away, and DIR/NAME.key_secret, to keep.

    The broker's own key is called "broker"; its public half goes to every peer.
    """
    public, secret = keys.create(directory, name)
    click.echo(f"public key: {public}")
    click.echo(f"secret key: {secret}")


@main.command()
@click.argument("key")
@click.option(
    "--name",
    "names",
    multiple=True,
    metavar="PATTERN",
    help="Name that peers with this key may register, such as worker0 or 'worker*'; may be "
    "repeated. By default the name of the key.",
)
@click.option(
    "--namespace",
    "namespaces",
    multiple=True,
    metavar="PATTERN",
    help="Namespace that they may register in; may be repeated. By default 'default'.",
)
@click.option(
    "--role",
    type=click.Choice(_ROLES),
    default=keys.KeyRole.BOTH.value,
    show_default=True,
    help="Whether they may call others, serve their calls, or both.",
)
@_directory
def allow(
    key: str, names: tuple[str, ...], namespaces: tuple[str, ...], role: str, directory: Path
) -> None:
    """Let peers with KEY connect: the name of a key in DIR, or the file of a public key."""
    grant = keys.allow(directory, key, names=names, namespaces=namespaces, role=keys.KeyRole(role))
    click.echo(_line(grant))


@main.command()
@click.argument("name")
@_directory
def revoke(name: str, directory: Path) -> None:
    """Let peers with the key NAME connect no more; those that are connected are cut off."""
    keys.revoke(directory, name)
    click.echo(f"{name} is not allowed any more")


@main.command(name="list")
@_directory
def list_keys(directory: Path) -> None:
    """List the keys that may connect."""
    grants = keys.Authorized(directory / keys.AUTHORIZED).grants().values()
    for grant in sorted(grants, key=lambda grant: grant.key):
        click.echo(_line(grant))


def _line(grant: keys.Grant) -> str:
    return (
        f"{grant.key}: names {' '.join(grant.names)}, namespaces {' '.join(grant.namespaces)}, "
        f"role {grant.role.value}, public key {grant.public}"
    )
