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


class Status(IntEnum):
    """How a request ended."""

    OK = 0
    ERROR = 1  # the payload is a description of the exception


class Request(msgspec.Struct, frozen=True, array_like=True):
    """What the caller wants.

    Attributes:
        op: The operation.
        timeout: Seconds the caller waits for, 0 for ever.
        rref: The remote reference that REMOTE fills and FETCH reads.
        refs: References that travel inside the payload, for the receiver's accounts.
        meta: What the caller's autograd tells the callee's.
        sizes: Bytes of each payload frame if they follow in chunks, else empty.
        devices: Where tensors of the reply belong: the callee's device to the caller's.
    """

    op: Op
    timeout: float = 0.0
    rref: RRefKey | None = None
    refs: list[RefToken] = []
    meta: bytes = b""
    sizes: list[int] = []
    devices: dict[str, str] = {}


class Reply(msgspec.Struct, frozen=True, array_like=True):
    """What the callee answers; the fields are those of ``Request``."""

    status: Status
    refs: list[RefToken] = []
    meta: bytes = b""
    sizes: list[int] = []


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
    return _decode(_request_decoder, header, "request")


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
