"""Large payloads: cut into chunks by the sender, put together by the receiver.

A frame as large as a tensor would hold up everything behind it, heartbeats included.
So a payload of more than ``CHUNK_BYTES`` travels as its header, which announces the
size of each payload frame, and then as CHUNK messages::

    [Route(kind=CHUNK, id, size)] [Position] [piece] [piece] ...

The payload frames are one stream of bytes; a chunk is a range of it of at most
``CHUNK_BYTES``, cut into pieces where a frame ends.  Chunks of one payload arrive in
order, those of different payloads interleave.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from tensorplay.errors import ProtocolError
from tensorplay.protocol.messages import CHUNK_BYTES

#: A payload has at most this many frames.
MAX_FRAMES = 1 << 20


class Position(msgspec.Struct, frozen=True, array_like=True):
    """Second frame of a CHUNK message.

    Attributes:
        kind: REQUEST or REPLY: which of the two with that id the chunk belongs to.
        offset: Where in the stream of payload bytes the chunk begins.
    """

    kind: int
    offset: int


_position_decoder = msgspec.msgpack.Decoder(Position)


def decode_position(frame: bytes | memoryview) -> Position:
    """Returns the position header of a chunk.

    Raises:
        ProtocolError: If the bytes are none.
    """
    try:
        return _position_decoder.decode(frame)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"not a chunk of this protocol: {error}") from None


def cut(frames: Sequence[memoryview]) -> Iterator[tuple[int, list[memoryview]]]:
    """Yields ``(offset, pieces)`` of each chunk of a payload.

    Args:
        frames: The payload frames, one-dimensional views of bytes.
    """
    offset = 0
    pieces: list[memoryview] = []
    room = CHUNK_BYTES
    for frame in frames:
        start = 0
        while start < len(frame):
            piece = frame[start : start + room]
            pieces.append(piece)
            start += len(piece)
            room -= len(piece)
            if room == 0:
                yield offset, pieces
                offset += CHUNK_BYTES
                pieces, room = [], CHUNK_BYTES
    if pieces:
        yield offset, pieces


class Assembler:
    """Puts one payload together from its chunks.

    Args:
        sizes: Bytes of each payload frame, as the header announced them.
        allocate: Gives a writable buffer of so many bytes.

    Raises:
        ProtocolError: If the announced sizes are impossible.
    """

    def __init__(self, sizes: Sequence[int], allocate: Callable[[int], memoryview]) -> None:
        if len(sizes) > MAX_FRAMES or any(size < 0 for size in sizes):
            raise ProtocolError(f"a payload of {len(sizes)} frames announces impossible sizes")
        self.total = sum(sizes)
        self.received = 0
        self.frames = [allocate(size) for size in sizes]
        self._index = 0  # the frame that the next byte belongs to
        self._start = 0  # and where in it

    @property
    def complete(self) -> bool:
        """Whether every byte has come."""
        return self.received == self.total

    def add(self, offset: int, pieces: Sequence[memoryview]) -> int:
        """Takes the next chunk and returns how many bytes it had.

        Raises:
            ProtocolError: If the chunk does not continue the stream.
        """
        size = sum(len(piece) for piece in pieces)
        if offset != self.received or self.received + size > self.total:
            raise ProtocolError(
                f"a chunk of {size} bytes at {offset} does not continue a payload of "
                f"{self.total} bytes of which {self.received} have come"
            )
        for piece in pieces:
            self._copy(piece)
        self.received += size
        return size

    def _copy(self, piece: memoryview) -> None:
        done = 0
        while done < len(piece):
            frame = self.frames[self._index]
            count = min(len(frame) - self._start, len(piece) - done)
            frame[self._start : self._start + count] = piece[done : done + count]
            done += count
            self._start += count
            if self._start == len(frame):
                self._index += 1
                self._start = 0
