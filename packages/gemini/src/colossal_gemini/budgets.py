"""Numbers of bytes as people write them, ``"8GiB"``, and as they read them."""

from __future__ import annotations

import re

from colossal_core.errors import UsageError

__all__ = ["parse_bytes", "show_bytes"]

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "TIB": 1 << 40,
}
_PATTERN = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(value: object) -> int | None:
    """Return a number of bytes from an integer or from text such as ``"8GiB"`` or ``"500 MB"``.

    Args:
        value: What the user gave; None stays None.

    Raises:
        UsageError: It is neither, negative or zero.
    """
    if value is None:
        return None
    found: float | None = None
    if isinstance(value, int) and not isinstance(value, bool):
        found = value
    elif isinstance(value, str) and (match := _PATTERN.fullmatch(value)):
        unit = _UNITS.get(match[2].upper())
        found = None if unit is None else float(match[1]) * unit
    if found is None or found < 1:
        raise UsageError(
            f"a number of bytes is a positive integer or text such as '8GiB', got {value!r}",
            hint="units are KB, MB, GB, TB (powers of 1000) and KiB, MiB, GiB, TiB (powers of 1024)",
        )
    return int(found)


def show_bytes(value: int) -> str:
    """Return a number of bytes as people read it, with three digits: ``"1.25 GiB"``."""
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(value) >= size:
            return f"{value / size:.3g} {unit}" if value < 1000 * size else f"{value / size:.0f} {unit}"
    return f"{value} B"
