"""Anonymous files in memory: made by a sender, mapped by one receiver.

The first page is the header, the rest is the blocks::

    byte 0      1 when the sender has given the slab up
    byte 1      1 when the receiver has mapped it
    byte 64...  one byte for each block: 1 while it is leased

A block's byte is set by the sender alone and cleared by whoever holds the block: stores of a
single byte are atomic, so that nothing else has to be agreed upon.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat

import torch

from tensorplay.distributed.rpc import memory
from tensorplay.errors import ProtocolError

#: Bytes of the header.
HEADER_BYTES = 4096
#: Where in the header is what.
RETIRED, MAPPED, LEASES = 0, 1, 64
#: A slab has at most this many blocks.
MOST_BLOCKS = HEADER_BYTES - LEASES

# Python 3.10 lacks names for some of these.
_MFD_NOEXEC_SEAL = 0x8
_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_F_SEAL_SEAL, _F_SEAL_SHRINK, _F_SEAL_GROW = 0x1, 0x2, 0x4
_MAP_POPULATE = getattr(mmap, "MAP_POPULATE", 0)


def create(owner: int, number: int, size: int) -> tuple[int, mmap.mmap]:
    """Makes a slab whose pages are all there, and returns its descriptor and its memory.

    Args:
        owner: Incarnation of this process.
        number: The slab's, unique in this process.
        size: Bytes, header included.

    Raises:
        OSError: If the system does not allow it, or has not as much memory.
    """
    fd = _anonymous(_name(owner, number))
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, size)
        # What a container's limit forbids is refused here, not by a signal at the first write.
        os.posix_fallocate(fd, 0, size)
        # It never shrinks under the receiver, who would get that signal.
        fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_SEAL)
        return fd, mmap.mmap(fd, size, mmap.MAP_SHARED | _MAP_POPULATE)
    except BaseException:
        os.close(fd)
        raise


def open_slab(pid: int, fd: int, owner: int, number: int, size: int) -> memoryview:
    """Maps a slab of another process of this host and user; no descriptor is kept for it.

    Args:
        pid: Process id of its owner.
        fd: Descriptor of the slab in the owner's process.
        owner: Incarnation of the owner.
        number: The slab's.
        size: Bytes that it is said to have.

    Raises:
        ProtocolError: If what is there is not that slab.
        OSError: If there is no such process or descriptor, or it may not be opened.
    """
    # Opened for its place alone at first: to open what is not the slab could have effects.
    place = os.open(f"/proc/{pid}/fd/{fd}", os.O_PATH | os.O_CLOEXEC)
    try:
        path = f"/proc/self/fd/{place}"
        _check(os.fstat(place), os.readlink(path), _name(owner, number), size)  # noqa: PTH115
        mapped = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    finally:
        os.close(place)
    try:
        if not fcntl.fcntl(mapped, _F_GET_SEALS) & _F_SEAL_SHRINK:
            raise ProtocolError(f"slab {number} of peer {owner} could shrink: it is not sealed")
        return _map(mapped, size)
    finally:
        os.close(mapped)


def _map(fd: int, size: int) -> memoryview:
    """Maps a file; unlike the standard library's, the mapping holds no descriptor."""
    try:
        storage = torch.UntypedStorage.from_file(f"/proc/self/fd/{fd}", True, size)
    except RuntimeError as error:
        raise OSError(f"it cannot be mapped: {error}") from None
    array = memory.array(storage.data_ptr(), size)
    array._owner = storage  # the view keeps the array, the array the mapping
    return memoryview(array).cast("B")


def _check(found: os.stat_result, link: str, name: str, size: int) -> None:
    if not stat.S_ISREG(found.st_mode) or link != f"/memfd:{name} (deleted)":
        raise ProtocolError(f"{link!r} was found where the slab {name!r} should be")
    if found.st_uid != os.geteuid():
        raise ProtocolError(
            f"the slab {name!r} belongs to user {found.st_uid}, this process to {os.geteuid()}"
        )
    if found.st_size != size or size < HEADER_BYTES:
        raise ProtocolError(f"the slab {name!r} has {found.st_size} bytes instead of {size}")


def _name(owner: int, number: int) -> str:
    return f"tensorplay-{owner:x}-{number}"


def _anonymous(name: str) -> int:
    if not hasattr(os, "memfd_create"):
        raise OSError("this system has no memfd_create")
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(name, flags | _MFD_NOEXEC_SEAL)
    except OSError:  # Linux before 6.3 knows no such flag
        return os.memfd_create(name, flags)
