"""Descriptors that are wrong: an error, and never memory that belongs to others."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tensorplay.distributed.rpc import payload, tensors
from tensorplay.distributed.rpc.payload import Table
from tensorplay.distributed.rpc.tensors import Descriptor
from tensorplay.errors import ConfigError, ProtocolError, SerializationError

HUGE = 2**60
#: What a wrong message may cause.
REFUSED = (ProtocolError, ConfigError)


def strided(**fields: Any) -> Descriptor:
    return msgspec.structs.replace(Descriptor("strided", "float32", [2], [1], 0), **fields)


WRONG = {
    "an unknown dtype": strided(dtype="float33"),
    "a name of torch that is no dtype": strided(dtype="load"),
    "an unknown layout": strided(layout="pickle"),
    "too large for the buffer": strided(shape=[5]),
    "beyond the end": strided(offset=3),
    "far beyond the end": strided(offset=HUGE),
    "before the beginning": strided(offset=-1),
    "no buffer": strided(buffer=-1),
    "a buffer counted from the end": strided(buffer=-2),
    "a buffer that is not there": strided(buffer=2),
    "an empty buffer": strided(buffer=1),
    "a negative size": strided(shape=[-2]),
    "a negative stride": strided(stride=[-1], offset=3),
    "too few strides": strided(shape=[2, 2]),
    "too many strides": strided(stride=[1, 1]),
    "a huge size": strided(shape=[HUGE]),
    "a huge stride": strided(stride=[HUGE]),
    "an extent that overflows": strided(shape=[2**31, 2**31, 4], stride=[2**31, 2**31, 2**31]),
    "a byte count that overflows": strided(shape=[2**62 + 2], stride=[4]),
    "a size beyond 64 bits": strided(shape=[2**63], stride=[0]),
    "too many dimensions": strided(shape=[1] * 1000, stride=[1] * 1000),
    "an expanded count that overflows": strided(shape=[HUGE, HUGE], stride=[0, 0]),
    "an empty tensor with an absurd size": strided(shape=[0, 2**63], stride=[1, 1]),
    "no floating point, but a gradient": strided(dtype="int32", flags=tensors.REQUIRES_GRAD),
    "a conjugate of a real tensor": strided(flags=tensors.CONJ),
    "coordinates without parts": Descriptor("sparse_coo", "float32", [2]),
    "a negative meta tensor": Descriptor("meta", "float32", [-2], [1]),
    "a huge meta tensor": Descriptor("meta", "float32", [HUGE, HUGE], [1, 1]),
    "a device that no machine has": strided(device="cuda:99"),
    "a device that is none": strided(device="toaster"),
    "quantized without a scale": Descriptor("quantized", "qint8", [2], [1], 0),
    "quantized with a plain dtype": Descriptor(
        "quantized", "float32", [2], [1], 0, extra=[1.0, 0.0]
    ),
    "plain with a quantized dtype": strided(dtype="qint8"),
    "quantized along an axis that is not there": Descriptor(
        "quantized",
        "qint8",
        [2],
        [1],
        0,
        parts=[strided(dtype="float32"), strided(dtype="int32")],
        extra=[5.0],
    ),
    "quantized with too few scales": Descriptor(
        "quantized",
        "qint8",
        [4],
        [1],
        0,
        parts=[strided(dtype="float32"), strided(dtype="int32")],
        extra=[0.0],
    ),
    "a zero point that is no number": Descriptor(
        "quantized", "qint8", [2], [1], 0, extra=[1.0, float("nan")]
    ),
    "a zero point without end": Descriptor(
        "quantized", "qint8", [2], [1], 0, extra=[1.0, float("inf")]
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_descriptor_is_refused(case: str) -> None:
    contents = [memoryview(bytearray(16)), memoryview(bytearray())]
    with pytest.raises(REFUSED):
        tensors.decode([WRONG[case]], contents)


@pytest.mark.parametrize("case", ["strided", "meta"])
def test_a_huge_expanded_tensor_takes_no_memory(case: str) -> None:
    descriptor = Descriptor(case, "float32", [HUGE], [0], 0)
    tracemalloc.start()
    try:
        try:
            (got,) = tensors.decode([descriptor], [memoryview(bytearray(4))])
        except ProtocolError:
            pass
        else:
            assert got.shape == (HUGE,)
            assert got.untyped_storage().nbytes() <= 16 or got.is_meta
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def _coo(indices: list[list[int]], shape: list[int], **fields: Any) -> tuple[Descriptor, list[Any]]:
    entries = torch.ones(len(indices[0]))
    parts, contents = tensors.encode([torch.tensor(indices), entries])
    return Descriptor("sparse_coo", "float32", shape, parts=parts, **fields), contents


@pytest.mark.parametrize(
    ("indices", "shape", "flags"),
    [
        ([[0, 9]], [4], 0),
        ([[0, -1]], [4], 0),
        ([[0, HUGE]], [4], 0),
        ([[0, 1], [0, 1]], [4], 0),
        ([[0, 1]], [-4], 0),
        ([[1, 0]], [4], tensors.COALESCED),
        ([[1, 1]], [4], tensors.COALESCED),
    ],
)
def test_wrong_coordinates_are_refused(
    indices: list[list[int]], shape: list[int], flags: int
) -> None:
    descriptor, contents = _coo(indices, shape, flags=flags)
    with pytest.raises(ProtocolError):
        tensors.decode([descriptor], contents)


@pytest.mark.parametrize("layout", ["sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc"])
@pytest.mark.parametrize(
    "pointers", [[0, 1, 99], [0, -5, 2], [5, 1, 2], [0, 2, 1], [0, 1], [0, HUGE, 2]], ids=str
)
def test_wrong_pointers_are_refused(layout: str, pointers: list[int]) -> None:
    entries = torch.ones(2, 1, 1) if layout.endswith(("bsr", "bsc")) else torch.ones(2)
    parts, contents = tensors.encode([torch.tensor(pointers), torch.tensor([0, 1]), entries])
    with pytest.raises(ProtocolError):
        tensors.decode([Descriptor(layout, "float32", [2, 2], parts=parts)], contents)


def test_parts_of_parts_are_refused_at_any_depth() -> None:
    deep = strided()
    for _ in range(50):
        deep = Descriptor("sparse_coo", "float32", [2], parts=[deep, deep])
    with pytest.raises(ProtocolError):
        tensors.decode([deep], [memoryview(bytearray(16))])


def test_a_table_without_end_is_refused() -> None:
    raw = b"\x9a\xa7strided\xa7float32\x90\x90\x00\x00\x00\xa3cpu\x91" * 100_000
    with pytest.raises(ProtocolError):
        payload.unpack([b"N.", b"\x92\x91" + raw])


sizes = st.integers(-2, 6) | st.integers(-(2**63), 2**63 - 1)
lists = st.lists(sizes, max_size=4)
names = st.sampled_from(sorted(tensors._DTYPES)) | st.text(max_size=5)
layouts = st.sampled_from(["strided", "quantized", "meta", "sparse_coo", *tensors._LAYOUTS])
flat = st.builds(
    Descriptor,
    layout=layouts,
    dtype=names,
    shape=lists,
    stride=lists,
    buffer=st.integers(-2, 3),
    offset=st.integers(-2, 40) | sizes,
    flags=st.integers(0, 63),
    device=st.sampled_from(["cpu", "meta", "cuda:0", "cuda:99", "", "toaster"]),
    extra=st.lists(st.floats() | st.integers(0, 3).map(float), max_size=2),
)
descriptors = flat | st.builds(
    lambda whole, parts: msgspec.structs.replace(whole, parts=parts),
    flat,
    st.lists(flat, max_size=3),
)
FUZZ = settings(
    max_examples=400,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def _within(tensor: torch.Tensor) -> bool:
    """Returns whether a strided tensor stays in its memory."""
    if tensor.is_meta or not tensor.numel():
        return True
    last = tensor.storage_offset() + sum(
        (size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    )
    # Packed dtypes have more elements than bytes.
    packed = {torch.quint4x2: 2, torch.quint2x4: 4}.get(tensor.dtype, 1)
    return 0 <= last // packed * tensor.itemsize < tensor.untyped_storage().nbytes()


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@FUZZ
@given(st.lists(descriptors, max_size=3))
def test_any_descriptor_gives_a_sound_tensor_or_an_error(found: list[Descriptor]) -> None:
    contents = [memoryview(bytearray(n)) for n in (64, 3, 0)]
    try:
        got = tensors.decode(found, contents)
    except REFUSED:
        return
    for tensor in got:
        parts = [tensor]
        if tensor.layout is torch.sparse_coo:
            parts = [tensor._indices(), tensor._values()]
        elif tensor.layout is not torch.strided:
            parts = [tensor.values()]
        assert all(_within(part) for part in parts)


SAMPLES = [
    payload.pack(one)
    for one in (
        torch.arange(6).view(2, 3).t(),
        [torch.ones(3), torch.eye(2).to_sparse()],
        torch.eye(2).to_sparse_csr(),
        torch.quantize_per_tensor(torch.ones(3), 0.5, 1, torch.qint8),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.empty(3, device="meta"),
    )
]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@FUZZ
@given(st.sampled_from(SAMPLES), st.data())
def test_a_damaged_table_or_buffer_is_no_danger(frames: list[Any], data: st.DataObject) -> None:
    table = bytearray(frames[1])
    for _ in range(data.draw(st.integers(1, 4))):
        table[data.draw(st.integers(0, len(table) - 1))] = data.draw(st.integers(0, 255))
    contents = [memoryview(bytearray(frame)) for frame in frames[2:]]
    for content in contents:
        if len(content) and data.draw(st.booleans()):
            content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << 3
    try:
        decoded = msgspec.msgpack.decode(table, type=Table)
        got = tensors.decode(decoded.tensors, contents)
    except (*REFUSED, msgspec.MsgspecError):
        return
    for tensor in got:
        if tensor.layout is torch.strided:
            assert _within(tensor)


def test_what_is_decoded_can_be_sent_again() -> None:
    for frames in SAMPLES:
        try:
            payload.pack(payload.unpack(frames))
        except SerializationError as error:  # pragma: no cover
            pytest.fail(str(error))
