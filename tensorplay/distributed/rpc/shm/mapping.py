"""The receiver's side of shared memory: blocks to buffers.

A slab is mapped once. A buffer in it is writable and is the receiver's alone; when the last
tensor, view and storage on it is gone, the block is returned by clearing its byte in the slab's
header. No message is needed, and no thread.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, TypeVar

from tensorplay.distributed.rpc.shm import files
from tensorplay.distributed.rpc.shm.forks import forks
from tensorplay.errors import ProtocolError, WorkerLostError
from tensorplay.protocol.calls import Block
from tensorplay.protocol.messages import PeerInfo

_Frame = TypeVar("_Frame")


class Unreadable(Sequence[Any]):
    """Stands for the frames of a payload that cannot be read: whoever looks at them is told.

    Args:
        error: Why not.
    """

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __len__(self) -> int:
        raise self._error

    def __getitem__(self, index: Any) -> Any:
        raise self._error


class Mappings:
    """The slabs of others that this process has mapped."""

    def __init__(self) -> None:
        self._slabs: dict[tuple[int, int], memoryview] = {}

    def __len__(self) -> int:
        return len(self._slabs)

    def attach(
        self, src: PeerInfo, blocks: Sequence[Block], frames: Sequence[_Frame]
    ) -> Sequence[_Frame | memoryview]:
        """Returns the frames of a payload: those that came, and those in the sender's slabs.

        Args:
            src: The sender.
            blocks: Where the latter lie.
            frames: The former.

        Returns:
            The frames; what stands in for them raises when it is read if a block cannot be mapped.
        """
        whole: list[_Frame | memoryview] = list(frames)
        try:
            for block in blocks:
                if not 0 <= block.frame <= len(whole):
                    raise ProtocolError(f"a payload has no frame number {block.frame}")
                whole.insert(block.frame, self._buffer(src, block))
        except (FileNotFoundError, ProcessLookupError):
            lost = WorkerLostError(
                f"worker {src.name!r} (id {src.id}) ended before what it sent could be read"
            )
            return Unreadable(lost)
        except (OSError, ProtocolError) as error:
            return Unreadable(
                ProtocolError(
                    f"a tensor in the shared memory of {src.name!r} cannot be read: {error}; the "
                    "option shm=False, or TENSORPLAY_SHM=0, does without"
                )
            )
        return whole

    def discard(self, src: PeerInfo, blocks: Sequence[Block]) -> None:
        """Returns the blocks of a payload of which the rest will never come."""
        for block in blocks:
            with suppress(OSError, ProtocolError):
                self._buffer(src, block)  # and let go at once

    def drop(self, src: int) -> None:
        """Forgets the slabs of a peer that is gone; buffers in them stay valid."""
        for key in [key for key in self._slabs if key[0] == src]:
            del self._slabs[key]

    def trim(self) -> None:
        """Forgets the slabs that their senders have given up; returns what children have read."""
        forks.settle()
        for key, memory in list(self._slabs.items()):
            # While a block is leased, a message that names it may be under way.
            leases = bytes(memory[files.LEASES : files.HEADER_BYTES])
            if memory[files.RETIRED] and b"\1" not in leases:
                del self._slabs[key]

    def _buffer(self, src: PeerInfo, block: Block) -> memoryview:
        memory = self._slabs.get((src.incarnation, block.slab))
        if memory is None:
            memory = files.open_slab(
                src.pid, block.fd, src.incarnation, block.slab, block.slab_bytes
            )
            memory[files.MAPPED] = 1
            self._slabs[src.incarnation, block.slab] = memory
        start, end = block.offset, block.offset + block.nbytes
        if not (
            files.HEADER_BYTES <= start < end <= len(memory)
            and 0 <= block.lease < files.MOST_BLOCKS
        ):
            raise ProtocolError(
                f"bytes {start} to {end} (lease {block.lease}) lie outside of slab {block.slab} "
                f"of {len(memory)} bytes"
            )
        buffer = _buffer_type(block.nbytes).from_buffer(memory, start)
        forks.hold(buffer, memory, files.LEASES + block.lease)
        return memoryview(buffer).cast("B")


@lru_cache(maxsize=64)
def _buffer_type(nbytes: int) -> Any:
    """Returns a type of buffer that can be referred to weakly, as ctypes' own arrays cannot."""
    return type("Buffer", (ctypes.c_char * nbytes,), {})
