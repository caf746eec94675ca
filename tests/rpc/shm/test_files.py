"""Slabs as files: made, and opened by somebody who trusts nobody."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys

import pytest

from tensorplay.distributed.rpc.shm import files
from tensorplay.errors import ProtocolError

from .helpers import ME, slab_descriptors

SIZE = files.HEADER_BYTES + (1 << 16)


def test_both_sides_see_the_same_memory() -> None:
    fd, memory = files.create(ME, 3, SIZE)
    other = files.open_slab(os.getpid(), fd, ME, 3, SIZE)
    memory[files.HEADER_BYTES] = 7
    assert other[files.HEADER_BYTES] == 7
    other[files.LEASES] = 1
    assert memory[files.LEASES] == 1
    os.close(fd)
    other[files.HEADER_BYTES] = 8  # it lasts as long as somebody has mapped it
    assert memory[files.HEADER_BYTES] == 8


def test_only_its_user_may_open_it_and_it_keeps_its_size() -> None:
    fd, _ = files.create(ME, 3, SIZE)
    assert os.fstat(fd).st_mode & 0o777 == 0o600
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)
    assert not os.get_inheritable(fd)
    os.close(fd)


def test_a_mapping_holds_no_descriptor() -> None:
    fd, _ = files.create(ME, 3, SIZE)
    before = len(slab_descriptors())
    other = files.open_slab(os.getpid(), fd, ME, 3, SIZE)
    assert len(slab_descriptors()) == before
    assert len(other) == SIZE
    os.close(fd)


def test_what_is_too_short_to_be_a_slab_is_refused() -> None:
    fd = os.memfd_create(f"tensorplay-{ME:x}-3", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with pytest.raises(ProtocolError, match="0 bytes"):
        files.open_slab(os.getpid(), fd, ME, 3, 0)
    os.close(fd)


def test_another_process_maps_it() -> None:
    fd, memory = files.create(ME, 5, SIZE)
    memory[SIZE - 1] = 42
    code = f"""
from tensorplay.distributed.rpc.shm import files
memory = files.open_slab({os.getpid()}, {fd}, {ME}, 5, {SIZE})
memory[files.HEADER_BYTES] = memory[{SIZE} - 1]
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert memory[files.HEADER_BYTES] == 42
    os.close(fd)


@pytest.mark.parametrize(
    ("owner", "number", "size", "text"),
    [
        (ME, 4, SIZE, "where the slab"),
        (ME + 1, 3, SIZE, "where the slab"),
        (ME, 3, SIZE * 2, "bytes instead of"),
        (ME, 3, files.HEADER_BYTES, "bytes instead of"),
    ],
)
def test_another_slab_than_the_one_named_is_refused(
    owner: int, number: int, size: int, text: str
) -> None:
    fd, _ = files.create(ME, 3, SIZE)
    with pytest.raises(ProtocolError, match=text):
        files.open_slab(os.getpid(), fd, owner, number, size)
    os.close(fd)


def test_what_is_no_slab_is_not_even_opened() -> None:
    reading, writing = os.pipe()
    with pytest.raises(ProtocolError, match="pipe:"):
        files.open_slab(os.getpid(), reading, ME, 3, SIZE)
    os.close(reading)
    with pytest.raises(OSError, match="No such file"):
        files.open_slab(os.getpid(), reading, ME, 3, SIZE)
    os.close(writing)


def test_a_file_that_is_named_like_one_is_refused() -> None:
    folder = f"/dev/shm/memfd:tensorplay-{ME:x}-3"
    fd = os.open(folder, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        os.ftruncate(fd, SIZE)
        with pytest.raises(ProtocolError, match="where the slab"):
            files.open_slab(os.getpid(), fd, ME, 3, SIZE)
    finally:
        os.unlink(folder)  # noqa: PTH108
        os.close(fd)


def test_a_slab_that_could_shrink_is_refused() -> None:
    fd = os.memfd_create(f"tensorplay-{ME:x}-3", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, SIZE)
    with pytest.raises(ProtocolError, match="not sealed"):
        files.open_slab(os.getpid(), fd, ME, 3, SIZE)
    fcntl.fcntl(fd, files._F_ADD_SEALS, files._F_SEAL_SHRINK)
    assert len(files.open_slab(os.getpid(), fd, ME, 3, SIZE)) == SIZE
    os.close(fd)


def test_the_slab_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fd, _ = files.create(ME, 3, SIZE)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ProtocolError, match="belongs to user"):
        files.open_slab(os.getpid(), fd, ME, 3, SIZE)
    os.close(fd)


def test_a_process_that_is_gone() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    with pytest.raises(OSError, match="No such file"):
        files.open_slab(ended.pid, 3, ME, 3, SIZE)


def test_what_is_refused_is_not_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(OSError, match="no memory"):
        files.create(ME, 3, SIZE)
    assert slab_descriptors() == []
