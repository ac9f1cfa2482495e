"""Comparing two checkpoints, whatever plans wrote them: what is only in one, and what differs by how much.

The one idea: tensors are read from their first element to their last, so how they were cut plays no part.
Bytes are compared first, and numbers are worked out only where those differ.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import field, frozen

from colossal_core.checkpoint.directory import read_manifest
from colossal_core.checkpoint.elements import count_different, find_largest_difference
from colossal_core.checkpoint.manifest import Manifest, ObjectRecord, TensorRecord
from colossal_core.checkpoint.packing import is_leaf, tell_packed
from colossal_core.checkpoint.reading import BlockReader
from colossal_core.checkpoint.streaming import read_in_order

__all__ = ["Difference", "FieldDifference", "FormDifference", "ValueDifference", "diff"]

_CHUNK_BYTES = 64 << 10
"""Bytes that are compared at once; numbers are worked out for chunks that differ only."""

_MARK = re.compile(r"-[0-9a-f]{12}(?=\.json$)")
_MOST_TEXT = 60


@frozen(kw_only=True)
class FieldDifference:
    """A value beside the tensors that is not the same.

    Attributes:
        path: What it is: ``"step"``, ``"optimizer: groups[0].settings.lr"``.
        a: Its text in the first, shortened; ``"-"`` where it is missing.
        b: In the second.
    """

    path: str
    a: str
    b: str


@frozen(kw_only=True)
class FormDifference:
    """A tensor that has another shape or type.

    Attributes:
        tensor: ``OBJECT: NAME``.
        a: Type and shape in the first.
        b: In the second.
    """

    tensor: str
    a: str
    b: str


@frozen(kw_only=True)
class ValueDifference:
    """A tensor with elements that differ in their bits.

    Attributes:
        tensor: ``OBJECT: NAME``.
        num_different: Elements that differ.
        num_elements: Elements of the tensor.
        first: Index of the first one that differs.
        largest: Largest ``|a - b|``; NaN where all of them have a NaN on one side; None for types without
            numbers here (booleans, 8-bit floats).
    """

    tensor: str
    num_different: int
    num_elements: int
    first: tuple[int, ...]
    largest: float | None


@frozen(kw_only=True)
class Difference:
    """What is not the same in two checkpoints.

    Attributes:
        only_in_a: Tensors of the first, ``OBJECT: NAME``, or whole objects, ``OBJECT``.
        only_in_b: Of the second.
        forms: Tensors of another shape or type.
        values: Tensors with other elements.
        fields: Step, epoch, samples, run state, details of objects, extra and configurations.
        circumstances: The plan and the versions that wrote them; two equal states may differ here.
        num_compared: Tensors that both have in one form.
    """

    only_in_a: tuple[str, ...] = ()
    only_in_b: tuple[str, ...] = ()
    forms: tuple[FormDifference, ...] = ()
    values: tuple[ValueDifference, ...] = ()
    fields: tuple[FieldDifference, ...] = ()
    circumstances: tuple[FieldDifference, ...] = field(default=())
    num_compared: int = 0

    @property
    def is_same_state(self) -> bool:
        """Whether both hold the same state, bit for bit."""
        return not (self.only_in_a or self.only_in_b or self.forms or self.values or self.fields)


def diff(a: Path, b: Path) -> Difference:
    """Compare two checkpoints.

    Every tensor that both have is read whole; memory is a few blocks.

    Args:
        a: Directory of the first.
        b: Directory of the second.

    Raises:
        CheckpointError: One of them is missing or damaged.
    """
    first, second = read_manifest(a), read_manifest(b)
    only_in_a = [name for name in first.objects if name not in second.objects]
    only_in_b = [name for name in second.objects if name not in first.objects]
    forms: list[FormDifference] = []
    values: list[ValueDifference] = []
    fields = [*_compare_state(first, second)]
    num_compared = 0
    with BlockReader(a, first) as reader_a, BlockReader(b, second) as reader_b:
        for owner in (name for name in first.objects if name in second.objects):
            one, two = first.objects[owner], second.objects[owner]
            fields.extend(_compare_plain(f"{owner}: ", dict(one.details), dict(two.details)))
            fields.extend(_compare_aliases(owner, one, two))
            all_a, all_b = _name_all(one), _name_all(two)
            only_in_a.extend(f"{owner}: {name}" for name in one.tensors if name not in all_b)
            only_in_b.extend(f"{owner}: {name}" for name in two.tensors if name not in all_a)
            for name in dict.fromkeys((*one.tensors, *two.tensors)):
                if name not in all_a or name not in all_b:
                    continue
                left, right = all_a[name], all_b[name]
                if (left.dtype, left.shape) != (right.dtype, right.shape):
                    forms.append(
                        FormDifference(tensor=f"{owner}: {name}", a=_describe(left), b=_describe(right))
                    )
                    continue
                num_compared += 1
                pairs = zip(
                    read_in_order(reader_a, name, left), read_in_order(reader_b, name, right), strict=True
                )
                found = _compare_values(f"{owner}: {name}", left, pairs)
                values.extend([found] if found else [])
    return Difference(
        only_in_a=tuple(only_in_a),
        only_in_b=tuple(only_in_b),
        forms=tuple(forms),
        values=tuple(values),
        fields=tuple(fields),
        circumstances=(
            *_compare_plain("plan.", _without_mark(first.plan), _without_mark(second.plan)),
            *_compare_plain("versions.", dict(first.versions), dict(second.versions)),
        ),
        num_compared=num_compared,
    )


def _name_all(record: ObjectRecord) -> dict[str, TensorRecord]:
    """Return the tensors of an object under all their names."""
    aliases = {alias: tensor for tensor in record.tensors.values() for alias in tensor.aliases}
    return {**aliases, **record.tensors}


def _describe(tensor: TensorRecord) -> str:
    """Return type and shape."""
    return f"{tensor.dtype} {[*tensor.shape]}"


def _without_mark(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return a plan without what no two saves have in common."""
    return {key: value for key, value in plan.items() if key != "mark"}


