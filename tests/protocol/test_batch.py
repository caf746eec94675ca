"""Small messages that travel as one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorplay.errors import ProtocolError
from tensorplay.protocol import batch

frames = st.lists(st.binary(max_size=40), max_size=4)
entries = st.tuples(
    st.sampled_from([32, 33, 36]), st.integers(0, 2**40), st.integers(0, 2**20), frames
)


@given(st.lists(entries, min_size=1, max_size=20))
def test_what_goes_in_comes_out(messages: list[tuple[int, int, int, list[bytes]]]) -> None:
    assert list(batch.unpack(batch.pack(messages))) == messages


def test_contents_that_zeromq_lent_are_read_too() -> None:
    index, contents = batch.pack([(32, 1, 2, [b"ab", b"c"])])
    assert list(batch.unpack([index, memoryview(contents)])) == [(32, 1, 2, [b"ab", b"c"])]


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b"\x90"],
        [b"\x90", b"", b""],
        [b"rubbish", b""],
        [batch.pack([(32, 1, 0, [b"abc"])])[0], b"ab"],
        [batch.pack([(32, 1, 0, [b"abc"])])[0], b"abcd"],
        [b"\x91\x94\x20\x01\x00\x92\xff\x01", b""],  # a frame of -1 bytes
    ],
)
def test_rubbish_is_refused(frames: list[bytes]) -> None:
    with pytest.raises(ProtocolError):
        list(batch.unpack(frames))
