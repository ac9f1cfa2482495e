"""Boxes of tensors in files: any box of any shape, row by row, in blocks of any size."""

from __future__ import annotations

import io
import itertools
import math
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from colossal_core.boxes import Box
from colossal_core.checkpoint.safetensors_format import Stored
from colossal_core.runtime.checkpointing import rows
from colossal_core.runtime.checkpointing.rows import inside, read_box, row_runs, split_box, write_box
from colossal_core.runtime.checkpointing.shards import bytes_of


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Box]:
    """Draw a shape of up to four dims, and a box of it that is not empty."""
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    offset = tuple(draw(st.integers(0, extent - 1)) for extent in shape)
    size = tuple(draw(st.integers(1, extent - start)) for extent, start in zip(shape, offset, strict=True))
    return shape, Box(offset, size)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let blocks be so small that boxes of these tests are several."""
    monkeypatch.setattr(rows, "BLOCK_BYTES", 24)


any_box = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@any_box
@given(drawn=boxes())
def test_runs_are_the_elements_of_the_box_in_order(drawn: tuple[tuple[int, ...], Box]) -> None:
    """Runs ascend, none touches the next, and together they are the box."""
    shape, box = drawn
    numbers = torch.arange(math.prod(shape)).view(shape)

    runs = list(row_runs(shape, box))

    found = [number for start, length in runs for number in range(start, start + length)]
    assert found == numbers[box.slices].flatten().tolist()
    assert all(a + length < b for (a, length), (b, _) in itertools.pairwise(runs))


@any_box
@given(drawn=boxes())
@pytest.mark.usefixtures("small_blocks")
def test_blocks_make_up_the_box(drawn: tuple[tuple[int, ...], Box]) -> None:
    """Each element lies in one block, and no block is larger than allowed."""
    shape, box = drawn
    counts = torch.zeros(shape, dtype=torch.int32)

    for block in split_box(box, 8):
        assert block.volume <= 3
        counts[block.slices] += 1

    expected = torch.zeros(shape, dtype=torch.int32)
    expected[box.slices] = 1
    assert torch.equal(counts, expected)


@any_box
@given(drawn=boxes())
@pytest.mark.usefixtures("small_blocks")
def test_what_is_written_is_read_and_nothing_else_changes(
    drawn: tuple[tuple[int, ...], Box], tmp_path: Path
) -> None:
    """A box of a file is replaced, cast to the dtype of the file; what lies around it stays."""
    shape, box = drawn
    before = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
    stored = Stored(dtype="F32", shape=shape, start=8, stop=8 + before.nbytes)
    path = tmp_path / "file"
    path.write_bytes(b"12345678" + bytes(bytes_of(before)) + b"after")
    values = -before[box.slices].double() - 1

    with io.FileIO(path, "r+b") as file:
        write_box(file, stored, box, values)
        part = read_box(file, stored, box)
        whole = read_box(file, stored, Box((0,) * len(shape), shape))

    expected = before.clone()
    expected[box.slices] = values.float()
    assert torch.equal(part, values.float())
    assert torch.equal(whole, expected)
    assert torch.equal(whole[inside(box, Box((0,) * len(shape), shape))], part)
    content = path.read_bytes()
    assert content.startswith(b"12345678")
    assert content.endswith(b"after")


def test_files_that_end_early_are_noticed(tmp_path: Path) -> None:
    """A file that another process has cut since its header was read gives an error, not zeros."""
    path = tmp_path / "file"
    path.write_bytes(bytes(20))
    stored = Stored(dtype="F32", shape=(8,), start=8, stop=40)

    with io.FileIO(path) as file, pytest.raises(EOFError, match="byte 20"):
        read_box(file, stored, Box((0,), (8,)))
