"""Headers of requests and replies: the second frame, which only the peers read.

A request or reply is::

    [Route] [Request or Reply] [payload frame] [payload frame] ...

while its payload fits one chunk, else the payload follows in CHUNK messages (see
``chunks``) and ``sizes`` announces its frames.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TypeVar

import msgspec

from tensorplay.errors import ProtocolError
from tensorplay.protocol.refs import RefToken, RRefKey

_T = TypeVar("_T")


class Op(IntEnum):
    """What a request asks for."""

    CALL = 1  # run the function, reply with its result
    REMOTE = 2  # run the function, keep the result under ``rref``, reply that it is there
    FETCH = 3  # reply with the value kept under ``rref``
    REFS = 4  # reference counts: who else holds, who has let go
    PROBE = 5  # can you map this memory? The payload is an ``Offer``, the reply's an ``Answer``


class Status(IntEnum):
    """How a request ended."""

    OK = 0
    ERROR = 1  # the payload is a description of the exception


class Block(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where a payload frame lies that does not travel: in shared memory of the sender.

    Attributes:
        frame: Which frame of the payload it is, counted from 0.
        slab: Number of the slab, unique in the sender.
        fd: Descriptor of the slab in the sender's process.
        slab_bytes: Bytes of the slab.
        lease: Which byte of the slab's leases the receiver clears when it is done.
        offset: Where in the slab the frame begins, in bytes.
        nbytes: Bytes of the frame.
    """

    frame: int
    slab: int
    fd: int
    slab_bytes: int
    lease: int
    offset: int
    nbytes: int


class Span(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A part of a call's life, for traces.

    Attributes:
        stage: Which part.
        name: What is called.
        id: Number of the request.
        start: When it began, in seconds of the broker's clock.
        end: When it ended.
        process: Name of the peer.
        thread: Name of the thread.
    """

    stage: str
    name: str
    id: int
    start: float
    end: float
    process: str
    thread: str


class Request(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the caller wants.

    Attributes:
        op: The operation.
        timeout: Seconds the caller waits for, 0 for ever.
        rref: The remote reference that REMOTE fills and FETCH reads.
        refs: References that travel inside the payload, for the receiver's accounts.
        meta: What the caller's autograd tells the callee's.
        sizes: Bytes of each payload frame if they follow in chunks, else empty.
        devices: Where tensors of the reply belong: the callee's device to the caller's.
        blocks: The payload frames in shared memory, in order; the others travel.
        function: Number of the function that is called, or 0 if the payload has it.
        definition: What that number stands for: the pickle of the function. The first request
            that goes to a callee with that number has it.
        trace: Whether the reply is to say where the time went.
        context: The caller's OpenTelemetry context.
    """

    op: Op
    timeout: float = 0.0
    rref: RRefKey | None = None
    refs: list[RefToken] = []
    meta: bytes = b""
    sizes: list[int] = []
    devices: dict[str, str] = {}
    blocks: list[Block] = []
    function: int = 0
    definition: bytes = b""
    trace: bool = False
    context: dict[str, str] = {}


class Reply(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the callee answers; the fields are those of ``Request``.

    Attributes:
        trace: Where the time went, if the request asks; first the callee's whole part.
    """

    status: Status
    refs: list[RefToken] = []
    meta: bytes = b""
    sizes: list[int] = []
    blocks: list[Block] = []
    trace: list[Span] = []


class Offer(msgspec.Struct, frozen=True, array_like=True):
    """Payload of a PROBE request: a slab number 0, of one page, to be read.

    Attributes:
        fd: Its descriptor in the sender's process.
    """

    fd: int


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """Payload of the reply to a PROBE.

    Attributes:
        nonce: What was read, or nothing if the memory could not be mapped.
        reason: Why not.
    """

    nonce: bytes = b""
    reason: str = ""


class RefChanges(msgspec.Struct, frozen=True, array_like=True):
    """Payload of a REFS request.

    Attributes:
        adds: ``(key, user incarnation, count)``: the user was sent that many references.
        releases: ``(key, count)``: the sender has dropped what it received so often.
    """

    adds: list[tuple[RRefKey, int, int]] = []
    releases: list[tuple[RRefKey, int]] = []


_request_decoder = msgspec.msgpack.Decoder(Request)
_reply_decoder = msgspec.msgpack.Decoder(Reply)
_changes_decoder = msgspec.msgpack.Decoder(RefChanges)


def decode_request(header: bytes | memoryview) -> Request:
    """Returns the request header.

    Raises:
        ProtocolError: If the bytes are none.
    """
    request = _decode(_request_decoder, header, "request")
    if request.rref is None and request.op in (Op.REMOTE, Op.FETCH):
        raise ProtocolError(f"a request for {Op(request.op).name} names no remote reference")
    return request


def decode_reply(header: bytes | memoryview) -> Reply:
    """Returns the reply header.

    Raises:
        ProtocolError: If the bytes are none.
    """
    return _decode(_reply_decoder, header, "reply")


def decode_changes(frame: bytes | memoryview) -> RefChanges:
    """Returns the payload of a REFS request.

    Raises:
        ProtocolError: If the bytes are none.
    """
    return _decode(_changes_decoder, frame, "set of reference counts")


def _decode(decoder: msgspec.msgpack.Decoder[_T], data: bytes | memoryview, what: str) -> _T:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"not a {what} of this protocol: {error}") from None
