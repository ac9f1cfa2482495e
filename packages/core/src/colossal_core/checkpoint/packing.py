"""Plain Python values as JSON and back, without pickle: what schedulers, samplers and users want kept.

The one idea: JSON knows texts, numbers, lists and mappings with textual keys; every other kind that is data
and no behaviour gets a tag. What is behaviour (functions, objects of classes) is refused by its path, so a
checkpoint never runs code when it is read.
"""

from __future__ import annotations

import base64
import collections
import math
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from typing import Any

from attrs import frozen

from colossal_core.checkpoint.elements import read_numbers
from colossal_core.errors import CheckpointError, UsageError

__all__ = ["PackedArray", "is_leaf", "pack", "tell_packed", "unpack"]

TAG = "$kind"

_LONG_INTEGER_BITS = 4096
"""Longer integers are stored as hexadecimal text: Python refuses to read decimal numbers of 4300 digits."""

_SHOWN_BYTES = 32
"""Arrays up to this are shown by their numbers, longer ones by a checksum."""

Convert = Callable[[Any], Any]


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


def _keep(value: Any) -> Any:
    """Return a value as it is."""
    return value


def pack(value: Any, where: str, *, convert: Convert = _keep) -> Any:
    """Return a value that ``json.dumps(..., allow_nan=False)`` accepts.

    Subclasses become what they are made of: a named tuple a tuple, an ordered dictionary a dictionary, an
    enum of texts a text.

    Args:
        value: None, booleans, numbers, texts, bytes, paths, lists, tuples, deques, sets, mappings, and what
            ``convert`` makes of other objects, nested.
        where: What the value is, for messages.
        convert: Turns an object of another kind into one of these, a :class:`PackedArray` for example;
            returns what it does not know as it is.

    Raises:
        UsageError: Something is of another kind, or contains itself; names its path and type.
    """
    try:
        return _pack(value, where, convert)
    except RecursionError as err:
        raise UsageError(
            f"{where} is nested too deep for a checkpoint, or contains itself",
            hint="keep numbers, texts, lists, mappings and tensors that do not contain themselves",
        ) from err


def _pack(value: Any, where: str, convert: Convert) -> Any:
    """Pack what JSON has a form for, and leave the rest to tags."""
    value = convert(value)
    kind = type(value)
    if value is None or kind in {bool, str}:
        return value
    if kind is int and value.bit_length() <= _LONG_INTEGER_BITS:
        return value
    if kind is float and math.isfinite(value):
        return value
    if kind is list:
        return [_pack(item, f"{where}[{i}]", convert) for i, item in enumerate(value)]
    if kind is dict and all(type(key) is str for key in value) and TAG not in value:
        return {key: _pack(item, f"{where}[{key!r}]", convert) for key, item in value.items()}
    return _pack_tagged(value, where, convert)


def _pack_tagged(value: Any, where: str, convert: Convert) -> dict[str, Any] | bool | int | float | str:
    """Pack what JSON has no form for."""
    packed = _pack_container(value, where, convert)
    if packed is None:
        packed = _pack_leaf(value)
    if packed is not None:
        return packed
    # Subclasses of numbers and texts (numpy.float64, enums of texts) are kept as the plain value.
    for plain in (int, float, str):
        if isinstance(value, plain) and type(value) is not plain:
            result: int | float | str = _pack(plain(value), where, _keep)
            return result
    raise UsageError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot keep: "
        "it stores data, never objects that would run code when they are loaded",
        hint="keep numbers, texts, lists, mappings and tensors, for example the object's state_dict()",
    )


def _pack_leaf(value: Any) -> dict[str, Any] | None:
    """Pack a value that holds no others, or return None for one of another kind."""
    packed: dict[str, Any] | None = None
    if isinstance(value, PackedArray):
        data = base64.b64encode(value.data).decode()
        array = {"library": value.library, "dtype": value.dtype, "shape": [*value.shape], "data": data}
        packed = {TAG: "array", **array}
    elif isinstance(value, bytes | bytearray):
        name = "bytes" if isinstance(value, bytes) else "bytearray"
        packed = {TAG: name, "value": base64.b64encode(value).decode()}
    elif type(value) is float:
        packed = {TAG: "float", "value": repr(value)}
    elif type(value) is int:
        packed = {TAG: "int", "value": hex(value)}
    elif isinstance(value, complex):
        packed = {TAG: "complex", "value": [repr(float(value.real)), repr(float(value.imag))]}
    elif isinstance(value, PurePath):
        packed = {TAG: "path", "value": str(value)}
    return packed


