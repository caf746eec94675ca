"""Who imports whom: the layers of docs/architecture.md, read from the code."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

#: A package, and the packages of this project that it may import beside itself.
LAYERS = {
    "tensorplay.errors": [],
    "tensorplay.version": [],
    "tensorplay.address": ["tensorplay.errors", "tensorplay.protocol"],
    "tensorplay.keys": ["tensorplay.errors"],
    "tensorplay.heap": [],
    "tensorplay.logs": [],
    "tensorplay.protocol": ["tensorplay.errors"],
    "tensorplay.broker": [
        "tensorplay.errors",
        "tensorplay.heap",
        "tensorplay.keys",
        "tensorplay.logs",
        "tensorplay.protocol",
        "tensorplay.version",
    ],
    "tensorplay.distributed.remote_device": ["tensorplay.errors"],
    "tensorplay.distributed.rpc": [
        "tensorplay.address",
        "tensorplay.errors",
        "tensorplay.keys",
        "tensorplay.protocol",
        "tensorplay.version",
    ],
    "tensorplay.distributed.autograd": [
        "tensorplay.distributed.rpc",
        "tensorplay.errors",
        "tensorplay.protocol",
    ],
    "tensorplay.distributed.optim": [
        "tensorplay.distributed.autograd",
        "tensorplay.distributed.rpc",
        "tensorplay.errors",
        "tensorplay.protocol",
    ],
    "tensorplay.distributed.nn": [
        "tensorplay.distributed",
        "tensorplay.distributed.autograd",
        "tensorplay.distributed.optim",
        "tensorplay.distributed.remote_device",
        "tensorplay.distributed.rpc",
        "tensorplay.errors",
        "tensorplay.nn",
    ],
}

#: What the broker's web pages need; nothing imports them unless they are asked for.
HTTP = {"prometheus_client", "starlette", "uvicorn"}

#: What the lowest layers may import from elsewhere.
FOREIGN = {
    "tensorplay.errors": set(),
    "tensorplay.keys": {"zmq"},
    "tensorplay.protocol": {"msgspec"},
    "tensorplay.broker": {"msgspec", "zmq", "click", "rich", *HTTP},
}


def sources(package: str) -> Iterator[Path]:
    path = ROOT / package.replace(".", "/")
    if path.is_dir():
        yield from sorted(path.resolve().rglob("*.py"))
    else:
        yield path.with_suffix(".py")


def imports(source: Path) -> Iterator[str]:
    """Yields what a file imports, but for what only the type checker sees."""
    tree = ast.parse(source.read_text(encoding="utf-8"))
    hidden = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        if id(node) in hidden:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{source} has a relative import"
            assert node.module is not None
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if _is_module(full) else node.module


def _is_module(name: str) -> bool:
    path = ROOT / name.replace(".", "/")
    return name.startswith("tensorplay.") and (path.is_dir() or path.with_suffix(".py").is_file())


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


@pytest.mark.parametrize("package", LAYERS)
def test_no_arrow_points_up(package: str) -> None:
    for source in sources(package):
        for name in imports(source):
            if not within(name, "tensorplay") or within(name, package):
                continue
            allowed = any(
                name == other or (other != "tensorplay.distributed" and within(name, other))
                for other in LAYERS[package]
            )
            assert allowed, f"{source.relative_to(ROOT)} imports {name}"


@pytest.mark.parametrize("package", FOREIGN)
def test_the_lowest_layers_need_little(package: str) -> None:
    for source in sources(package):
        for name in imports(source):
            top = name.partition(".")[0]
            known = top in sys.stdlib_module_names or top in {"tensorplay", *FOREIGN[package]}
            assert known, f"{source.relative_to(ROOT)} imports {name}"


def test_only_the_server_its_keys_and_its_check_know_zeromq() -> None:
    users = {s.name for s in sources("tensorplay.broker") if "zmq" in set(imports(s))}
    assert users == {"authenticator.py", "check.py", "server.py"}


def test_the_broker_needs_no_torch() -> None:
    code = (
        "import sys, tensorplay.broker, tensorplay.broker.cli, tensorplay.broker.server\n"
        "heavy = {'torch', 'numpy', 'cloudpickle'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_importing_the_package_starts_nothing() -> None:
    code = (
        "import threading, tensorplay.distributed, zmq\n"
        "assert threading.active_count() == 1, threading.enumerate()\n"
        "assert zmq.Context._instance is None"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_no_file_is_too_long() -> None:
    long = {
        str(source.relative_to(ROOT)): lines
        for folder in ("tensorplay", "broker")
        for source in (ROOT / folder).rglob("*.py")
        if (lines := len(source.read_text(encoding="utf-8").splitlines())) > 600
    }
    assert not long
