"""Keys, and who may do what with them: the files of a key directory.

    NAME.key          a public key
    NAME.key_secret   the pair, readable by its owner alone
    authorized/       at the broker: the public keys that may connect

The files are CURVE certificates in ZeroMQ's own format (ZPL). Those in ``authorized/`` say in
their metadata what the key may do::

    metadata
        names = "worker*"
        namespaces = "default"
        role = "both"
    curve
        public-key = "..."

Nothing here prints, logs or puts into an exception what a secret key is.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from fnmatch import fnmatchcase
from pathlib import Path

import zmq
from zmq.utils import z85

from tensorplay.errors import ConfigError

__all__ = [
    "AUTHORIZED",
    "BROKER_NAME",
    "Authorized",
    "Grant",
    "KeyPair",
    "KeyRole",
    "PeerKeys",
    "allow",
    "create",
    "default_directory",
    "load_pair",
    "load_public",
    "peer_keys",
    "revoke",
    "secure",
]

_log = logging.getLogger(__name__)

#: Name of the broker's own pair.
BROKER_NAME = "broker"
#: Folder of the public keys that may connect.
AUTHORIZED = "authorized"

_PUBLIC, _SECRET = ".key", ".key_secret"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_:.-]{0,126}")
_ENTRY = re.compile(r"\s+([a-z-]+)\s*=\s*\"([^\"]*)\"\s*")
#: A key in Z85: 32 bytes.
_KEY_LENGTH = 40
#: No certificate is longer.
_MAX_FILE_BYTES = 16 << 10
_DEFAULT_NAMESPACE = "default"
#: Errors that say nothing of the file.
_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO)


class KeyRole(Enum):
    """What peers with a key may do."""

    BOTH = "both"
    CALL = "call"
    SERVE = "serve"

    @property
    def calls(self) -> bool:
        """Whether they may call others."""
        return self is not KeyRole.SERVE

    @property
    def serves(self) -> bool:
        """Whether others may call them."""
        return self is not KeyRole.CALL


@dataclass(frozen=True)
class KeyPair:
    """A public key and its secret one, both in Z85."""

    public: str
    secret: bytes = field(repr=False)


@dataclass(frozen=True)
class PeerKeys:
    """What a peer needs to reach a broker that asks for keys.

    Attributes:
        server: The broker's public key, in Z85.
        own: The peer's own pair.
    """

    server: str
    own: KeyPair


@dataclass(frozen=True)
class Grant:
    """What the peers with a key may do.

    Attributes:
        key: Name of the key.
        public: The public key, in Z85.
        names: Names that they may register; ``*`` stands for any letters.
        namespaces: Namespaces that they may register in, likewise.
        role: Whether they may call, serve, or both.
    """

    key: str
    public: str
    names: tuple[str, ...]
    namespaces: tuple[str, ...] = (_DEFAULT_NAMESPACE,)
    role: KeyRole = KeyRole.BOTH

    def covers(self, name: str, namespace: str) -> bool:
        """Returns whether a peer of that name may register in that namespace."""
        return any(fnmatchcase(name, one) for one in self.names) and self.sees(namespace)

    def sees(self, namespace: str) -> bool:
        """Returns whether a namespace is one of those that the key is for."""
        return any(fnmatchcase(namespace, one) for one in self.namespaces)


def default_directory() -> Path:
    """Returns the key directory of a user who names none."""
    return Path.home() / ".tensorplay" / "keys"


def create(directory: Path, name: str) -> tuple[Path, Path]:
    """Makes a new pair of keys; returns the paths of the public and of the secret file.

    Args:
        directory: Where; made if it is missing, for its owner alone.
        name: Name of the key.

    Raises:
        ConfigError: If there is a key of that name already, or it is no name of a key.
        OSError: If the files cannot be written.
    """
    _check_name(name)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    public, secret = (directory / f"{name}{suffix}" for suffix in (_PUBLIC, _SECRET))
    for path in (public, secret):
        if path.exists():
            raise ConfigError(f"{path} exists; remove it, or choose another name")
    public_key, secret_key = zmq.curve_keypair()
    pair = {"public-key": public_key.decode(), "secret-key": secret_key.decode()}
    _write(secret, {"curve": pair}, 0o600)
    _write(public, {"metadata": {"name": name}, "curve": {"public-key": pair["public-key"]}}, 0o644)
    return public, secret


def load_public(path: Path) -> str:
    """Returns the public key in a file, in Z85; the file may hold the pair.

    Raises:
        ConfigError: If there is none.
    """
    return _public_key(path, _read(path))


def load_pair(path: Path) -> KeyPair:
    """Returns the pair of keys in a file.

    Raises:
        ConfigError: If there is none, or others may read the file.
    """
    _check_private(path)
    sections = _read(path)
    public = _public_key(path, sections)
    secret = sections.get("curve", {}).get("secret-key", "")
    if not _is_key(secret):
        raise ConfigError(f"{path} holds no secret key; name the file NAME{_SECRET} of a pair")
    if zmq.curve_public(secret.encode()).decode() != public:
        raise ConfigError(f"the public key in {path} is not that of its secret key")
    return KeyPair(public, secret.encode())


def peer_keys(directory: str | Path, name: str, server: str | None = None) -> PeerKeys:
    """Returns what a peer needs to reach a broker that asks for keys.

    Args:
        directory: The key directory.
        name: Name of the peer's own key in it.
        server: The broker's public key: in Z85, or a file with it. By default the file
            ``broker.key`` in the directory.

    Raises:
        ConfigError: If a key is missing, or a secret one is readable by others.
    """
    directory = Path(directory).expanduser()
    _check_name(name)
    own = load_pair(directory / f"{name}{_SECRET}")
    if server is not None and _is_key(server):
        return PeerKeys(server, own)
    path = directory / f"{BROKER_NAME}{_PUBLIC}" if server is None else Path(server).expanduser()
    return PeerKeys(load_public(path), own)


def secure(socket: zmq.Socket[bytes], keys: PeerKeys) -> None:
    """Has a socket, before it connects, show its own key and ask for the broker's."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server.encode())
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.own.public.encode())
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.own.secret)


