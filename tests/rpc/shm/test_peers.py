"""Who shares memory with this process, found out without a wire."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from tensorplay.distributed.rpc import payload, shm, staging
from tensorplay.distributed.rpc.shm import files
from tensorplay.distributed.rpc.shm.peers import THRESHOLD_BYTES, SharedMemory
from tensorplay.errors import ProtocolError
from tensorplay.protocol.calls import Answer, Offer
from tensorplay.protocol.messages import PeerInfo

from ..test_staging import FakeStager
from .helpers import this_process

SIDES = {11: "left", 12: "right"}


class Pair:
    """Two sides in one process whose probes reach each other, or are kept."""

    def __init__(self, **options: bool) -> None:
        self.there = set(SIDES)
        self.probes: list[tuple[bytes, Callable[[bytes], None]]] = []
        self.left, self.right = (
            SharedMemory(me, 64 << 20, self._probe, self.there.__contains__, **options)
            for me in SIDES
        )

    def _probe(self, peer: PeerInfo, offer: bytes, answered: Callable[[bytes], None]) -> None:
        assert peer.incarnation == 12
        self.probes.append((offer, answered))

    def answer(self) -> None:
        for offer, answered in self.probes:
            answered(self.right.answer(this_process(11), offer))
        self.probes.clear()

    def meet(self) -> None:
        leases = self.left.leases_for(this_process(12))
        assert leases is not None
        assert leases.take(THRESHOLD_BYTES) is None
        self.answer()

    def send(self, obj: object) -> tuple[int, Any]:
        """Returns how many blocks and what arrives of an object."""
        leases = self.left.leases_for(this_process(12))
        frames = payload.pack(obj, leases=leases)
        blocks, rest = shm.hand_over(frames, leases)
        del frames
        whole = self.right.mappings.attach(this_process(11), blocks, rest)
        return len(blocks), payload.unpack(whole)

    def close(self) -> None:
        self.left.close()
        self.right.close()


@pytest.fixture
def pair() -> Pair:
    return Pair()


@pytest.fixture(autouse=True)
def _closed(pair: Pair) -> object:
    yield
    pair.close()


def test_nothing_is_shared_before_the_peer_has_read_it(pair: Pair) -> None:
    sent = torch.arange(100_000)
    count, got = pair.send(sent)
    assert count == 0
    assert torch.equal(sent, got)
    assert len(pair.probes) == 1
    assert pair.send(sent)[0] == 0
    assert len(pair.probes) == 1  # one is enough
    pair.answer()
    count, got = pair.send(sent)
    assert count == 1
    assert torch.equal(sent, got)
    assert pair.left._peers[12].shares


def test_small_payloads_ask_nobody(pair: Pair) -> None:
    assert pair.send([torch.ones(10), bytearray(1000)])[0] == 0
    assert pair.probes == []
    pair.meet()
    few = torch.zeros(THRESHOLD_BYTES - 1, dtype=torch.uint8)
    enough = torch.zeros(THRESHOLD_BYTES, dtype=torch.uint8)
    assert pair.send(few)[0] == 0
    assert pair.send(enough)[0] == 1
    assert pair.send([few, enough, few, enough.clone()])[0] == 2


@pytest.mark.parametrize(
    "answer",
    [
        Answer(reason="it is elsewhere"),
        Answer(nonce=b"wrong"),
        Answer(nonce=bytes(16)),
    ],
)
def test_a_peer_that_cannot_read_it_gets_frames_for_good(
    pair: Pair, answer: Answer, caplog: pytest.LogCaptureFixture
) -> None:
    pair.send(torch.ones(100_000))
    with caplog.at_level(logging.INFO):
        pair.probes[0][1](msgspec.msgpack.encode(answer))
    pair.probes.clear()
    assert pair.left.leases_for(this_process(12)) is None
    assert pair.send(torch.ones(100_000))[0] == 0
    assert pair.probes == []
    assert f"'me' shares no memory with this process: {answer.reason}" in caplog.text


def test_a_process_of_that_number_elsewhere(pair: Pair) -> None:
    # Two containers: the process id and the descriptor exist here, but are something else.
    pair.send(torch.ones(100_000))
    (offer, _), *_ = pair.probes
    for src, text in (
        (this_process(13), "where the slab"),
        (this_process(11, pid=os.getppid()), ""),
        (this_process(11, pid=1 << 22), "No such file"),
    ):
        answer = msgspec.msgpack.decode(pair.right.answer(src, offer), type=Answer)
        assert answer.nonce == b""
        assert text in answer.reason
        assert answer.reason


@pytest.mark.parametrize("offer", [b"", b"\xc1", b"\x91\xa1x", msgspec.msgpack.encode([])])
def test_what_is_no_offer(pair: Pair, offer: bytes) -> None:
    with pytest.raises(ProtocolError, match="not an offer"):
        pair.right.answer(this_process(11), offer)


def test_turned_off() -> None:
    off = Pair(enabled=False)
    assert off.left.leases_for(this_process(12)) is None
    assert off.send(torch.ones(100_000))[0] == 0
    answer = msgspec.msgpack.decode(
        off.right.answer(this_process(11), msgspec.msgpack.encode(Offer(3))), type=Answer
    )
    assert "turned off" in answer.reason


def test_a_process_shares_nothing_with_itself(pair: Pair) -> None:
    assert pair.left.leases_for(this_process(11)) is None


def test_a_system_without_shared_memory(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(owner: int, number: int, size: int) -> None:
        raise OSError("not permitted")

    monkeypatch.setattr(files, "create", refuse)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert pair.send(torch.ones(100_000))[0] == 0
    assert [record.message for record in caplog.records] == [
        "memory cannot be shared with other processes here: not permitted"
    ]


def test_blocks_of_a_payload_that_fails_are_returned(pair: Pair) -> None:
    pair.meet()
    leases = pair.left.leases_for(this_process(12))
    assert leases is not None
    payload.pack([torch.ones(100_000), torch.ones(50_000)], leases=leases)
    assert pair.left._pool.stats()["slab_leases"] == 2
    leases.undo()
    leases.undo()
    assert pair.left._pool.stats()["slab_leases"] == 0


def test_what_is_sent_is_a_snapshot(pair: Pair) -> None:
    pair.meet()
    sent = torch.ones(100_000)
    leases = pair.left.leases_for(this_process(12))
    frames = payload.pack(sent, leases=leases)
    sent.zero_()
    blocks, rest = shm.hand_over(frames, leases)
    got = payload.unpack(pair.right.mappings.attach(this_process(11), blocks, rest))
    assert got.sum() == 100_000
    got.fill_(7)
    _, again = pair.send(sent)
    assert again.sum() == 0
    assert got.sum() == 700_000


def test_tensors_that_share_memory_share_it_on_arrival(pair: Pair) -> None:
    pair.meet()
    whole = torch.arange(100_000.0)
    count, (got, part) = pair.send((whole, whole[5:10]))
    assert count == 1
    part.fill_(-1)
    assert got[5:10].tolist() == [-1] * 5


def test_raw_buffers(pair: Pair) -> None:
    numpy = pytest.importorskip("numpy")
    pair.meet()
    sent = numpy.arange(100_000)
    count, got = pair.send({"array": sent, "bytes": b"x" * 100_000})
    assert count == 1
    assert (got["array"] == sent).all()
    got["array"][0] = 7
    assert sent[0] == 0
    assert pair.left._pool.stats()["slab_leases"] == 1
    del got
    assert pair.left._pool.stats()["slab_leases"] == 0


def test_a_peer_that_is_gone_is_forgotten(pair: Pair) -> None:
    pair.meet()
    pair.send(torch.ones(100_000))
    assert pair.left._pool.stats()["slabs"] == 1
    pair.left.drop(12)
    assert pair.left._pool.stats()["slabs"] == 0
    assert pair.left._peers == {}
    pair.send(torch.ones(100_000))  # one that comes back is asked again
    assert len(pair.probes) == 1


def test_what_was_made_for_a_peer_as_it_went_is_given_up(pair: Pair) -> None:
    pair.meet()
    leases = pair.left.leases_for(this_process(12))
    assert leases is not None
    pair.left.drop(12)
    leases.take(100_000)
    assert pair.left._pool.stats()["slab_leases"] == 1
    pair.there.remove(12)
    pair.left.trim(1000.0)
    assert pair.left.stats()["slabs"] == 0


def test_after_the_end_nothing_is_shared(pair: Pair) -> None:
    pair.meet()
    _, got = pair.send(torch.ones(100_000))
    pair.close()
    assert pair.left.leases_for(this_process(12)) is None
    assert got.sum() == 100_000
    pair.close()


def test_memory_of_a_device_is_staged_into_shared_memory(pair: Pair) -> None:
    pair.meet()
    sent = torch.arange(100_000)
    with staging.use(FakeStager()):
        count, got = pair.send([sent, sent[:10].clone()])
    assert count == 1
    assert torch.equal(got[0], sent)
    assert torch.equal(got[1], sent[:10])
