"""Two checkpoints side by side: equal states are equal whatever wrote them, and differences have numbers."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colossal_core.boxes import Box
from colossal_core.checkpoint.comparing import FieldDifference, FormDifference, ValueDifference, diff
from colossal_core.checkpoint.elements import count_different, find_largest_difference
from colossal_core.checkpoint.packing import PackedArray, pack
from colossal_core.errors import CheckpointError
from colossal_testkit.checkpoints import SampleObject, SampleTensor, cut_at_random, write_checkpoint

pytestmark = pytest.mark.usefixtures("small_blocks")


def _floats(*values: float, aliases: tuple[str, ...] = ()) -> SampleTensor:
    """Make a tensor of given float32 values."""
    data = struct.pack(f"<{len(values)}f", *values)
    return SampleTensor(dtype="F32", shape=(len(values),), data=data, aliases=aliases)


def test_equal_states_in_other_layouts_are_the_same(tmp_path: Path) -> None:
    """Another number of ranks, other cuts, other versions; NaN equals itself bit for bit."""

    def write(name: str, num_ranks: int, seed: int) -> Path:
        tensors = {
            dtype: SampleTensor.make((5, 4, 3), dtype=dtype, boxes=cut_at_random((5, 4, 3), num_ranks, seed))
            for dtype in ("F64", "F32", "BF16", "C128", "U8")
        }
        tensors["scalar"] = _floats(math.nan)
        return write_checkpoint(
            tmp_path / name,
            {"model": tensors},
            num_ranks=num_ranks,
            plan={"world_size": num_ranks, "mark": name},
            versions={"torch": "2.13"},
        )

    found = diff(write("a", 1, 0), write("b", 4, 1))

    assert found.is_same_state
    assert found.num_compared == 6
    assert found.circumstances == (FieldDifference(path="plan.world_size", a="1", b="4"),)


def test_values_that_differ_are_counted_and_measured(tmp_path: Path) -> None:
    """How many, where first, and the largest distance; across blocks and pieces."""
    values = [float(n) for n in range(200)]
    other = [*values]
    other[150], other[7], other[199] = 150.5, 7.25, -1.0
    boxes = (Box((0, 0), (10, 13)), Box((0, 13), (10, 7)))
    first = SampleTensor(dtype="F32", shape=(10, 20), data=struct.pack("<200f", *values), boxes=boxes)
    second = SampleTensor(dtype="F32", shape=(10, 20), data=struct.pack("<200f", *other))
    a = write_checkpoint(tmp_path / "a", {"model": {"w": first, "same": _floats(1.0)}})
    b = write_checkpoint(tmp_path / "b", {"model": {"w": second, "same": _floats(1.0)}})

    found = diff(a, b)

    assert not found.is_same_state
    assert found.values == (
        ValueDifference(tensor="model: w", num_different=3, num_elements=200, first=(0, 7), largest=200.0),
    )
    assert found.num_compared == 2


def test_tensors_and_objects_of_one_side_are_listed(tmp_path: Path) -> None:
    """By name; a shape or a type that differs is a difference of its own kind."""
    optimizer = SampleObject(kind="optimizer", tensors={"w.exp_avg": _floats(1.0)})
    a = write_checkpoint(
        tmp_path / "a",
        {"model": {"w": _floats(1.0), "x": _floats(1.0, 2.0), "old": _floats(1.0)}, "optimizer": optimizer},
    )
    b = write_checkpoint(
        tmp_path / "b",
        {"model": {"w": SampleTensor.make((1,), dtype="F64"), "x": _floats(1.0), "new": _floats(1.0)}},
    )

    found = diff(a, b)

    assert found.only_in_a == ("optimizer", "model: old")
    assert found.only_in_b == ("model: new",)
    assert found.forms == (
        FormDifference(tensor="model: w", a="F32 [1]", b="F64 [1]"),
        FormDifference(tensor="model: x", a="F32 [2]", b="F32 [1]"),
    )


def test_a_tie_that_was_broken_is_compared_under_both_names(tmp_path: Path) -> None:
    """The tensor has a name more in one; its values are compared under each."""
    a = write_checkpoint(tmp_path / "a", {"model": {"embed": _floats(1.0, 2.0, aliases=("head",))}})
    b = write_checkpoint(tmp_path / "b", {"model": {"embed": _floats(1.0, 2.0), "head": _floats(1.0, 3.0)}})

    found = diff(a, b)

    assert (found.only_in_a, found.only_in_b, found.num_compared) == ((), (), 2)
    assert found.fields == (FieldDifference(path="model: aliases of embed", a="'head'", b="'none'"),)
    assert [(item.tensor, item.largest) for item in found.values] == [("model: head", 1.0)]


def test_what_lies_beside_tensors_is_compared_by_its_innermost_place(tmp_path: Path) -> None:
    """Counters, settings of groups, run state, extra, configurations."""

    def write(name: str, lr: float, step: int) -> Path:
        counter = pack(PackedArray("torch", "F32", (), struct.pack("<f", step)), "step")
        settings = {"groups": [{"lr": 0.1}, {"lr": lr, "betas": pack((0.9, lr), "betas")}], "step": counter}
        return write_checkpoint(
            tmp_path / name,
            {"optimizer": SampleObject(kind="optimizer", tensors={}, details=settings)},
            step=step,
            run={"schedulers": [{"last": step}], **({"scale": 2} if step > 1 else {})},
            extra={"text": "x" * 100 * step},
            configurations={"model": {"config.json": f"{{{step}}}"}},
        )

    found = diff(write("a", 0.5, 1), write("b", 0.25, 2))

    rows = {item.path: (item.a, item.b) for item in found.fields}
    assert rows["step"] == ("1", "2")
    assert rows["run.schedulers[0].last"] == ("1", "2")
    assert rows["run.scale"] == ("-", "2")
    assert rows["optimizer: groups[1].lr"] == ("0.5", "0.25")
    assert rows["optimizer: groups[1].betas.items[1]"] == ("0.5", "0.25")
    assert rows["optimizer: step"] == ("F32 []: [1.0]", "F32 []: [2.0]")
    assert rows["model: config.json"] == ("'{1}'", "'{2}'")
    assert rows["extra.text"][1].endswith("(202 characters)")
    assert len(rows) == 8


def test_damage_is_an_error_and_no_difference(tmp_path: Path) -> None:
    """Naming the file."""
    a = write_checkpoint(tmp_path / "a", {"model": {"w": _floats(1.0)}})
    b = write_checkpoint(tmp_path / "b", {"model": {"w": _floats(1.0)}})
    path = next(b.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1] + b"!")

    with pytest.raises(CheckpointError, match=path.name):
        diff(a, b)


_CODES = {"F64": "d", "F32": "f", "F16": "e", "I8": "b", "U16": "H", "I32": "i", "U64": "Q", "C64": "f"}


@settings(max_examples=60)
@given(st.sampled_from(sorted(_CODES)), st.data())
def test_distances_are_those_of_plain_arithmetic(dtype: str, data: st.DataObject) -> None:
    """Also with infinities, NaN and zeros of both signs."""
    code, num_parts = _CODES[dtype], 2 if dtype == "C64" else 1
    width = struct.calcsize(code)
    raw = [data.draw(st.binary(min_size=6 * width, max_size=6 * width)) for _ in range(2)]
    left, right = (struct.unpack(f"<6{code}", part) for part in raw)
    kept = [0 if x == y else abs(x - y) for x, y in zip(left, right, strict=True) if x == x and y == y]  # noqa: PLR0124
    expected = float(max(kept)) if kept else math.nan

    found = find_largest_difference(memoryview(raw[0]), memoryview(raw[1]), dtype)
    count = count_different(memoryview(raw[0]), memoryview(raw[1]), width * num_parts)

    size = width * num_parts
    assert found == pytest.approx(expected, nan_ok=True)
    assert count == sum(
        raw[0][at : at + size] != raw[1][at : at + size] for at in range(0, len(raw[0]), size)
    )


def test_bfloat16_is_widened_and_other_types_have_no_distance() -> None:
    """1.0 and -2.0 are 0x3f80 and 0xc000; a count is always there."""
    one, two = memoryview(b"\x80\x3f\x80\x3f"), memoryview(b"\x80\x3f\x00\xc0")

    assert find_largest_difference(one, two, "BF16") == 3.0
    assert find_largest_difference(one, two, "F8_E4M3") is None
    assert find_largest_difference(one, two, "BOOL") is None
    assert (count_different(one, two, 1), count_different(one, two, 2)) == (2, 1)
    assert count_different(memoryview(bytes(32)), memoryview(bytes(20) + b"x" * 12), 16) == 1
