"""Workers and clients with keys: what works, and what they are told when it does not."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from tensorplay import keys
from tensorplay.broker import Broker, BrokerConfig
from tensorplay.broker.check import check
from tensorplay.cli import main as command
from tensorplay.cluster import ForkServerClient, local_cluster
from tensorplay.distributed import rpc
from tensorplay.errors import BrokerError, ConfigError, RegistrationError
from tests.security.helpers import KeyRing, agent


def test_a_cluster_with_keys(ring: KeyRing, fork_server: ForkServerClient) -> None:
    for name in ("client", "worker0", "worker1"):
        ring.make(name)
    with local_cluster(2, fork_server=fork_server, curve_dir=str(ring.directory)):
        large = torch.ones(600, 1000)  # in chunks
        total = rpc.rpc_sync("worker0", torch.add, (large, large))
        assert torch.equal(total, 2 * large)
        rref = rpc.remote("worker1", torch.neg, (large,))
        assert torch.equal(rref.to_here(), -large)


def test_a_cluster_without_keys_takes_none_from_the_environment(
    fork_server: ForkServerClient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TENSORPLAY_CURVE_DIR", str(tmp_path))
    with local_cluster(1, fork_server=fork_server):
        assert rpc.rpc_sync("worker0", abs, (-1,)) == 1


def test_a_peer_registers_with_its_key(ring: KeyRing, broker: Broker) -> None:
    ring.make("alice")
    with agent("alice", broker, curve_dir=str(ring.directory)) as alice:
        assert alice.info.name == "alice"


def test_keys_from_the_environment(
    ring: KeyRing, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = ring.make("shared", names=["trainer*"])
    (ring.directory / "broker.key").unlink()
    monkeypatch.setenv("TENSORPLAY_CURVE_DIR", str(ring.directory))
    monkeypatch.setenv("TENSORPLAY_CURVE_KEY", "shared")
    monkeypatch.setenv("TENSORPLAY_CURVE_SERVER", made.server)
    with agent("trainer7", broker) as trainer:
        assert trainer.info.name == "trainer7"


def test_a_refused_key_is_called_so_at_once(ring: KeyRing, broker: Broker) -> None:
    ring.make_unknown("mallory")
    began = time.monotonic()
    with (
        pytest.raises(RegistrationError, match="refused this peer's key; `tensorplay keys allow`"),
        agent("mallory", broker, curve_dir=str(ring.directory), connect_timeout=30),
    ):
        pass
    assert time.monotonic() - began < 10


def test_a_name_beyond_the_key_is_called_so(ring: KeyRing, broker: Broker) -> None:
    ring.make("alice")
    with (
        pytest.raises(RegistrationError, match="key 'alice' may register the names alice"),
        agent("bob", broker, curve_dir=str(ring.directory), curve_key="alice"),
    ):
        pass


def test_a_wrong_key_of_the_broker_is_called_so(ring: KeyRing, broker: Broker) -> None:
    ring.make("alice")
    other = ring.make_unknown("other").own.public
    with (
        pytest.raises(BrokerError, match="its key is not the public key that this process has"),
        agent(
            "alice",
            broker,
            curve_dir=str(ring.directory),
            curve_server=other,
            connect_timeout=1.5,
        ),
    ):
        pass


def test_a_peer_without_keys_is_told_that_the_broker_may_ask_for_them(broker: Broker) -> None:
    with (
        pytest.raises(BrokerError, match="if the broker asks for keys, say which"),
        agent("alice", broker, curve_dir="", connect_timeout=1.5),
    ):
        pass


def test_a_peer_with_keys_at_a_broker_without(ring: KeyRing) -> None:
    ring.make("alice")
    with (
        Broker(BrokerConfig(bind=("tcp://127.0.0.1:0",))) as plain,
        pytest.raises(BrokerError, match="or it asks for no keys"),
        agent("alice", plain, curve_dir=str(ring.directory), connect_timeout=1.5),
    ):
        pass


def test_a_peer_without_its_key_file_is_told_how_to_make_one(ring: KeyRing, broker: Broker) -> None:
    with (
        pytest.raises(ConfigError, match=r"no key .*alice\.key_secret; make one"),
        agent("alice", broker, curve_dir=str(ring.directory)),
    ):
        pass


def test_a_revoked_peer_ends(ring: KeyRing, broker: Broker) -> None:
    ring.make("alice")
    with agent("alice", broker, curve_dir=str(ring.directory)) as alice:
        keys.revoke(ring.directory, "alice")
        deadline = time.monotonic() + 10
        while alice.failure is None and time.monotonic() < deadline:
            time.sleep(0.02)
        assert isinstance(alice.failure, RegistrationError)
        assert "its key was revoked" in str(alice.failure)


def test_no_secret_in_what_a_peer_shows(
    ring: KeyRing, broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    secret = ring.make("alice").own.secret.decode()
    caplog.set_level("DEBUG")
    with agent("alice", broker, curve_dir=str(ring.directory)) as alice:
        shown = [repr(alice), repr(alice.options), str(vars(alice.options)), str(vars(alice))]
        assert secret not in "".join([*shown, str(vars(alice._link)), str(alice.stats())])
    assert secret not in caplog.text


def test_the_check_of_a_broker_with_keys(ring: KeyRing, broker: Broker) -> None:
    assert check(broker.address, 5.0, str(ring.directory))["namespaces"] == {}
    with pytest.raises(BrokerError, match="or ask for keys"):
        check(broker.address, 0.5)


# The commands.


def run(*arguments: str) -> Any:
    return CliRunner().invoke(command, ["keys", *arguments])


def test_keys_are_made_allowed_listed_and_revoked(tmp_path: Path) -> None:
    where = ("--dir", str(tmp_path / "keys"))
    made = run("new", "alice", *where)
    assert made.exit_code == 0, made.output
    secret = keys.load_pair(tmp_path / "keys" / "alice.key_secret").secret.decode()
    allowed = run("allow", "alice", "--name", "a*", "--role", "call", *where)
    assert allowed.output.startswith("alice: names a*, namespaces default, role call, public key")
    listed = run("list", *where)
    assert listed.output == allowed.output
    revoked = run("revoke", "alice", *where)
    assert revoked.output == "alice is not allowed any more\n"
    assert run("list", *where).output == ""
    assert secret not in made.output + allowed.output + listed.output + revoked.output


def test_mistakes_of_the_user_are_one_line(tmp_path: Path) -> None:
    where = ("--dir", str(tmp_path))
    for arguments, text in [
        (("new", "../x"), "no name of a key"),
        (("allow", "nobody"), "there is no key"),
        (("revoke", "nobody"), "no key 'nobody' is allowed"),
    ]:
        result = run(*arguments, *where)
        assert result.exit_code == 1
        assert result.output.startswith("Error: ")
        assert text in result.output
    assert run("allow", "x", "--role", "root", *where).exit_code == 2


def test_the_commands_need_no_torch() -> None:
    code = (
        "import sys, tensorplay.commands.keys\n"
        "heavy = {'torch', 'numpy', 'cloudpickle'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_broker_without_its_own_key_does_not_start(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tensorplay.broker", "--curve-dir", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "TENSORPLAY_BIND": "tcp://127.0.0.1:0"},
    )
    assert done.returncode == 1
    assert "broker.key_secret; make one with `tensorplay keys new`" in done.stderr
