"""Small messages to one peer that are sent at the same time, as one message.

    [Route(kind=BATCH)] [index] [all frames of all messages, end to end]

The index is a MessagePack array of ``[kind, id, size, [bytes of each frame]]``.  A
message costs the broker, and ZeroMQ, much the same whatever is in it; so calls that are
queued together travel together, and nothing ever waits for a batch to fill.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from tensorplay.errors import ProtocolError

#: A message of more bytes goes alone.
MESSAGE_BYTES = 8 << 10
#: Bytes and messages of a batch, at most.
BATCH_BYTES = 128 << 10
BATCH_MESSAGES = 256

Frame = bytes | memoryview
#: Kind, id, size and frames of a message.
Entry = tuple[int, int, int, Sequence[Frame]]

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[tuple[int, int, int, list[int]]]).decode


def pack(entries: Iterable[Entry]) -> list[bytes]:
    """Returns the frames of a batch that stand behind its Route."""
    index = []
    contents: list[Frame] = []
    for kind, id, size, frames in entries:
        index.append((kind, id, size, [len(frame) for frame in frames]))
        contents += frames
    return [_encode(index), b"".join(contents)]


def unpack(frames: Sequence[Frame]) -> Iterator[Entry]:
    """Yields the messages of a batch.

    Raises:
        ProtocolError: If the frames are none of a batch.
    """
    if len(frames) != 2:
        raise ProtocolError(f"a batch has 2 frames behind its header, this one has {len(frames)}")
    try:
        index = _decode(frames[0])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ProtocolError(f"the second frame of a batch is no index: {error}") from None
    contents = frames[1] if isinstance(frames[1], bytes) else bytes(frames[1])
    if sum(sum(sizes) for *_, sizes in index) != len(contents) or any(
        size < 0 for *_, sizes in index for size in sizes
    ):
        raise ProtocolError(f"a batch of {len(contents)} bytes announces others")
    start = 0
    for kind, id, size, sizes in index:
        parts = []
        for length in sizes:
            parts.append(contents[start : start + length])
            start += length
        yield kind, id, size, parts
