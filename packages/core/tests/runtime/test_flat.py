"""Flat buffers: where parameters lie, and how buffers are divided."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from colossal_core.mesh import GroupSpec, MeshLayout
from colossal_core.mesh.layout import Axis
from colossal_core.runtime.flat import ALIGNMENT_BYTES, BufferKind, FlatBuffer, deal_whole
from colossal_core.runtime.table import Entry, ParameterTable

SIZES = st.lists(st.integers(min_value=0, max_value=40), min_size=1, max_size=12)
SHARDS = st.integers(min_value=2, max_value=7)


@given(sizes=SIZES, num_shards=SHARDS)
def test_whole_tensors_are_dealt_without_overlap_and_without_being_cut(
    sizes: list[int], num_shards: int
) -> None:
    """Each lies inside one shard, no two share an element, and no shard holds more than it must."""
    starts, span = deal_whole(sizes, num_shards, item_bytes=4)

    taken = sorted((start, start + size) for start, size in zip(starts, sizes, strict=True) if size)
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(taken))
    assert all(start // span == (stop - 1) // span for start, stop in taken)
    assert span <= sum(sizes) / num_shards + max(sizes) + 1 + ALIGNMENT_BYTES // 4


def make_members(sizes: list[int]) -> list[tuple[Entry, nn.Parameter]]:
    """Make parameters of some sizes with their entries."""
    model = nn.Module()
    for index, size in enumerate(sizes):
        model.register_parameter(f"p{index}", nn.Parameter(torch.full((size,), float(index))))
    layout = MeshLayout((Axis(name="data", degree=1, divides_batch=True, gradients="average"),))
    return list(ParameterTable.serial({"model": model}, layout).parameters())


@pytest.mark.parametrize("keeps_whole", [False, True])
@given(sizes=SIZES, num_shards=SHARDS)
def test_the_last_element_of_a_divided_buffer_belongs_to_no_parameter(
    keeps_whole: bool,  # noqa: FBT001 - what is varied
    sizes: list[int],
    num_shards: int,
) -> None:
    """Shards are equal and aligned, hold everything, and leave room for one mark."""
    kind = BufferKind(dtype=torch.bfloat16, reduce=GroupSpec(), divisor=1)

    buffer = FlatBuffer(make_members(sizes), kind, num_shards=num_shards, keeps_whole=keeps_whole)

    assert buffer.padded_numel == num_shards * buffer.span_numel
    assert buffer.span_numel * kind.dtype.itemsize % ALIGNMENT_BYTES == 0
    assert max(slot.stop for slot in buffer.slots) < buffer.padded_numel
    parts = [
        slot.within(rank * buffer.span_numel, (rank + 1) * buffer.span_numel)
        for slot in buffer.slots
        for rank in range(num_shards)
    ]
    assert sum(stop - start for start, stop in parts) == sum(sizes)


def test_memory_that_was_given_back_returns_under_the_same_views() -> None:
    """Views of values and gradients survive that their storage comes and goes."""
    kind = BufferKind(dtype=torch.float32, reduce=GroupSpec(), divisor=1)
    buffer = FlatBuffer(make_members([3, 5]), kind, num_shards=2)
    buffer.take_values()
    buffer.allocate_gradients()
    view, gradient = buffer.value_view(buffer.slots[1]), buffer.gradient_view(buffer.slots[1])

    buffer.release_values()
    buffer.release_gradients()
    released = buffer.values.untyped_storage().nbytes(), buffer.gradients.untyped_storage().nbytes()
    buffer.restore_values()
    buffer.restore_gradients()
    buffer.values.fill_(7)
    buffer.gradients.fill_(8)

    assert released == (0, 0)
    assert view.tolist() == [7] * 5
    assert gradient.tolist() == [8] * 5
