"""Numbers as people read them."""

from __future__ import annotations


def seconds(value: float) -> str:
    """Returns a duration: ``"87 µs"``, ``"1.2 ms"``, ``"3.4 s"``, ``"2 h 5 min"``."""
    if value < 0.0009995:
        return f"{value * 1e6:.0f} µs"
    if value < 0.9995:
        return f"{value * 1e3:.3g} ms"
    if value < 59.95:
        return f"{value:.3g} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    return f"{hours // 24} d {hours % 24} h"


def size(value: float) -> str:
    """Returns bytes: ``"0 B"``, ``"1.5 KiB"``, ``"20 GiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} TiB"


def rate(value: float) -> str:
    """Returns a number a second, without a unit: ``"0"``, ``"0.4"``, ``"1,250"``."""
    if value < 9.95:
        return f"{value:.1f}".removesuffix(".0")
    return f"{value:,.0f}"


def count(value: float) -> str:
    """Returns a whole number."""
    return f"{int(value):,}"
