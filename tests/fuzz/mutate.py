"""Damages bytes: blindly, or by way of the MessagePack values that they hold."""

from __future__ import annotations

import random
from typing import Any

import msgspec

#: Values that often go unchecked.
_HOSTILE: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 15, 31, 32, 33, 35, 127, 255, 1 << 16, 1 << 31),
    *(1 << 32, (1 << 53) + 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -(1 << 31), -(1 << 63)),
    *(0.0, -0.0, 1e308, -1.5, float("nan"), float("inf"), float("-inf")),
    *("", "x", "cpu", "cuda:99", "\0", "é" * 50, "a" * 300, "w" * 5000),
    *(b"", b"\x00", b"\xff" * 9, b"\x90", b"b" * 70_000),
    *([], [[]], [0], [-1], [1 << 62], ["x"], [None] * 20, [[1, 2], 3], {}, {"x": 1}, {"a": "b"}),
    [[[[[[[[[[[[[]]]]]]]]]]]]],
]


class Mutator:
    """Damages samples.

    Args:
        chooser: Decides everything.
    """

    def __init__(self, chooser: random.Random) -> None:
        self._random = chooser
        self._values: dict[bytes, Any] = {}

    def mutate(self, sample: bytes, other: bytes = b"") -> bytes:
        """Returns a sample that was damaged.

        Args:
            sample: Valid bytes.
            other: Further ones, of which a part may get in.
        """
        draw = self._random
        if draw.random() < 0.5:
            damaged = self._by_value(sample)
            if damaged is not None:
                return damaged
        data = bytearray(sample)
        for _ in range(1 if draw.random() < 0.6 else draw.randint(2, 5)):
            self._by_byte(data, other)
        return bytes(data)

    def _by_byte(self, data: bytearray, other: bytes) -> None:
        draw = self._random
        start = draw.randrange(len(data) + 1)
        end = min(len(data), start + draw.choice((0, 1, 1, 1, 2, 4, 9)))
        way = draw.random()
        if way < 0.3 and start < len(data):
            data[start] ^= 1 << draw.randrange(8)
        elif way < 0.6:
            data[start:end] = draw.randbytes(draw.choice((0, 1, 1, 2, 4, 9)))
        elif way < 0.75:  # lengths and numbers of all sizes
            data[start:end] = bytes([draw.randrange(0xC0, 0xE0)]) + b"\xff" * draw.randrange(9)
        elif way < 0.85:
            del data[start:]
        elif way < 0.95 and other:
            cut = draw.randrange(len(other))
            data[start:end] = other[cut : cut + draw.randrange(1, 64)]
        else:
            data[start:start] = data[start : start + draw.randrange(1, 64)]

    def _by_value(self, sample: bytes) -> bytes | None:
        """Returns the sample with a value in it exchanged, or None if it holds no array."""
        if sample not in self._values:
            try:
                self._values[sample] = msgspec.msgpack.decode(sample)
            except msgspec.DecodeError:
                self._values[sample] = None
        value = self._values[sample]
        if not isinstance(value, list) or not value:
            return None
        try:
            return msgspec.msgpack.encode(self._exchanged(value))
        except RecursionError:  # pragma: no cover
            return None

    def _exchanged(self, value: list[Any]) -> list[Any]:
        draw = self._random
        result = list(value)
        position = draw.randrange(len(result))
        inner = result[position]
        way = draw.random()
        if way < 0.5 and isinstance(inner, list) and inner:
            result[position] = self._exchanged(inner)
        elif way < 0.85:
            result[position] = draw.choice(_HOSTILE)
        elif way < 0.9:
            del result[position]
        elif way < 0.95:
            result.insert(position, draw.choice(_HOSTILE))
        else:
            result[position:position] = [inner] * draw.choice((1, 2, 50))
        return result
