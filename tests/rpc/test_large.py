"""More than 4 GiB in one message."""

from __future__ import annotations

import gc

import psutil
import pytest
import torch

from tensorplay.distributed.rpc import payload

GIB = 1 << 30

pytestmark = [
    pytest.mark.large,
    pytest.mark.skipif(psutil.virtual_memory().available < 16 * GIB, reason="needs 16 GiB"),
]


def test_a_tensor_beyond_4_gib_travels_with_one_copy() -> None:
    count = 4 * GIB + (300 << 20)
    sent = torch.empty(count, dtype=torch.uint8)  # its pages are not touched, but for these:
    sent[0], sent[2 * GIB], sent[4 * GIB], sent[-1] = 1, 2, 3, 4
    small = torch.arange(3)
    frames = payload.pack((sent, small, sent[-5:]))
    address = sent.data_ptr()
    del sent
    gc.collect()
    got, got_small, end = payload.unpack(frames)
    assert got.numel() == count
    assert [got[index].item() for index in (0, 2 * GIB, 4 * GIB, -1)] == [1, 2, 3, 4]
    assert got_small.tolist() == [0, 1, 2]
    assert got.data_ptr() != address
    end[0] = 9
    assert got[-5] == 9  # still one memory: nothing was copied on arrival
