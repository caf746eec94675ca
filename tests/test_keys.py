"""Tests of the files of a key directory."""

from __future__ import annotations

import errno
import logging
import os
import stat
from pathlib import Path

import pytest
import zmq.auth

from tensorplay import keys
from tensorplay.errors import ConfigError


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_pair_is_for_its_owner_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        public, secret = keys.create(tmp_path / "keys", "alice")
    finally:
        os.umask(before)
    assert (mode(tmp_path / "keys"), mode(secret)) == (0o700, 0o600)
    assert "secret-key" not in public.read_text()
    pair = keys.load_pair(secret)
    assert keys.load_public(public) == pair.public
    assert pair.secret.decode() not in repr(pair)


def test_pairs_are_certificates_of_zeromq(tmp_path: Path) -> None:
    public, secret = keys.create(tmp_path, "alice")
    pair = keys.load_pair(secret)
    assert zmq.auth.load_certificate(public) == (pair.public.encode(), None)
    assert zmq.auth.load_certificate(secret) == (pair.public.encode(), pair.secret)
    made = zmq.auth.create_certificates(tmp_path, "bob")[1]
    Path(made).chmod(0o600)
    assert keys.load_pair(Path(made)).secret == zmq.auth.load_certificate(made)[1]


def test_a_key_is_never_written_over(tmp_path: Path) -> None:
    _, secret = keys.create(tmp_path, "alice")
    before = secret.read_text()
    with pytest.raises(ConfigError, match=r"alice\.key exists; remove it, or choose another name"):
        keys.create(tmp_path, "alice")
    assert secret.read_text() == before


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", ".hidden", "a b", "a\n", "x" * 200])
def test_names_of_keys_are_no_paths(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="no name of a key"):
        keys.create(tmp_path, name)
    with pytest.raises(ConfigError, match="no name of a key"):
        keys.revoke(tmp_path, name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("bits", [0o644, 0o640, 0o620, 0o604, 0o601])
def test_a_secret_that_others_may_read_is_not_used(tmp_path: Path, bits: int) -> None:
    _, secret = keys.create(tmp_path, "alice")
    if os.getuid() == 0:
        os.chown(secret, 1234, 1234)
    secret.chmod(bits)
    with pytest.raises(ConfigError, match=f"mode {bits:04o}.*chmod 600"):
        keys.load_pair(secret)


@pytest.mark.skipif(os.getuid() != 0, reason="needs a file of root's")
def test_a_group_may_read_a_file_of_root(tmp_path: Path) -> None:
    _, secret = keys.create(tmp_path, "alice")
    secret.chmod(0o440)
    assert keys.load_pair(secret).public


@pytest.mark.parametrize(
    "text",
    ["", "curve\n", 'curve\n    public-key = "short"\n', "rubbish = 1\n", '    a = "b"\n', "\x00"],
)
def test_what_is_no_certificate_is_refused_without_quoting_it(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.key"
    path.write_text(text + "# s3cret\ncurve\n    secret-key = s3cret\n")
    with pytest.raises(ConfigError) as caught:
        keys.load_public(path)
    assert "s3cret" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_missing_key_says_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no key .*alice\.key_secret; make one with"):
        keys.peer_keys(tmp_path, "alice")


def test_a_mixed_up_pair_is_noticed(tmp_path: Path) -> None:
    _, secret = keys.create(tmp_path, "alice")
    public, _ = keys.create(tmp_path, "bob")
    text = secret.read_text().replace(keys.load_public(secret), keys.load_public(public))
    secret.write_text(text)
    with pytest.raises(ConfigError, match="is not that of its secret key"):
        keys.load_pair(secret)


def test_the_server_key_is_given_as_text_or_file(tmp_path: Path) -> None:
    broker, _ = keys.create(tmp_path, keys.BROKER_NAME)
    keys.create(tmp_path, "alice")
    server = keys.load_public(broker)
    for given in (None, server, str(broker)):
        assert keys.peer_keys(tmp_path, "alice", given).server == server


def test_allow_grants_the_name_of_the_key_and_nothing_else(tmp_path: Path) -> None:
    keys.create(tmp_path, "alice")
    grant = keys.allow(tmp_path, "alice")
    assert (grant.names, grant.namespaces, grant.role) == (
        ("alice",),
        ("default",),
        keys.KeyRole.BOTH,
    )
    found = keys.Authorized(tmp_path / keys.AUTHORIZED).grants()
    assert found == {grant.public: grant}
    assert grant.covers("alice", "default")
    for name, namespace in [("alice2", "default"), ("bob", "default"), ("alice", "prod")]:
        assert not grant.covers(name, namespace)


def test_patterns_of_names(tmp_path: Path) -> None:
    keys.create(tmp_path, "gpu")
    keys.allow(tmp_path, "gpu", names=["worker*", "ps"], namespaces=["*"], role=keys.KeyRole.SERVE)
    (grant,) = keys.Authorized(tmp_path / keys.AUTHORIZED).grants().values()
    assert grant.covers("worker12", "any")
    assert grant.covers("ps", "other")
    assert not grant.covers("trainer", "any")
    assert grant.role is keys.KeyRole.SERVE
    with pytest.raises(ConfigError, match="no spaces"):
        keys.allow(tmp_path, "gpu", names=["a b"])


def test_allow_copies_no_secret(tmp_path: Path) -> None:
    _, secret = keys.create(tmp_path / "alice", "alice")
    keys.allow(tmp_path, secret)
    pair = keys.load_pair(secret)
    copied = (tmp_path / keys.AUTHORIZED / "alice.key").read_text()
    assert pair.public in copied
    assert pair.secret.decode() not in copied


def test_one_key_has_one_permission(tmp_path: Path) -> None:
    public, _ = keys.create(tmp_path, "alice")
    keys.allow(tmp_path, "alice")
    other = tmp_path / "bob.key"
    other.write_bytes(public.read_bytes())
    with pytest.raises(ConfigError, match="allowed as 'alice' already"):
        keys.allow(tmp_path, other)


def test_changes_are_seen_while_running(tmp_path: Path) -> None:
    authorized = keys.Authorized(tmp_path / keys.AUTHORIZED)
    assert not authorized.grants()
    keys.create(tmp_path, "alice")
    first = keys.allow(tmp_path, "alice")
    assert authorized.grants() == {first.public: first}
    second = keys.allow(tmp_path, "alice", names=["a*"])
    assert authorized.grants() == {first.public: second}
    keys.revoke(tmp_path, "alice")
    assert not authorized.grants()
    with pytest.raises(ConfigError, match="no key 'alice' is allowed; allowed are: none"):
        keys.revoke(tmp_path, "alice")


def test_a_file_that_cannot_be_understood_allows_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("alice", "bob", "carol"):
        keys.create(tmp_path, name)
        keys.allow(tmp_path, name)
    folder = tmp_path / keys.AUTHORIZED
    path = folder / "alice.key"
    path.write_text(path.read_text().replace('"both"', '"root"'))
    (folder / "bob.key").write_bytes(b"\xff\xfe" * 20)
    (folder / "dir.key").mkdir()
    with caplog.at_level(logging.WARNING):
        grants = keys.Authorized(folder).grants()
    assert [grant.key for grant in grants.values()] == ["carol"]
    assert "alice.key has the role 'root'; roles are both, call, serve" in caplog.text
    assert "bob.key is no certificate" in caplog.text


def test_while_no_file_can_be_opened_what_was_allowed_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keys.create(tmp_path, "alice")
    grant = keys.allow(tmp_path, "alice")
    authorized = keys.Authorized(tmp_path / keys.AUTHORIZED)
    assert authorized.grants() == {grant.public: grant}

    def fail(*args: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", fail)
        for _ in range(3):
            assert authorized.grants() == {grant.public: grant}
    assert caplog.text.count("Too many open files") == 1
    keys.allow(tmp_path, "alice", names=["other"])
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", fail)
        assert authorized.grants() == {grant.public: grant}
    (changed,) = authorized.grants().values()
    assert changed.names == ("other",)


def test_a_plain_public_key_in_the_folder_allows_its_name(tmp_path: Path) -> None:
    public, _ = keys.create(tmp_path, "alice")
    folder = tmp_path / keys.AUTHORIZED
    folder.mkdir()
    (folder / "alice.key").write_bytes(public.read_bytes())
    (grant,) = keys.Authorized(folder).grants().values()
    assert (grant.names, grant.namespaces) == (("alice",), ("default",))
