"""What the autograd of a caller and of a callee tell each other: the meta of calls.

A request's meta is one of the constants below for the ordinary call, else a ``Meta``; it is
empty for calls that autograd takes no notice of. A reply's meta is empty if the result has no
gradient, ``PLAIN_RESULT`` if the caller must see to it that it has none, else a ``Recorded``.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from tensorplay.distributed.autograd.modes import Autocast
from tensorplay.errors import ProtocolError

__all__ = [
    "GRAD_MODE",
    "NO_GRAD_MODE",
    "PLAIN_RESULT",
    "Meta",
    "Recorded",
    "decode_meta",
    "decode_recorded",
    "encode",
]

_T = TypeVar("_T")


class Meta(msgspec.Struct, frozen=True, array_like=True):
    """What a caller tells of itself and of the tensors of its request.

    Attributes:
        grad: Whether grad mode is on.
        inference: Whether inference mode is on.
        autocast: The types of device for which autocast is on.
        number: Name of this call among those of the caller that may get gradients, or 0.
        tracked: Positions of the tensors that may get a gradient.
        gated: Whether tensors of earlier calls may get one through this call.
        context: Id of the distributed autograd context, or 0.
        creator: Incarnation of the process that made the context.
    """

    grad: bool = True
    inference: bool = False
    autocast: list[Autocast] = []
    number: int = 0
    tracked: list[int] = []
    gated: bool = False
    context: int = 0
    creator: int = 0


class Recorded(msgspec.Struct, frozen=True, array_like=True):
    """What a callee keeps of a call whose result has a gradient.

    Attributes:
        graph: Name of the graph at the callee.
        tracked: Positions of the tensors of the result that have a gradient.
    """

    graph: int
    tracked: list[int]


#: Grad mode, and nothing else to tell.
GRAD_MODE = b"\x01"
#: No grad mode, and nothing else to tell.
NO_GRAD_MODE = b"\x00"
#: The result has no gradient, whatever its tensors say.
PLAIN_RESULT = b"\x00"

_constants = {GRAD_MODE: Meta(), NO_GRAD_MODE: Meta(grad=False)}
_encoder = msgspec.msgpack.Encoder()
_meta_decoder = msgspec.msgpack.Decoder(Meta)
_recorded_decoder = msgspec.msgpack.Decoder(Recorded)


def encode(meta: Meta | Recorded) -> bytes:
    """Returns the bytes that travel."""
    return _encoder.encode(meta)


def decode_meta(data: bytes) -> Meta:
    """Returns what a request's meta says.

    Raises:
        ProtocolError: If the bytes are none.
    """
    known = _constants.get(data)
    return _decode(_meta_decoder, data) if known is None else known


def decode_recorded(data: bytes) -> Recorded:
    """Returns what a reply's meta says, unless it is ``PLAIN_RESULT``.

    Raises:
        ProtocolError: If the bytes are none.
    """
    return _decode(_recorded_decoder, data)


def _decode(decoder: msgspec.msgpack.Decoder[_T], data: bytes) -> _T:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ProtocolError(f"not what autograd tells of a call: {error}") from None
