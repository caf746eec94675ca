"""Options and variables, and how much memory there is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tensorplay.distributed.rpc import BrokerRpcBackendOptions
from tensorplay.distributed.rpc.shm import limits, settings
from tensorplay.errors import ConfigError
from tensorplay.worker.serve import WorkerConfig


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1024", 1024),
        ("0", 0),
        (5, 5),
        ("2k", 2048),
        ("512MiB", 512 << 20),
        ("512 mb", 512 << 20),
        ("1.5G", 3 << 29),
        ("1TiB", 1 << 40),
    ],
)
def test_sizes(text: int | str, size: int) -> None:
    assert settings.parse_size(text, "it") == size
    assert BrokerRpcBackendOptions(shm_limit=text).shm_limit == size


@pytest.mark.parametrize("text", ["", "-1", -1, "many", "1 PB", "1GiBs", "1,5G"])
def test_what_is_no_size(text: int | str) -> None:
    with pytest.raises(ConfigError, match="shm_limit is a number of bytes"):
        BrokerRpcBackendOptions(shm_limit=text)
    with pytest.raises(ConfigError, match="shm_limit is a number of bytes"):
        WorkerConfig(name="worker", shm_limit=text)


def test_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TENSORPLAY_SHM", raising=False)
    monkeypatch.delenv("TENSORPLAY_SHM_LIMIT", raising=False)
    options = BrokerRpcBackendOptions()
    assert (options.shm, options.shm_limit) == (True, None)
    monkeypatch.setenv("TENSORPLAY_SHM", "0")
    monkeypatch.setenv("TENSORPLAY_SHM_LIMIT", "1MiB")
    options = BrokerRpcBackendOptions()
    assert (options.shm, options.shm_limit) == (False, 1 << 20)
    options = BrokerRpcBackendOptions(shm=True, shm_limit=7)
    assert (options.shm, options.shm_limit) == (True, 7)
    monkeypatch.setenv("TENSORPLAY_SHM", "maybe")
    with pytest.raises(ConfigError, match="TENSORPLAY_SHM is 1 or 0, got 'maybe'"):
        BrokerRpcBackendOptions()


def test_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < limits.default_limit() < 1 << 60
    assert 0 < limits.available() < 1 << 60
    limit, used = tmp_path / "max", tmp_path / "current"
    monkeypatch.setattr(limits, "_GROUPS", ((str(limit), str(used)),))
    limit.write_text("max\n")
    used.write_text("1000\n")
    assert limits.default_limit() > 1 << 20
    limit.write_text("400000\n")
    assert limits.default_limit() == 100_000
    assert limits.available() == 399_000
    used.write_text("500000\n")
    assert limits.available() == 0
