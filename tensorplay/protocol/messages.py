"""The messages of the protocol, one frozen struct each.

A ZeroMQ message between a peer (worker or client) and the broker is::

    [header]                                  control: peer <-> broker
    [Route header] [frame] [frame] ...        routed: peer -> broker -> peer

The broker's ROUTER socket adds and strips the peer's identity in front.  Every
header is a MessagePack array whose first element is the ``Kind``; it never has more
than 15 elements, so the kind is always the second byte of the header.  The broker
decodes the header alone; the frames behind a ``Route`` are opaque to it.

Peers are addressed by *incarnation*: a random 63-bit number that a process draws when
it joins.  A message for an incarnation that is gone can never reach its successor.
"""

from __future__ import annotations

from enum import IntEnum

import msgspec

#: Raised when a change would make an old peer misread a new one, or the reverse.
PROTOCOL_VERSION = 1

#: Namespace of peers that name none.
DEFAULT_NAMESPACE = "default"

#: Peers without a rank have negative ids in ``WorkerInfo``; the first one gets this.
#: (-1 in a HELLO asks for no rank.)
FIRST_RANKLESS_ID = -2

#: A frame is never larger than this: larger payloads are cut into CHUNK messages.
CHUNK_BYTES = 1 << 20


class Kind(IntEnum):
    """First element of every header."""

    # Control, between a peer and the broker.
    HELLO = 1  # peer -> broker: register me
    WELCOME = 2  # broker -> peer: you are registered
    REFUSED = 3  # broker -> peer: you are not, and why
    ROSTER = 4  # broker -> peer: who came, who went
    HEARTBEAT = 5  # both ways
    GOODBYE = 6  # peer -> broker: I leave
    FAREWELL = 7  # broker -> peer: you have left
    STRANGER = 8  # broker -> peer: I do not know you, register (again)
    UNDELIVERABLE = 9  # broker -> peer: your message reached nobody, and why
    STATUS_REQUEST = 10  # anybody -> broker
    STATUS = 11  # broker -> asker
    ASK = 12  # an operator -> broker -> peer, or anybody -> broker: a question or an order
    ANSWER = 13  # the way back

    # Routed, between peers: everything from here on has a Route header.
    REQUEST = 32  # run this
    REPLY = 33  # its result, or its exception
    CHUNK = 34  # a piece of a large request or reply
    CREDIT = 35  # what of yours has arrived, and how many bytes of it have been consumed
    CANCEL = 36  # the caller no longer wants the result of that request
    SYNC = 37  # answer with a CREDIT: something of mine may have been lost
    BATCH = 38  # several small requests, replies and cancels in one message
    VOID = 39  # takes the place of a message that was given up


FIRST_ROUTED_KIND = Kind.REQUEST


class Role(IntEnum):
    """What a peer is for: decides whether it is given a rank it did not ask for."""

    WORKER = 1  # gets the lowest free rank
    CLIENT = 2  # gets none unless it asks


class PeerInfo(msgspec.Struct, frozen=True, array_like=True):
    """What everybody in a namespace knows of a peer.

    Attributes:
        name: Unique among the live peers of the namespace.
        id: The rank (>= 0), or a negative number unique in the namespace.
        incarnation: The peer's address on the wire.
        role: WORKER or CLIENT.
        host: Host name as the peer reports it; for people, never for connecting.
        pid: Process id on that host.
        device: Default device of what is placed there, such as ``"cpu"``.
        versions: ``{"tensorplay": ..., "python": ..., "torch": ...}``.
        calls: Whether its key lets it call others.
        serves: Whether its key lets others call it.
    """

    name: str
    id: int
    incarnation: int
    role: Role = Role.CLIENT
    host: str = ""
    pid: int = 0
    device: str = "cpu"
    versions: dict[str, str] = {}
    calls: bool = True
    serves: bool = True


class Departure(msgspec.Struct, frozen=True, array_like=True):
    """A peer that is no longer registered.

    Attributes:
        peer: The peer as it was known.
        clean: True if it said GOODBYE, False if it died or went silent.
        reason: One sentence for people, such as ``"silent for 5.0 s"``.
    """

    peer: PeerInfo
    clean: bool
    reason: str


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=int(Kind.HELLO)):
    """Register the sender.  ``protocol`` stays the first field for ever.

    Attributes:
        rank: The rank asked for, or -1 for none; below it, the id that the peer had before.
        world_size: Size of a fixed world, or 0 for an elastic one.
    """

    protocol: int
    name: str
    namespace: str
    incarnation: int
    role: Role
    rank: int = -1
    world_size: int = 0
    host: str = ""
    pid: int = 0
    device: str = "cpu"
    versions: dict[str, str] = {}


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=int(Kind.WELCOME)):
    """The sender of a HELLO is registered as ``peer``.

    Attributes:
        broker: Incarnation of the broker: a change means that it was restarted.
        roster: All live peers of the namespace, the new one included.
        heartbeat_interval: Seconds between two heartbeats, both ways.
        heartbeat_timeout: Seconds of silence after which the other side is lost.
        max_message_bytes: Largest request or reply that is routed, in bytes.
        warnings: Version differences that matter little, one sentence each.
    """

    protocol: int
    broker: int
    peer: PeerInfo
    roster: list[PeerInfo]
    heartbeat_interval: float
    heartbeat_timeout: float
    max_message_bytes: int
    versions: dict[str, str] = {}
    warnings: list[str] = []


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=int(Kind.REFUSED)):
    """The sender of a HELLO is not registered.

    Attributes:
        code: For programs: ``"name-taken"``, ``"rank-taken"``, ``"protocol"``, ``"version"``,
            ``"world-size"``, ``"invalid"``, ``"full"``, ``"key"``.
        text: For people: what was wrong, what was expected, what to do.
    """

    protocol: int
    code: str
    text: str


