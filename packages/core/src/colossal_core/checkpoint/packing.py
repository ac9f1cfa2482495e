"""Plain Python values as JSON and back, without pickle: what schedulers, samplers and users want kept.

The one idea: JSON knows texts, numbers, lists and mappings with textual keys; every other kind that is data and
no behaviour gets a tag. What is behaviour (functions, objects of classes) is refused by its path, so a
checkpoint never runs code when it is read.
"""

from __future__ import annotations

import base64
import collections
import math
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any

from attrs import frozen

from colossal_core.errors import CheckpointError, UsageError

__all__ = ["PackedArray", "pack", "unpack"]

TAG = "$kind"


@frozen
class PackedArray:
    """A small array as bytes; whoever knows its library makes it and takes it apart.

    Attributes:
        library: ``"torch"`` or ``"numpy"``.
        dtype: Name of the element type in that library.
        shape: Shape.
        data: Elements in row-major order, little-endian.
    """

    library: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes


def pack(value: Any, where: str, *, convert: Callable[[Any], Any] = lambda value: value) -> Any:
    """Return a value that ``json.dumps(..., allow_nan=False)`` accepts.

    Args:
        value: None, booleans, numbers, texts, bytes, lists, tuples, sets, mappings, and what ``convert`` makes of
            other objects, nested.
        where: What the value is, for messages.
        convert: Turns an object of another kind into one of these, a :class:`PackedArray` for example; returns
            what it does not know as it is.

    Raises:
        UsageError: Something is of another kind; names its path and type.
    """
    value = convert(value)
    if value is None or type(value) in {bool, int, str}:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {TAG: "float", "value": repr(value)}
    if type(value) is list:
        return [pack(item, f"{where}[{i}]", convert=convert) for i, item in enumerate(value)]
    if type(value) is dict and all(type(key) is str for key in value) and TAG not in value:
        return {key: pack(item, f"{where}[{key!r}]", convert=convert) for key, item in value.items()}
    return _pack_tagged(value, where, convert)


def _pack_tagged(value: Any, where: str, convert: Callable[[Any], Any]) -> Any:
    """Pack what JSON has no form for."""
    if isinstance(value, PackedArray):
        data = base64.b64encode(value.data).decode()
        return {
            TAG: "array",
            "library": value.library,
            "dtype": value.dtype,
            "shape": [*value.shape],
            "data": data,
        }
    if isinstance(value, bytes | bytearray):
        return {TAG: "bytes", "value": base64.b64encode(value).decode()}
    if type(value) is complex:
        return {TAG: "complex", "value": [repr(value.real), repr(value.imag)]}
    if isinstance(value, PurePath):
        return {TAG: "path", "value": str(value)}
    # A named tuple loses its names: its class cannot be found again without running foreign code.
    kinds = {tuple: "tuple", set: "set", frozenset: "frozenset", collections.deque: "deque", list: "list"}
    for kind, name in kinds.items():
        if isinstance(value, kind):
            items = sorted(value, key=repr) if name in {"set", "frozenset"} else value
            return {
                TAG: name,
                "items": [pack(item, f"{where}[{i}]", convert=convert) for i, item in enumerate(items)],
            }
    if isinstance(value, Mapping):
        name = "counter" if isinstance(value, collections.Counter) else "mapping"
        items = [
            [pack(key, f"{where} key", convert=convert), pack(item, f"{where}[{key!r}]", convert=convert)]
            for key, item in value.items()
        ]
        return {TAG: name, "items": items}
    # Subclasses of numbers and texts (numpy.float64, enums of texts) are kept as the plain value.
    for plain in (bool, int, float, str):
        if isinstance(value, plain):
            return pack(plain(value), where)
    raise UsageError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot keep: "
        "it stores data, never objects that would run code when they are loaded",
        hint="keep numbers, texts, lists, mappings and tensors, for example the object's state_dict()",
    )


def unpack(value: Any, *, revert: Callable[[PackedArray], Any] = lambda array: array) -> Any:
    """Return what :func:`pack` was given.

    Args:
        value: What JSON gave.
        revert: Makes an object of a :class:`PackedArray`.

    Raises:
        CheckpointError: A tag is unknown or its content is not what the tag says.
    """
    if isinstance(value, list):
        return [unpack(item, revert=revert) for item in value]
    if not isinstance(value, dict):
        return value
    if TAG not in value:
        return {key: unpack(item, revert=revert) for key, item in value.items()}
    try:
        return _unpack_tagged(value, revert)
    except (KeyError, TypeError, ValueError) as err:
        raise CheckpointError(
            f"a stored value of kind {value.get(TAG)!r} is malformed: {err!r}",
            hint="the manifest was changed by hand, or written by a newer version of colossal-core",
        ) from err


_SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": collections.deque,
    "list": list,
}


def _unpack_tagged(value: dict[str, Any], revert: Callable[[PackedArray], Any]) -> Any:
    """Unpack what carries a tag."""
    kind = value[TAG]
    if kind == "float":
        return float(value["value"])
    if kind == "complex":
        return complex(float(value["value"][0]), float(value["value"][1]))
    if kind == "bytes":
        return base64.b64decode(value["value"], validate=True)
    if kind == "path":
        return str(value["value"])
    if kind in _SEQUENCES:
        return _SEQUENCES[kind]([unpack(item, revert=revert) for item in value["items"]])
    if kind in {"mapping", "counter"}:
        pairs = {unpack(key, revert=revert): unpack(item, revert=revert) for key, item in value["items"]}
        return collections.Counter(pairs) if kind == "counter" else pairs
    if kind == "array":
        data = base64.b64decode(value["data"], validate=True)
        return revert(PackedArray(value["library"], value["dtype"], tuple(value["shape"]), data))
    raise ValueError(kind)
