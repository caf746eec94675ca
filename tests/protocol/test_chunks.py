"""Cutting payloads up and putting them together."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorplay.errors import ProtocolError
from tensorplay.protocol import chunks, wire
from tensorplay.protocol.chunks import Assembler, Position, cut, decode_position
from tensorplay.protocol.messages import CHUNK_BYTES


def allocate(size: int) -> memoryview:
    return memoryview(bytearray(size))


def reassemble(frames: list[bytes], most: int = CHUNK_BYTES) -> list[bytes]:
    assembler = Assembler([len(frame) for frame in frames], allocate)
    for offset, pieces in cut([memoryview(frame) for frame in frames]):
        assert 0 < sum(len(piece) for piece in pieces) <= most
        assembler.add(offset, pieces)
    assert assembler.complete
    return [bytes(frame) for frame in assembler.frames]


@given(st.lists(st.binary(max_size=40), max_size=12), st.integers(1, 17))
def test_any_payload_survives(frames: list[bytes], size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "CHUNK_BYTES", size)
        assert reassemble(frames, size) == frames


def test_chunks_have_their_real_size() -> None:
    frames = [b"a" * (CHUNK_BYTES + 5), b"", b"b" * (2 * CHUNK_BYTES)]
    sizes = [
        sum(len(piece) for piece in pieces) for _, pieces in cut([memoryview(f) for f in frames])
    ]
    assert sizes == [CHUNK_BYTES] * 3 + [5]
    assert reassemble(frames) == frames


@pytest.mark.parametrize("offset", [1, 4, 9])
def test_a_chunk_out_of_order_is_refused(offset: int) -> None:
    assembler = Assembler([8], allocate)
    with pytest.raises(ProtocolError, match="does not continue"):
        assembler.add(offset, [memoryview(b"abcd")])


def test_more_bytes_than_announced_are_refused() -> None:
    assembler = Assembler([3], allocate)
    with pytest.raises(ProtocolError, match="does not continue"):
        assembler.add(0, [memoryview(b"abcd")])


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(ProtocolError, match="impossible"):
        Assembler([-1], allocate)


@given(st.binary(max_size=20))
def test_rubbish_is_no_position(data: bytes) -> None:
    try:
        position = decode_position(data)
    except ProtocolError:
        return
    assert msgspec.msgpack.decode(wire.encode(position)) == [position.kind, position.offset]


def test_positions_round_trip() -> None:
    assert decode_position(wire.encode(Position(32, 1 << 40))) == Position(32, 1 << 40)
