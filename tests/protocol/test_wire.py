"""Headers: whatever the bytes, a message or a ProtocolError."""

from __future__ import annotations

import string
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorplay.broker.config import BrokerConfig
from tensorplay.broker.events import Received
from tensorplay.broker.state import BrokerState
from tensorplay.errors import ProtocolError
from tensorplay.protocol import wire
from tensorplay.protocol.messages import PROTOCOL_VERSION, Control, Hello, Kind, Role, Route
from tests.protocol.test_messages import EXAMPLES

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.binary(max_size=20)
    | st.text(max_size=20)
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=15)
        | st.dictionaries(st.text(string.printable, max_size=5), inner, max_size=3)
    ),
    max_leaves=30,
)
kinds = st.sampled_from([int(kind) for kind in Kind]) | st.integers(0, 127)


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """Returns a real header with some bytes changed, removed or put in."""
    header = bytearray(wire.encode(draw(st.sampled_from(EXAMPLES))))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(header)))
        end = draw(st.integers(start, min(len(header), start + 4)))
        header[start:end] = draw(st.binary(max_size=4))
    return bytes(header)


headers = (
    st.binary(max_size=200)
    | mutated()
    | st.tuples(kinds, st.lists(values, max_size=14)).map(
        lambda pair: msgspec.msgpack.encode([pair[0], *pair[1]])
    )
)


@settings(max_examples=1000, deadline=None)
@given(headers)
def test_decoding_raises_nothing_but_protocol_errors(header: bytes) -> None:
    with suppress(ProtocolError):
        message = wire.decode(header)
        assert isinstance(message, Control | Route)
        wire.encode(message)  # whatever was let in can be said again
    version = wire.hello_protocol(header)
    assert version is None or isinstance(version, int)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([b"a", b"b", b"s"]), headers), max_size=20))
def test_no_header_makes_the_brokers_state_raise(said: list[tuple[bytes, bytes]]) -> None:
    state = BrokerState(BrokerConfig(), incarnation=1, now=0.0)
    for number, identity in enumerate((b"a", b"b")):
        register = Hello(PROTOCOL_VERSION, f"w{number}", "n", number + 1, Role.WORKER)
        state.handle(Received(identity, wire.encode(register)), 0.0)
    for identity, header in said:
        state.handle(Received(identity, header), 0.0)
    assert state.registry.by_identity.keys() <= {b"a", b"b", b"s"}


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"\x92",
        b"\x91" * 10_000,  # nested beyond any stack
        b"\xdd\xff\xff\xff\xff",  # an array that claims 2**32 - 1 elements
        b"\x93\x20\xdb\xff\xff\xff\xff",  # text that claims as many bytes
        bytes(wire.MAX_HEADER_BYTES + 1),
        msgspec.msgpack.encode([int(Kind.REQUEST), 1, 2]),  # too few elements
        msgspec.msgpack.encode([int(Kind.REQUEST), 1, 2, "3", 4]),  # of a wrong type
        msgspec.msgpack.encode([99, 1, 2, 3, 4]),  # of no known kind
        msgspec.msgpack.encode([int(Kind.GOODBYE), "\ud800".encode("utf-8", "surrogatepass")]),
        msgspec.msgpack.encode({"kind": 1}),
        wire.encode(EXAMPLES[0]) + b"x",  # trailing bytes
        wire.encode(EXAMPLES[0])[:-1],
    ],
)
def test_what_is_no_header_is_refused(header: bytes) -> None:
    with pytest.raises(ProtocolError):
        wire.decode(header)


def test_the_version_of_any_hello_can_be_read() -> None:
    assert wire.hello_protocol(wire.encode(EXAMPLES[0])) == PROTOCOL_VERSION
    assert wire.hello_protocol(msgspec.msgpack.encode([1, 9, {"all": "else"}])) == 9
    assert wire.hello_protocol(msgspec.msgpack.encode([1, "9"])) is None
    assert wire.hello_protocol(msgspec.msgpack.encode([2, 9])) is None
    assert wire.hello_protocol(b"rubbish") is None
    assert wire.hello_protocol(b"") is None
