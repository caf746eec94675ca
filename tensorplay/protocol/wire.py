"""Headers to bytes and back."""

from __future__ import annotations

from typing import Any

import msgspec

from tensorplay.errors import ProtocolError
from tensorplay.protocol.messages import FIRST_ROUTED_KIND, Control, Kind, Route

_encoder = msgspec.msgpack.Encoder()
_control_decoder: msgspec.msgpack.Decoder[Control] = msgspec.msgpack.Decoder(Control)
_route_decoder = msgspec.msgpack.Decoder(Route)

#: Bytes of a header that can be decoded at all; everything real is far smaller but a
#: WELCOME or ROSTER, which grows with the number of peers.
MAX_HEADER_BYTES = 1 << 20


def encode(message: Any) -> bytes:
    """Returns the header frame of ``message``, a struct of ``messages``."""
    return _encoder.encode(message)


def decode(header: bytes | memoryview) -> Control | Route:
    """Returns the message whose header frame is ``header``.

    Raises:
        ProtocolError: If the bytes are no header of this protocol.
    """
    if not 2 <= len(header) <= MAX_HEADER_BYTES:
        raise ProtocolError(
            f"a header has 2 to {MAX_HEADER_BYTES} bytes, this one has {len(header)}"
        )
    try:
        if header[1] >= FIRST_ROUTED_KIND:
            route = _route_decoder.decode(header)
            Kind(route.kind)
            return route
        return _control_decoder.decode(header)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"not a header of this protocol: {error}") from None


def hello_protocol(header: bytes | memoryview) -> int | None:
    """Returns the protocol version that a HELLO of any version claims.

    Args:
        header: A header that ``decode`` may have refused.

    Returns:
        The version, or None if the header is no HELLO of any version.
    """
    try:
        fields = msgspec.msgpack.decode(header)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    if isinstance(fields, list) and len(fields) > 1 and fields[0] == Kind.HELLO:
        version = fields[1]
        return version if isinstance(version, int) else None
    return None
