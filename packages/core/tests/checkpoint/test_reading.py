"""Reading boxes: the right elements, and no block too many."""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colossal_core.boxes import Box
from colossal_core.checkpoint import BlockReader, read_manifest, reading
from colossal_core.checkpoint.manifest import TensorRecord
from colossal_core.checkpoint.reading import Block, find_blocks
from colossal_core.checkpoint.safetensors_format import ITEM_BYTES
from colossal_core.checkpoint.streaming import read_in_order
from colossal_testkit.checkpoints import SampleTensor, cut_at_random, write_checkpoint

from .conftest import SMALL_BLOCK_BYTES
from .layouts import boxes_in, flat_indexes, tensors

pytestmark = pytest.mark.usefixtures("small_blocks")

_filled = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@given(st.data())
def test_runs_and_blocks_are_those_of_plain_indexing(data: st.DataObject) -> None:
    """Runs are as long as they can be, and a block is named if and only if it holds an element of the box."""
    size = data.draw(_filled)
    box = data.draw(boxes_in(size))
    item_bytes = data.draw(st.sampled_from([1, 2, 4, 8, 16]))
    expected = [*flat_indexes(size, box)]

    runs = [*reading._runs(size, box)]
    blocks = [*find_blocks(size, box, item_bytes)]

    assert [index for start, stop in runs for index in range(start, stop)] == expected
    assert all(stop < start for (_, stop), (start, _) in itertools.pairwise(runs))
    assert blocks == sorted({index * item_bytes // SMALL_BLOCK_BYTES for index in expected})


def _paste(target: dict[int, bytes], tensor: SampleTensor, wanted: Box, blocks: Iterator[Block]) -> int:
    """Note the elements of blocks that lie in a box, by their position; return the bytes of the blocks."""
    num_bytes, item_bytes = 0, ITEM_BYTES[tensor.dtype]
    for block in blocks:
        num_bytes += len(block.data)
        for box, position in block.boxes():
            inside = {*flat_indexes(tensor.shape, wanted)}
            for number, index in enumerate(flat_indexes(tensor.shape, box)):
                start = (position + number) * item_bytes
                if index in inside:
                    assert index not in target
                    target[index] = bytes(block.data[start : start + item_bytes])
    return num_bytes


def _needed_bytes(record: TensorRecord, wanted: Box) -> int:
    """Count the bytes of all blocks that hold an element of a box, element by element."""
    total = 0
    for piece in record.pieces:
        wanted_here = {*flat_indexes(record.shape, wanted)}
        inside = [
            number
            for number, index in enumerate(flat_indexes(record.shape, piece.box))
            if index in wanted_here
        ]
        all_bytes = piece.box.volume * record.item_bytes
        for block in {number * record.item_bytes // SMALL_BLOCK_BYTES for number in inside}:
            start = block * SMALL_BLOCK_BYTES
            total += min(SMALL_BLOCK_BYTES, all_bytes - start)
    return total


@settings(deadline=None, max_examples=60)
@given(tensors(), st.data())
def test_any_box_is_read_from_any_layout_with_the_blocks_it_needs(
    tensor: SampleTensor, data: st.DataObject
) -> None:
    """0-d, empty and odd shapes, every type; each block once and no other."""
    with tempfile.TemporaryDirectory() as folder:
        directory = write_checkpoint(Path(folder), {"model": {"w": tensor}}, num_ranks=3)
        manifest = read_manifest(directory)
        record = manifest.objects["model"].tensors["w"]
        wanted = (
            data.draw(boxes_in(tensor.shape))
            if math.prod(tensor.shape)
            else Box((0,) * len(tensor.shape), tensor.shape)
        )
        found: dict[int, bytes] = {}

        with BlockReader(directory, manifest) as reader:
            num_bytes = _paste(found, tensor, wanted, reader.read("w", record, wanted))
            in_order = b"".join(read_in_order(reader, "w", record))

    assert b"".join(found[index] for index in flat_indexes(tensor.shape, wanted)) == tensor.bytes_of(wanted)
    assert num_bytes == _needed_bytes(record, wanted)
    assert reader.bytes_read == num_bytes + len(tensor.data)
    assert in_order == tensor.data


def test_narrow_columns_are_put_together(tmp_path: Path) -> None:
    """A matrix that was cut into single columns, and one whose rows were cut anywhere."""
    columns = [Box((0, column), (64, 1)) for column in range(6)]
    for number, boxes in enumerate((columns, cut_at_random((64, 6), 40, seed=3))):
        tensor = SampleTensor.make((64, 6), dtype="C128", seed=number, boxes=boxes)
        directory = write_checkpoint(tmp_path / str(number), {"model": {"w": tensor}}, num_ranks=2)
        manifest = read_manifest(directory)

        with BlockReader(directory, manifest) as reader:
            found = b"".join(read_in_order(reader, "w", manifest.objects["model"].tensors["w"]))

        assert found == tensor.data
        assert reader.bytes_read == len(tensor.data)


def test_a_checkpoint_of_many_ranks_needs_few_open_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process may open about a thousand; runs have more ranks than that."""
    monkeypatch.setattr(reading, "MAX_OPEN_FILES", 2)
    tensor = SampleTensor.make((40,), boxes=[Box((start,), (5,)) for start in range(0, 40, 5)])
    directory = write_checkpoint(tmp_path, {"model": {"w": tensor}}, num_ranks=8)
    manifest = read_manifest(directory)

    with BlockReader(directory, manifest) as reader:
        found = b"".join(read_in_order(reader, "w", manifest.objects["model"].tensors["w"]))
        num_open = len(reader._handles)

    assert found == tensor.data
    assert num_open == 2
    assert not reader._handles