def allow(
    directory: Path,
    key: str | Path,
    *,
    names: Iterable[str] = (),
    namespaces: Iterable[str] = (),
    role: KeyRole = KeyRole.BOTH,
) -> Grant:
    """Lets the peers with a key connect to the broker; again with other arguments changes it.

    Args:
        directory: The broker's key directory.
        key: Name of a key in it, or a file with a public key.
        names: Names that they may register, ``*`` for any letters; by default the key's own.
        namespaces: Namespaces that they may register in; by default ``default`` alone.
        role: Whether they may call, serve, or both.

    Raises:
        ConfigError: If there is no such key, or it is allowed under another name.
        OSError: If the file cannot be written.
    """
    path = Path(key)
    if path.suffix not in (_PUBLIC, _SECRET):
        path = directory / f"{key}{_PUBLIC}"
    name = path.name.removesuffix(path.suffix)
    _check_name(name)
    public = load_public(path)
    grant = Grant(
        name, public, tuple(names) or (name,), tuple(namespaces) or (_DEFAULT_NAMESPACE,), role
    )
    for text in (*grant.names, *grant.namespaces):
        if not text or set(text) & set(' "\n') or not text.isprintable():
            raise ConfigError(f"{text!r} is no name; a name has no spaces and no quotation marks")
    folder = directory / AUTHORIZED
    other = Authorized(folder).grants().get(public)
    if other is not None and other.key != name:
        raise ConfigError(f"this key is allowed as {other.key!r} already; revoke that first")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    metadata = {
        "names": " ".join(grant.names),
        "namespaces": " ".join(grant.namespaces),
        "role": role.value,
    }
    # Put in place at once: the broker may be reading.
    draft = folder / f".{name}{_PUBLIC}.new"
    draft.unlink(missing_ok=True)
    _write(draft, {"metadata": metadata, "curve": {"public-key": public}}, 0o644)
    draft.rename(folder / f"{name}{_PUBLIC}")
    return grant


def revoke(directory: Path, name: str) -> None:
    """Takes a key's permission away.

    Raises:
        ConfigError: If it has none.
    """
    _check_name(name)
    path = directory / AUTHORIZED / f"{name}{_PUBLIC}"
    try:
        path.unlink()
    except FileNotFoundError:
        grants = Authorized(path.parent).grants().values()
        allowed = ", ".join(sorted(grant.key for grant in grants)) or "none"
        raise ConfigError(f"no key {name!r} is allowed; allowed are: {allowed}") from None


