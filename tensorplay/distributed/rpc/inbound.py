"""Requests and replies as they come in, put together from their chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tensorplay.errors import MessageTooLargeError, ProtocolError
from tensorplay.protocol.calls import Reply, Request, decode_reply, decode_request
from tensorplay.protocol.chunks import Assembler, decode_position
from tensorplay.protocol.messages import Kind, Route

Frame = bytes | memoryview


@dataclass(slots=True)
class Message:
    """A complete request or reply.

    Attributes:
        route: Where it came from, and its id.
        header: A ``Request`` or a ``Reply``.
        frames: The payload.
        credit: Bytes that the sender is to be told of when they have been dealt with.
    """

    route: Route
    header: Request | Reply
    frames: Sequence[Frame]
    credit: int = 0


def too_large(what: str, size: int, limit: int) -> MessageTooLargeError:
    """Returns the error of a message that the broker would not route."""
    return MessageTooLargeError(
        f"the {what} has {size} bytes, but the broker routes at most {limit} "
        "(its option --max-message-bytes)"
    )


class Inbound:
    """Collects chunks until a request or reply is complete.

    Args:
        allocate: Gives a writable buffer of so many bytes.
        consumed: Grants a sender credit for so many bytes.
        window: Bytes that may be under way from one sender.
    """

    def __init__(
        self,
        allocate: Callable[[int], memoryview],
        consumed: Callable[[int, int], None],
        window: int,
    ) -> None:
        self._allocate = allocate
        self._consumed = consumed
        self._window = window
        self._partial: dict[tuple[int, int, int], tuple[Message, Assembler]] = {}
        self.max_bytes: int | None = None

    def feed(self, route: Route, frames: Sequence[Frame]) -> Message | None:
        """Takes a REQUEST, REPLY or CHUNK and returns what is complete with it.

        Raises:
            ProtocolError: If the message is malformed or out of order.
            MemoryError: If there is no room for what is announced.
        """
        if not frames:
            raise ProtocolError(f"a message of kind {route.kind} has no second frame")
        if route.kind == Kind.CHUNK:
            return self._chunk(route, frames)
        header: Request | Reply
        header = (
            decode_request(frames[0]) if route.kind == Kind.REQUEST else decode_reply(frames[0])
        )
        message = Message(route, header, frames[1:], route.size)
        if not header.sizes:
            return message
        total = sum(header.sizes)
        if total != route.size or (self.max_bytes is not None and total > self.max_bytes):
            raise ProtocolError(f"a payload of {total} bytes is announced as {route.size}")
        try:
            assembler = Assembler(header.sizes, self._allocate)
        except (OSError, RuntimeError) as error:  # torch's and the kernel's word for it
            raise MemoryError(f"there is no memory for {total} bytes: {error}") from error
        self._partial[route.src, route.kind, route.id] = (message, assembler)
        return None

    def cancel(self, src: int, id: int) -> Message | None:
        """Gives up a request of which not all has come, and returns it if there is one."""
        partial = self._partial.pop((src, Kind.REQUEST, id), None)
        return None if partial is None else partial[0]

    def progress(self, src: int, id: int) -> tuple[int, int]:
        """Returns how many bytes of a reply have come in chunks, and of how many."""
        partial = self._partial.get((src, Kind.REPLY, id))
        return (0, 0) if partial is None else (partial[1].received, partial[1].total)

    def drop(self, src: int) -> None:
        """Forgets what has come of messages of a peer that is gone."""
        for key in [key for key in self._partial if key[0] == src]:
            del self._partial[key]

    def _chunk(self, route: Route, frames: Sequence[Frame]) -> Message | None:
        position = decode_position(frames[0])
        key = (route.src, position.kind, route.id)
        if key not in self._partial:  # begun before this process lost or forgot it
            self._consumed(route.src, route.size)
            return None
        message, assembler = self._partial[key]
        try:
            size = assembler.add(position.offset, [memoryview(frame) for frame in frames[1:]])
        except ProtocolError:
            del self._partial[key]
            raise
        # A message that fills the window could never be complete if its credit waited
        # for it.
        if assembler.total > self._window // 2:
            self._consumed(route.src, size)
            message.credit = 0
        if not assembler.complete:
            return None
        del self._partial[key]
        message.frames = assembler.frames
        return message
