"""Values that checkpoints keep beside tensors: what comes back, and what is refused."""

from __future__ import annotations

import collections
import enum
import functools
import json
import math
import zlib
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossal_core.checkpoint.packing import PackedArray, is_leaf, pack, tell_packed, unpack
from colossal_core.errors import CheckpointError, UsageError

_leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text()
    | st.binary()
    | st.binary().map(bytearray)
)
_keys = st.none() | st.integers() | st.text() | st.binary() | st.tuples(st.integers(), st.text())
_values: st.SearchStrategy[Any] = st.recursive(
    _leaves,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text(), inner)
        | st.dictionaries(_keys, inner)
        | st.sets(_keys)
        | st.frozensets(_keys)
        | st.lists(inner, max_size=3).map(functools.partial(collections.deque, maxlen=3))
    ),
    max_leaves=12,
)


class _Point(NamedTuple):
    """A tuple with names."""

    x: int
    y: int


class _Colour(enum.StrEnum):
    """Texts with names."""

    RED = "red"


class _Thing:
    """Behaviour."""


def _through_json(value: Any, **options: Any) -> Any:
    """Return what comes back from the text of a manifest."""
    return unpack(json.loads(json.dumps(pack(value, "extra"), allow_nan=False)), **options)


def _types(value: Any) -> Any:
    """Return a value with the types of all that is in it."""
    if isinstance(value, dict):
        return type(value), [(_types(key), _types(item)) for key, item in value.items()]
    if isinstance(value, list | tuple | collections.deque):
        return type(value), [_types(item) for item in value]
    return type(value), repr(value) if not isinstance(value, set | frozenset) else value


@given(_values)
def test_data_comes_back_as_it_was(value: Any) -> None:
    """Values, types and the order of mappings, however nested."""
    found = _through_json(value)

    assert _types(found) == _types(value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -0.0, complex(math.nan, -0.0)])
def test_floats_beyond_json_come_back(value: complex) -> None:
    """JSON has no word for them."""
    assert repr(_through_json(value)) == repr(value)


def test_what_has_no_tag_of_its_own_becomes_what_it_is_made_of() -> None:
    """A class is never looked up when a checkpoint is read."""
    value = {
        "point": _Point(1, 2),
        "colour": _Colour.RED,
        "ordered": collections.OrderedDict(b=1, a=2),
        "count": collections.Counter("aab"),
        "path": PurePosixPath("data/x.bin"),
        "long": -(10**6000),
        "$kind": "float",
        "deque": collections.deque([1, 2], maxlen=5),
    }

    found = _through_json(value)

    assert found == {**value, "point": (1, 2), "colour": "red", "path": Path("data/x.bin")}
    assert type(found["point"]) is tuple
    assert type(found["colour"]) is str
    assert found["count"].most_common(1) == [("a", 2)]
    assert found["deque"].maxlen == 5
    assert [*found["ordered"]] == ["b", "a"]


def test_arrays_are_made_and_taken_apart_by_who_knows_them() -> None:
    """The format knows their bytes only."""

    def convert(value: Any) -> Any:
        return PackedArray("torch", "F32", (2,), b"\0" * 8) if isinstance(value, _Thing) else value

    packed = json.loads(json.dumps(pack([_Thing()], "extra", convert=convert)))
    found = unpack(packed, revert=lambda array: (array.library, array.dtype, array.shape, len(array.data)))

    assert found == [("torch", "F32", (2,), 8)]


def test_behaviour_is_refused_by_its_path() -> None:
    """Loading an object of a class would mean running its code."""
    for value, path in (
        ({"a": [1, {"b": _Thing()}]}, "extra['a'][1]['b']"),
        ((lambda: 1,), "extra[0]"),
        ({_Thing(): 1}, "extra key"),
        (print, "extra"),
        (_Thing, "extra"),
    ):
        with pytest.raises(UsageError, match="never objects") as caught:
            pack(value, "extra")

        assert caught.value.message.startswith(f"{path} is a ")


def test_a_value_that_contains_itself_is_refused() -> None:
    """It would have no end."""
    value: list[Any] = []
    value.append(value)

    with pytest.raises(UsageError, match="contains itself"):
        pack(value, "extra")


@pytest.mark.parametrize(
    "stored",
    [
        {"$kind": "pickle", "value": "gASVBQAAAAAAAAB9lC4="},
        {"$kind": "set", "items": [[1]]},
        {"$kind": "bytes", "value": "not base64!"},
        {"$kind": "complex", "value": ["1"]},
        {"$kind": "mapping", "items": [1]},
        {"$kind": ["float"], "value": "1"},
        {"$kind": "array"},
    ],
)
def test_a_tag_that_does_not_fit_is_an_error_of_ours(stored: Any) -> None:
    """Also inside of something."""
    with pytest.raises(CheckpointError, match="malformed"):
        unpack({"a": [stored]})


def test_packed_values_are_told_without_being_made() -> None:
    """For people who look into a manifest."""
    small = PackedArray("torch", "F32", (), b"\0\0\x40\x40")
    large = PackedArray("torch", "F32", (25,), bytes(100))

    texts = [tell_packed(pack(value, "x")) for value in (1.5, math.inf, small, large, (1, 2))]

    checksum = zlib.crc32(bytes(100))
    assert texts == ["1.5", "inf", "F32 []: [3.0]", f"F32 [25]: checksum {checksum:08x}", "tuple [1, 2]"]
    assert tell_packed({"$kind": "array", "data": "?"}).startswith("{")
    assert [is_leaf(pack(value, "x")) for value in (1.5, small, (1,), [1])] == [True, True, False, False]