class Roster(msgspec.Struct, frozen=True, array_like=True, tag=int(Kind.ROSTER)):
    """Changes among the peers of the receiver's namespace.

    Attributes:
        joined: Who has come.
        left: Who has gone.
        refused: Why members of the receiver's fixed world were refused: it waits in vain.
    """

    joined: list[PeerInfo] = []
    left: list[Departure] = []
    refused: list[str] = []


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, tag=int(Kind.HEARTBEAT)):
    """A sign of life.

    Attributes:
        sent: The sender's monotonic clock, in seconds.
        stats: What a peer tells of itself, for the broker's status: counts by name.
        errors: Calls that failed at the peer since its last heartbeat, one sentence each.
    """

    sent: float
    stats: dict[str, float] = {}
    errors: list[str] = []


class Goodbye(msgspec.Struct, frozen=True, array_like=True, tag=int(Kind.GOODBYE)):
    """The sender leaves; its name and rank are free at once."""

    reason: str = "left"


class Farewell(msgspec.Struct, frozen=True, array_like=True, tag=int(Kind.FAREWELL)):
    """Answer to GOODBYE: nothing more will be delivered."""


class Stranger(msgspec.Struct, frozen=True, array_like=True, tag=int(Kind.STRANGER)):
    """The broker does not know the sender (it restarted, or removed it): say HELLO."""

    reason: str = ""


class Undeliverable(msgspec.Struct, frozen=True, array_like=True, tag=int(Kind.UNDELIVERABLE)):
    """A routed message of the receiver's went nowhere.

    Attributes:
        kind: Kind of the message.
        dst: Incarnation it was addressed to.
        id: Its id.
        code: ``"gone"``, ``"away"``, ``"full"``, ``"too-large"`` or ``"malformed"``.
        text: One sentence for people.
    """

    kind: int
    dst: int
    id: int
    code: str
    text: str


class StatusRequest(msgspec.Struct, frozen=True, array_like=True, tag=int(Kind.STATUS_REQUEST)):
    """Ask the broker how it is; needs no registration."""

    protocol: int = PROTOCOL_VERSION


class Status(msgspec.Struct, frozen=True, array_like=True, tag=int(Kind.STATUS)):
    """The broker's answer, as JSON so that it can grow without a protocol change."""

    json: bytes


class Ask(msgspec.Struct, frozen=True, array_like=True, tag=int(Kind.ASK)):
    """A question or an order of an operator, to a peer by way of the broker, or to the broker.

    Attributes:
        id: Drawn by the sender, repeated by the answer. The broker draws one of its own for
            what it passes on.
        what: ``"time"``, ``"ping"``, ``"logs"``, ``"drain"``, ``"kill"``.
        name: The peer; empty for the broker itself.
        namespace: The peer's namespace.
        json: What else there is to say, an object.
    """

    id: int
    what: str
    name: str = ""
    namespace: str = DEFAULT_NAMESPACE
    json: bytes = b"{}"


class Answer(msgspec.Struct, frozen=True, array_like=True, tag=int(Kind.ANSWER)):
    """The answer to an ``Ask``.

    Attributes:
        id: That of the question.
        json: The answer, an object.
        error: Why there is none, for people; empty if there is one.
    """

    id: int
    json: bytes = b"{}"
    error: str = ""


Control = (
    Hello
    | Welcome
    | Refused
    | Roster
    | Heartbeat
    | Goodbye
    | Farewell
    | Stranger
    | Undeliverable
    | StatusRequest
    | Status
    | Ask
    | Answer
)


class Route(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Header of every message that the broker passes on.

    Attributes:
        kind: A routed kind.
        dst: Incarnation of the receiver.
        src: Incarnation of the sender; the broker drops a message that lies about it.
        id: Number of the request, drawn by the caller; a reply, chunk or cancel repeats it.
            Of a SYNC the last ``seq`` that was sent, which its CREDIT repeats.
        size: Payload bytes of the whole request or reply, those in chunks included.
            Of a CREDIT the bytes consumed since the sender and receiver first met.
        seq: Number of the message among those from ``src`` to ``dst``; 0 for SYNC and CREDIT.
        ack: The last ``seq`` from ``dst`` that has arrived at ``src``.
        life: How often ``src`` and ``dst`` have given up each other before.
    """

    kind: int
    dst: int
    src: int
    id: int
    size: int = 0
    seq: int = 0
    ack: int = 0
    life: int = 0
