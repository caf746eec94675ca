"""Objects to frames and back: frames, buffers out of band, sizes, and frames that are wrong."""

from __future__ import annotations

import array
import pickle
import subprocess
import sys
import textwrap
from typing import Any

import msgspec
import pytest
import torch

from tensorplay.distributed.rpc import payload
from tensorplay.distributed.rpc.payload import Table
from tensorplay.errors import ProtocolError, SerializationError
from tests.rpc.travel import received, size, travel

# ------------------------------------------------------------------------------------- frames


def test_a_payload_without_tensors_is_a_pickle_and_a_table() -> None:
    frames = payload.pack((len, ([1],), {}))
    assert len(frames) == 2
    assert payload.unpack(frames) == (len, ([1],), {})


def test_buffers_of_tensors_come_before_those_of_the_pickle() -> None:
    raw = pickle.PickleBuffer(bytearray(b"raw" * 1000))
    head, table, first, second = payload.pack([raw, torch.arange(3)])
    assert b"raw" not in bytes(head)
    assert msgspec.msgpack.decode(table, type=Table).buffers == 1
    assert memoryview(first).nbytes == 24
    assert bytes(second) == b"raw" * 1000


def test_small_calls_are_small() -> None:
    x = torch.ones(1, 8)
    assert size((torch.add, (x, x), {})) < 256


def test_frames_may_be_bytes_views_or_of_several_kinds() -> None:
    frames = payload.pack([torch.arange(3), bytearray(b"x" * 100_000)])
    for kind in (bytes, memoryview):
        got = payload.unpack([kind(frame) for frame in frames])
        assert got[0].tolist() == [0, 1, 2]
        got[0].add_(1)
        got[1][0] = 0


def test_the_same_frames_can_be_read_twice() -> None:
    frames = payload.pack([torch.arange(3)])
    first, second = payload.unpack(frames), payload.unpack(frames)
    first[0].zero_()
    assert second[0].tolist() == [0, 1, 2]


# ------------------------------------------------------------------------------ NumPy and bytes


def test_numpy_arrays_travel_out_of_band() -> None:
    numpy = pytest.importorskip("numpy")
    sent = numpy.arange(100_000).reshape(100, 1000)
    frames = payload.pack({"data": sent})
    assert len(frames) == 3
    assert memoryview(frames[0]).nbytes < 500
    sent[:] = 0  # a snapshot has been sent
    memory = memoryview(bytearray(frames[2]))
    got = payload.unpack([*frames[:2], memory])["data"]
    assert got.flags.writeable
    assert got[99, 999] == 99_999
    memory[:8] = bytes([7, 0, 0, 0, 0, 0, 0, 0])
    assert got[0, 0] == 7, "the array lies in the received frame"


@pytest.mark.parametrize(
    "make",
    [
        "np.zeros(())",
        "np.zeros(0)",
        "np.zeros((0, 4))",
        "np.asfortranarray(np.arange(12).reshape(3, 4))",
        "np.arange(12)[::2]",
        "np.arange(12).reshape(3, 4).T",
        "np.array(['a', 'bc'])",
        "np.array([{'a': 1}], dtype=object)",
        "np.array([(1, 2.0)], dtype=[('a', 'i4'), ('b', 'f8')])",
        "np.float32(3)",
        "np.datetime64('2020-01-01')",
        "np.ma.array([1, 2], mask=[0, 1])",
        "np.broadcast_to(np.arange(3), (2, 3))",
    ],
)
def test_arrays_of_all_kinds_travel(make: str) -> None:
    numpy = pytest.importorskip("numpy")
    sent = eval(make, {"np": numpy})
    got = travel(sent)
    assert type(got) is type(sent)
    numpy.testing.assert_array_equal(got, sent)
    assert got.dtype == sent.dtype


def test_a_read_only_array_arrives_read_only() -> None:
    numpy = pytest.importorskip("numpy")
    sent = numpy.arange(10)
    sent.setflags(write=False)
    assert not travel(sent).flags.writeable


def test_an_array_that_shares_memory_with_a_tensor() -> None:
    numpy = pytest.importorskip("numpy")
    sent = numpy.arange(3)
    array_got, tensor_got = travel((sent, torch.from_numpy(sent)))
    assert array_got.tolist() == tensor_got.tolist() == [0, 1, 2]