class Authorized:
    """The keys that may connect: the files of a folder, read again when one has changed.

    May be used by several threads. A file that cannot be understood allows nobody.

    Args:
        folder: The folder; a missing one is empty.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: object = None
        self._failing = False
        self._grants: dict[str, Grant] = {}

    def grants(self) -> Mapping[str, Grant]:
        """Returns what the keys may do at this moment, by public key.

        While the folder cannot be read at all, it is taken to be as it was.
        """
        try:
            seen = self._look()
            if seen != self._seen:
                self._grants = dict(self._load())
                self._seen = seen
        except OSError as error:  # such as too many open files, which others can bring about
            if not self._failing:
                _log.warning("cannot read %s: %s", self._folder, error.strerror)
            self._failing = True
        else:
            self._failing = False
        return self._grants

    def _look(self) -> object:
        try:
            with os.scandir(self._folder) as entries:
                found = [(one.name, one.stat()) for one in entries if one.name.endswith(_PUBLIC)]
        except FileNotFoundError:
            return None
        return sorted((name, at.st_mtime_ns, at.st_ino, at.st_size) for name, at in found)

    def _load(self) -> Iterable[tuple[str, Grant]]:
        for path in sorted(self._folder.glob(f"[!.]*{_PUBLIC}")):
            try:
                grant = _read_grant(path)
            except ConfigError as error:
                _log.warning("a key is not allowed: %s", error)
            else:
                yield grant.public, grant


def _read_grant(path: Path) -> Grant:
    sections = _read(path)
    name = path.name.removesuffix(_PUBLIC)
    metadata = sections.get("metadata", {})
    try:
        role = KeyRole(metadata.get("role", KeyRole.BOTH.value))
    except ValueError:
        roles = ", ".join(role.value for role in KeyRole)
        raise ConfigError(f"{path} has the role {metadata['role']!r}; roles are {roles}") from None
    return Grant(
        name,
        _public_key(path, sections),
        tuple(metadata.get("names", name).split()),
        tuple(metadata.get("namespaces", _DEFAULT_NAMESPACE).split()),
        role,
    )


def _read(path: Path) -> dict[str, dict[str, str]]:
    """Returns the sections of a certificate; the text of an error never has any of it."""
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
        text = data.decode()
    except FileNotFoundError:
        raise ConfigError(
            f"there is no key {path}; make one with `tensorplay keys new`, or copy it there"
        ) from None
    except OSError as error:
        if error.errno in _PASSING:
            raise
        raise ConfigError(f"cannot read the key {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is no certificate") from None
    if len(data) > _MAX_FILE_BYTES:
        raise ConfigError(f"{path} is no certificate: it has more than {_MAX_FILE_BYTES} bytes")
    sections: dict[str, dict[str, str]] = {}
    section: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.partition("#")[0].rstrip() if line.lstrip().startswith("#") else line.rstrip()
        if not line:
            continue
        if not line[0].isspace():
            section = sections.setdefault(line.strip(), {})
            continue
        entry = _ENTRY.fullmatch(line)
        if entry is None or not sections:
            raise ConfigError(f'{path} is no certificate: line {number} is not NAME = "VALUE"')
        section[entry[1]] = entry[2]
    return sections


def _write(path: Path, sections: Mapping[str, Mapping[str, str]], mode: int) -> None:
    lines = ["# A CURVE certificate, made by tensorplay."]
    for name, entries in sections.items():
        lines.append(name)
        lines += [f'    {key} = "{value}"' for key, value in entries.items()]
    # Never for a moment readable by others, and never through somebody else's link.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with open(descriptor, "w", encoding="ascii") as file:  # noqa: PTH123  (a descriptor)
        file.write("\n".join(lines) + "\n")


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} is no name of a key; one has letters, digits, _, :, . and -, and begins "
            "with a letter, a digit or _"
        )


def _check_private(path: Path) -> None:
    try:
        status = path.stat()
    except OSError:
        return  # reading it tells
    others = status.st_mode & (stat.S_IRWXO | stat.S_IWGRP | stat.S_IXGRP)
    # A file of root's that a group may read is how a system hands out secrets.
    group = status.st_mode & stat.S_IRGRP and status.st_uid != 0
    if others or group:
        raise ConfigError(
            f"others may read or change the secret key {path} "
            f"(mode {stat.S_IMODE(status.st_mode):04o}); say `chmod 600 {path}`, and make a new "
            "key if somebody may have read it"
        )


def _public_key(path: Path, sections: Mapping[str, Mapping[str, str]]) -> str:
    public = sections.get("curve", {}).get("public-key", "")
    if not _is_key(public):
        raise ConfigError(f"{path} holds no public key")
    return public


def _is_key(text: str) -> bool:
    if len(text) != _KEY_LENGTH:
        return False
    try:
        return len(z85.decode(text.encode("ascii"))) == 32
    except (ValueError, KeyError, UnicodeEncodeError):
        return False
