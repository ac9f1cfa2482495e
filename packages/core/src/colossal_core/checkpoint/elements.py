"""Numbers of stored elements without a library for arrays: how many differ, and by how much.

The one idea: the standard library can view bytes as integers and floats of most widths, its functions over
iterators run in C, and an integer of any length is a row of bits.
"""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Mapping, Sequence
from typing import Literal

__all__ = ["count_different", "find_largest_difference", "read_numbers"]

_INTEGERS: Mapping[str, Literal["B", "b", "H", "h", "I", "i", "Q", "q"]] = {
    "U8": "B",
    "I8": "b",
    "U16": "H",
    "I16": "h",
    "U32": "I",
    "I32": "i",
    "U64": "Q",
    "I64": "q",
}

_FLOATS: Mapping[str, Literal["f", "d"]] = {"F32": "f", "F64": "d", "C64": "f", "C128": "d"}


def count_different(a: memoryview, b: memoryview, item_bytes: int) -> int:
    """Return how many elements differ in their bits.

    Args:
        a: Bytes of some elements.
        b: As many bytes.
        item_bytes: Bytes of one element.
    """
    num_bytes = len(a)
    bits = (int.from_bytes(a, "little") ^ int.from_bytes(b, "little")).to_bytes(num_bytes, "little")
    # The bytes of an element, laid over each other: zero where all of them are.
    joined = 0
    for start in range(item_bytes):
        joined |= int.from_bytes(bits[start::item_bytes], "little")
    num_elements = num_bytes // item_bytes
    return num_elements - joined.to_bytes(num_elements, "little").count(0)


def find_largest_difference(a: memoryview, b: memoryview, dtype: str) -> float | None:
    """Return the largest ``|a - b|`` of elements; for complex ones, of their parts.

    Pairs with a NaN on one side have no difference and are left out.

    Args:
        a: Bytes of some elements, little-endian.
        b: As many bytes.
        dtype: Name of their type as in safetensors files.

    Returns:
        NaN when nothing is left; None for types that have no numbers here: booleans and 8-bit floats.
    """
    left, right = read_numbers(a, dtype), read_numbers(b, dtype)
    if left is None or right is None:
        return None
    if dtype in _INTEGERS:
        return float(max(map(abs, map(operator.sub, left, right)), default=0))
    differences = [*map(abs, map(operator.sub, left, right))]
    # A sum of values that are not negative is NaN only if one of them is.
    if not math.isnan(sum(differences)):
        return max(differences, default=0.0)
    kept = [abs(x - y) if x != y else 0.0 for x, y in zip(left, right, strict=True) if x == x and y == y]  # noqa: PLR0124
    return max(kept, default=math.nan)


def read_numbers(data: memoryview, dtype: str) -> Sequence[float] | None:
    """Return elements as numbers, those of complex ones in turn; None for a type that has none here.

    Args:
        data: Bytes of some elements, little-endian.
        dtype: Name of their type as in safetensors files.
    """
    if dtype in _INTEGERS:
        return data.cast(_INTEGERS[dtype])
    if dtype in _FLOATS:
        return data.cast(_FLOATS[dtype])
    if dtype == "F16":
        return struct.unpack(f"<{len(data) // 2}e", data)
    if dtype == "BF16":
        # A bfloat16 is the upper half of a float32.
        wide = bytearray(2 * len(data))
        memoryview(wide).cast("H")[1::2] = data.cast("H")
        return memoryview(wide).cast("f")
    return None