# --- values beside the tensors ------------------------------------------------------------------------------


def _compare_state(a: Manifest, b: Manifest) -> Iterator[FieldDifference]:
    """Compare what belongs to the run and lies beside its tensors."""
    for name in ("step", "epoch", "samples"):
        yield from _compare_plain("", {name: _counters(a)[name]}, {name: _counters(b)[name]})
    yield from _compare_plain("run.", dict(a.run), dict(b.run))
    yield from _compare_plain("", {"extra": a.extra}, {"extra": b.extra})
    for model in dict.fromkeys((*a.configurations, *b.configurations)):
        texts = dict(a.configurations.get(model, {})), dict(b.configurations.get(model, {}))
        yield from _compare_plain(f"{model}: ", *texts)
    yield from _compare_plain("", _list_texts(a), _list_texts(b))


def _counters(manifest: Manifest) -> dict[str, int]:
    """Return the counters of a manifest by name."""
    return {"step": manifest.step, "epoch": manifest.epoch, "samples": manifest.samples}


def _list_texts(manifest: Manifest) -> dict[str, str]:
    """Return the files that hold no tensors (random states) by names without the mark of their save."""
    return {
        _MARK.sub("", name): f"{file.num_bytes} bytes, checksum {file.checksum:08x}"
        for name, file in sorted(manifest.files.items())
        if name.endswith(".json")
    }


def _compare_aliases(owner: str, a: ObjectRecord, b: ObjectRecord) -> Iterator[FieldDifference]:
    """Compare which names of an object mean one tensor."""
    for name in a.tensors:
        if name in b.tensors:
            texts = (", ".join(sorted(record.tensors[name].aliases)) or "none" for record in (a, b))
            yield from _compare_plain(f"{owner}: aliases of ", *({name: text} for text in texts))


def _compare_plain(path: str, a: Any, b: Any) -> Iterator[FieldDifference]:
    """Compare two plain values and name the innermost places where they differ."""
    if isinstance(a, dict) and isinstance(b, dict) and not (is_leaf(a) or is_leaf(b)):
        for key in dict.fromkeys((*a, *b)):
            inner = f"{path}{key}" if path == "" or path.endswith((".", " ")) else f"{path}.{key}"
            yield from _compare_plain(inner, a.get(key, _MISSING), b.get(key, _MISSING))
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for index, (left, right) in enumerate(zip(a, b, strict=True)):
            yield from _compare_plain(f"{path}[{index}]", left, right)
    elif type(a) is not type(b) or a != b:
        yield FieldDifference(path=path, a=_shorten(a), b=_shorten(b))


_MISSING = object()


def _shorten(value: Any) -> str:
    """Return a value as text that fits a table."""
    text = "-" if value is _MISSING else tell_packed(value)
    return text if len(text) <= _MOST_TEXT else f"{text[: _MOST_TEXT - 20]}... ({len(text)} characters)"


# --- elements -----------------------------------------------------------------------------------------------


def _compare_values(
    name: str, tensor: TensorRecord, pairs: Iterator[tuple[bytearray, bytearray]]
) -> ValueDifference | None:
    """Compare the bytes of a tensor part by part; None when all are the same."""
    num_different, position = 0, 0
    first: int | None = None
    largest: list[float] = []
    has_numbers = True
    for left, right in pairs:
        if left != right:
            one, two = memoryview(left), memoryview(right)
            for start in range(0, len(left), _CHUNK_BYTES):
                chunk_a, chunk_b = one[start : start + _CHUNK_BYTES], two[start : start + _CHUNK_BYTES]
                if chunk_a == chunk_b:
                    continue
                num_different += count_different(chunk_a, chunk_b, tensor.item_bytes)
                if first is None:
                    first = (position + start + _find_first(chunk_a, chunk_b)) // tensor.item_bytes
                found = find_largest_difference(chunk_a, chunk_b, tensor.dtype)
                has_numbers = found is not None
                largest.extend([] if found is None or math.isnan(found) else [found])
        position += len(left)
    if first is None:
        return None
    return ValueDifference(
        tensor=name,
        num_different=num_different,
        num_elements=math.prod(tensor.shape),
        first=_unravel(first, tensor.shape),
        largest=max(largest, default=math.nan) if has_numbers else None,
    )


def _find_first(a: memoryview, b: memoryview) -> int:
    """Return the position of the first byte that differs; there is one."""
    return next(itertools.compress(itertools.count(), map(int.__ne__, a, b)))


def _unravel(flat: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the index of the element at a position of the row-major order."""
    index = []
    for length in reversed(shape):
        flat, last = divmod(flat, length)
        index.append(last)
    return tuple(reversed(index))