def test_torch_without_numpy_is_enough() -> None:
    code = """
        import sys
        sys.modules["numpy"] = None  # cannot be imported
        import torch
        from tests.rpc.travel import travel
        from tensorplay.distributed.rpc import payload
        import warnings
        warnings.simplefilter("ignore")
        for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.complex64):
            sent = torch.ones(3, 4, dtype=dtype).t()
            assert torch.equal(travel({"x": [sent]})["x"][0], sent)
        assert travel(torch.eye(2).to_sparse()).is_sparse
        assert travel(torch.nn.Linear(2, 2)).weight.shape == (2, 2)
        assert travel(lambda: 3)() == 3
        assert "numpy" not in sys.modules or sys.modules["numpy"] is None
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("count", [0, 1, 100, 1_000_000])
def test_bytes_and_byte_arrays(count: int) -> None:
    sent = bytes(range(256)) * (count // 256 + 1)
    assert travel(sent[:count]) == sent[:count]
    got = travel(bytearray(sent[:count]))
    assert type(got) is bytearray
    assert got == sent[:count]
    got += b"x"


def test_array_module_and_pickle_buffers() -> None:
    assert travel(array.array("d", [1.5, 2.5])) == array.array("d", [1.5, 2.5])
    memory = bytearray(b"abc" * 100)
    frames = payload.pack(pickle.PickleBuffer(memory))
    memory[:3] = b"xyz"
    got = memoryview(payload.unpack(received(frames)))
    assert bytes(got[:3]) == b"abc"
    assert not got.readonly
    assert memoryview(travel(pickle.PickleBuffer(b"fixed"))).readonly
    assert bytes(travel(pickle.PickleBuffer(b""))) == b""


def test_a_view_of_memory_arrives_as_bytes() -> None:
    assert travel({"raw": memoryview(bytearray(b"abcd"))[::2]}) == {"raw": b"ac"}


def test_a_pickle_buffer_with_gaps_is_refused() -> None:
    gaps = pickle.PickleBuffer(memoryview(bytearray(10))[::2])
    with pytest.raises(SerializationError, match="contiguous"):
        travel([gaps])


# --------------------------------------------------------------------------------------- sizes


@pytest.mark.parametrize("mib", [4, 5])
def test_sizes_around_the_limits_of_others(mib: int) -> None:
    sent = torch.arange(mib << 17)
    assert torch.equal(travel(sent), sent)


# --------------------------------------------------------------------------------- wrong frames


@pytest.mark.parametrize("count", [0, 1])
def test_too_few_frames(count: int) -> None:
    with pytest.raises(ProtocolError, match="at least 2"):
        payload.unpack([b"x"] * count)


@pytest.mark.parametrize(
    "table", [b"", b"\xc1", b"\x92", b"\x92\x91\x01\x00", b"\x92\x90\xa1x", b"\x80"]
)
def test_a_table_that_is_none(table: bytes) -> None:
    with pytest.raises(ProtocolError):
        payload.unpack([pickle.dumps(1), table])


@pytest.mark.parametrize("count", [1, -1, 2**40])
def test_a_table_with_a_wrong_number_of_buffers(count: int) -> None:
    table = msgspec.msgpack.encode(Table([], count))
    with pytest.raises(ProtocolError, match="buffers"):
        payload.unpack([pickle.dumps(1), table])


@pytest.mark.parametrize("head", [b"", b"garbage", pickle.dumps([1, 2])[:-2], b"\x80\x05."])
def test_a_damaged_pickle(head: bytes) -> None:
    with pytest.raises(ProtocolError):
        payload.unpack([head, msgspec.msgpack.encode(Table())])


def test_a_pickle_that_refers_to_tensors_that_are_not_there() -> None:
    head, *_ = payload.pack([torch.ones(1), torch.ones(1)])
    _, table, *contents = payload.pack([torch.ones(1)])
    with pytest.raises(ProtocolError):
        payload.unpack([head, table, *contents])


def test_a_pickle_that_lacks_its_buffers() -> None:
    head, *_ = payload.pack([pickle.PickleBuffer(bytearray(10))])
    with pytest.raises(ProtocolError):
        payload.unpack([head, msgspec.msgpack.encode(Table())])


# ---------------------------------------------------------------------------------------- hooks


def test_hooks_see_the_tensors() -> None:
    layer, x = torch.nn.Linear(2, 2), torch.ones(2)
    seen: list[Any] = []
    frames = payload.pack([x, layer, x], tensors_hook=lambda *told: seen.append(told))
    found, copies = seen[0]
    assert found[0] is x
    assert len(found) == 3
    assert {id(found[one]) for one in copies} == set(map(id, layer.parameters()))
    got = payload.unpack(frames, tensors_hook=lambda there: [one * 0 for one in there])
    assert got[0] is got[2]
    assert got[0].tolist() == [0, 0]


def test_hooks_see_nothing_of_what_cannot_travel() -> None:
    seen: list[Any] = []
    with pytest.raises(SerializationError):
        payload.pack([torch.ones(1), (one for one in [1])], tensors_hook=lambda *a: seen.append(a))
    assert not seen


def test_device_maps_by_name() -> None:
    cpu, meta = torch.device("cpu"), torch.device("meta")
    assert payload.inverse({cpu: meta}) == {"meta": "cpu"}
    assert payload.inverse(None) == {}
    assert payload.device_map({"meta": "cpu"}) == {meta: cpu}
    assert payload.device_map({}) is None