_CONTAINERS: Mapping[type[Any], str] = {
    tuple: "tuple",
    set: "set",
    frozenset: "frozenset",
    collections.deque: "deque",
    list: "list",
}


def _pack_container(value: Any, where: str, convert: Convert) -> dict[str, Any] | None:
    """Pack a value that holds others, or return None for one of another kind."""
    # A named tuple loses its names: its class cannot be found again without running foreign code.
    for kind, name in _CONTAINERS.items():
        if isinstance(value, kind):
            items = sorted(value, key=repr) if name in {"set", "frozenset"} else value
            packed = {
                TAG: name,
                "items": [_pack(item, f"{where}[{i}]", convert) for i, item in enumerate(items)],
            }
            return {**packed, "maxlen": value.maxlen} if name == "deque" else packed
    if isinstance(value, Mapping):
        name = "counter" if isinstance(value, collections.Counter) else "mapping"
        pairs = [
            [_pack(key, f"{where} key", convert), _pack(item, f"{where}[{key!r}]", convert)]
            for key, item in value.items()
        ]
        return {TAG: name, "items": pairs}
    return None


def unpack(value: Any, *, revert: Callable[[PackedArray], Any] = _keep) -> Any:
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
        return _UNPACKERS[value[TAG]](value, lambda item: unpack(item, revert=revert), revert)
    except (KeyError, TypeError, ValueError, IndexError) as err:
        raise CheckpointError(
            f"a stored value of kind {value.get(TAG)!r} is malformed: {err!r}",
            hint="the manifest was changed by hand, or written by a newer version of colossal-core",
        ) from err


def is_leaf(packed: Any) -> bool:
    """Say whether a packed value is one whole: no list or mapping, also none with a tag."""
    if isinstance(packed, dict):
        return TAG in packed and "items" not in packed
    return not isinstance(packed, list)


def tell_packed(packed: Any) -> str:
    """Return a packed value as a short text for people, without making what it stands for."""
    if not isinstance(packed, dict) or TAG not in packed:
        return repr(packed)
    try:
        if packed[TAG] == "array":
            data = base64.b64decode(packed["data"])
            numbers = read_numbers(memoryview(data), packed["dtype"]) if len(data) <= _SHOWN_BYTES else None
            shown = f"checksum {zlib.crc32(data):08x}" if numbers is None else f"{[*numbers]}"
            return f"{packed['dtype']} {packed['shape']}: {shown}"
        value = packed["value"] if "value" in packed else packed["items"]
    except (KeyError, TypeError, ValueError):
        return repr(packed)
    return str(value) if packed[TAG] == "float" else f"{packed[TAG]} {value!r}"


_Unpacker = Callable[[dict[str, Any], Convert, Convert], Any]


def _unpack_items(make: Callable[[list[Any]], Any]) -> _Unpacker:
    """Return what makes a container of a stored list."""
    return lambda value, inner, _revert: make([inner(item) for item in value["items"]])


def _unpack_pairs(make: Callable[[dict[Any, Any]], Any]) -> _Unpacker:
    """Return what makes a mapping of stored pairs."""
    return lambda value, inner, _revert: make({inner(key): inner(item) for key, item in value["items"]})


def _unpack_array(value: dict[str, Any], _inner: Convert, revert: Convert) -> Any:
    """Make an array of its bytes."""
    data = base64.b64decode(value["data"], validate=True)
    return revert(PackedArray(value["library"], value["dtype"], tuple(value["shape"]), data))


_UNPACKERS: Mapping[str, _Unpacker] = {
    "float": lambda value, _inner, _revert: float(value["value"]),
    "int": lambda value, _inner, _revert: int(value["value"], 16),
    "complex": lambda value, _inner, _revert: complex(float(value["value"][0]), float(value["value"][1])),
    "bytes": lambda value, _inner, _revert: base64.b64decode(value["value"], validate=True),
    "bytearray": lambda value, _inner, _revert: bytearray(base64.b64decode(value["value"], validate=True)),
    "path": lambda value, _inner, _revert: Path(value["value"]),
    "tuple": _unpack_items(tuple),
    "set": _unpack_items(set),
    "frozenset": _unpack_items(frozenset),
    "list": _unpack_items(list),
    "deque": lambda value, inner, _revert: collections.deque(map(inner, value["items"]), value["maxlen"]),
    "mapping": _unpack_pairs(dict),
    "counter": _unpack_pairs(collections.Counter),
    "array": _unpack_array,
}
