"""TCP links that can be cut, silenced, slowed down and chopped up.

Each peer dials the broker through a link of its own.  All of them are served by one thread.
"""

from __future__ import annotations

import asyncio
import random
import threading
from contextlib import suppress
from types import TracebackType

_READ = 1 << 18


class Link:
    """One peer's way to the broker: listens on a port of its own and passes bytes on.

    A silent link holds what it is given, as a network does that loses packets which TCP sends
    again: what was under way arrives when the link heals, unless an end has given up before.

    Args:
        target: The broker's port.
        random: Chooses the sizes of fragments.
    """

    def __init__(self, target: int, random: random.Random) -> None:
        self.port = 0
        self._target = target
        self._random = random
        self._whole = True
        self._delay = 0.0
        self._piece = 0
        self._open = asyncio.Event()
        self._open.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        self.set(whole=False)
        # The connections' tasks end by themselves once their sockets have.
        while self._writers:
            await asyncio.sleep(0.001)

    def set(
        self,
        *,
        whole: bool = True,
        silent: bool = False,
        delay: float = 0.0,
        piece: int = 0,
    ) -> None:
        """Changes what the link does; what is not given becomes as in a healthy link.

        Args:
            whole: Whether it lets connections through; if not, those that stand are reset.
            silent: Whether it holds all bytes.
            delay: Seconds that everything takes longer.
            piece: Largest number of bytes that are passed on at a time; 0 is no limit.
        """
        self._whole, self._delay, self._piece = whole, delay, piece
        if not whole:
            for writer in self._writers:
                writer.transport.abort()
        if silent and whole:
            self._open.clear()
        else:
            self._open.set()

    async def _accept(self, near: asyncio.StreamReader, near_out: asyncio.StreamWriter) -> None:
        self._writers.add(near_out)
        far_out: asyncio.StreamWriter | None = None
        try:
            await self._open.wait()
            if self._whole:
                far, far_out = await asyncio.open_connection("127.0.0.1", self._target)
                self._writers.add(far_out)
                await asyncio.gather(self._pass_on(near, far_out), self._pass_on(far, near_out))
        except OSError:  # the broker is not there, or an end has gone
            pass
        finally:
            for writer in (near_out, far_out):
                if writer is not None:
                    writer.transport.abort()
                    self._writers.discard(writer)

    async def _pass_on(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while data := await source.read(_READ):
            await self._open.wait()
            if self._delay:
                await asyncio.sleep(self._delay)
            for part in self._parts(data):
                target.write(part)
                await target.drain()
                if self._piece:
                    await asyncio.sleep(0)
        await self._open.wait()
        raise ConnectionResetError  # one end has closed: so does the other

    def _parts(self, data: bytes) -> list[bytes]:
        parts: list[bytes] = []
        while self._piece and len(data) > self._piece and len(parts) < 1000:
            size = self._random.randint(1, self._piece)
            parts.append(data[:size])
            data = data[size:]
        return [*parts, data]


class Network:
    """Links to one broker, by name; for any thread.

    Args:
        target: The broker's port.
        names: Names of the links.
        seed: For the sizes of fragments.
    """

    def __init__(self, target: int, names: list[str], seed: int = 0) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="chaos-network")
        chooser = random.Random(seed)
        self._links = {name: Link(target, chooser) for name in names}

    def __enter__(self) -> Network:
        self._thread.start()
        for link in self._links.values():
            self._run(link.start())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for link in self._links.values():
            with suppress(TimeoutError):
                self._run(link.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def address(self, name: str) -> str:
        """Returns the broker's address as the peer of that name is to know it."""
        return f"tcp://127.0.0.1:{self._links[name].port}"

    def set(self, name: str, **state: object) -> None:
        """Changes a link; see ``Link.set``. Without a state it heals."""

        async def change() -> None:
            self._links[name].set(**state)  # type: ignore[arg-type]

        self._run(change())

    def _run(self, coroutine: object) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)  # type: ignore[arg-type]
