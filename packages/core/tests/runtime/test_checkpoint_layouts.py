"""Random layouts of random shapes: what some ranks write in one layout, other ranks read in another."""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path

import attrs
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from colossal_core.boxes import Box
from colossal_core.checkpoint import BlockReader, Manifest, read_manifest
from colossal_core.checkpoint.directory import publish
from colossal_core.checkpoint.verifying import verify
from colossal_core.mesh import GroupSpec, MeshLayout
from colossal_core.mesh.layout import Axis
from colossal_core.runtime.checkpointing.parts import ObjectPart, Part, join_parts, wait_for_parts, write_part
from colossal_core.runtime.checkpointing.restoring import copy_block
from colossal_core.runtime.checkpointing.shards import Collected, Holding, Spec, deal, holdings_of
from colossal_core.runtime.table import Entry, ParameterTable, Place
from colossal_core.runtime.table import Part as TablePart

MARK = "0123456789ab"


@attrs.frozen
class Cut:
    """How one tensor is cut among tensor ranks, and its local tensor among data ranks.

    Attributes:
        dim: Dim that is cut; None when each tensor rank holds all of it.
        edges: Where it is cut, one more than tensor ranks; empty pieces are allowed.
        padding: Rows of padding behind the pieces of the local tensor.
        swapped: Whether a piece lies as two parts, the second one first, as in a fused weight.
        divisions: For each data rank the end of its range of the local tensor, in per cent; None when each
            holds all of it.
    """

    dim: int | None
    edges: tuple[int, ...]
    padding: int
    swapped: bool
    divisions: tuple[int, ...] | None


@attrs.frozen
class Scheme:
    """A layout of ranks, and a cut of each tensor."""

    num_tensor: int
    num_data: int
    cuts: tuple[Cut, ...]

    @property
    def layout(self) -> MeshLayout:
        """The axes."""
        data = Axis(name="data", degree=self.num_data, divides_batch=True, gradients="average")
        return MeshLayout((data, Axis(name="tensor", degree=self.num_tensor)))


@st.composite
def schemes(draw: st.DrawFn, shapes: Sequence[tuple[int, ...]]) -> Scheme:
    """Draw a layout, and for each tensor a cut."""
    num_tensor, num_data = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    return Scheme(num_tensor, num_data, tuple(draw(cuts(shape, num_tensor, num_data)) for shape in shapes))


@st.composite
def cuts(draw: st.DrawFn, shape: tuple[int, ...], num_tensor: int, num_data: int) -> Cut:
    """Draw how one tensor is cut."""
    dim = draw(st.none() | st.integers(0, len(shape) - 1)) if shape else None
    edges: tuple[int, ...] = ()
    if dim is not None:
        inner = draw(st.lists(st.integers(0, shape[dim]), min_size=num_tensor - 1, max_size=num_tensor - 1))
        edges = (0, *sorted(inner), shape[dim])
    ends = st.lists(st.integers(0, 100), min_size=num_data - 1, max_size=num_data - 1)
    divisions = draw(st.none() | ends.map(lambda found: (*sorted(found), 100)))
    return Cut(dim, edges, draw(st.integers(0, 2)), draw(st.booleans()), divisions)


def lay_out(values: Sequence[torch.Tensor], scheme: Scheme, rank: int, *, filled: bool) -> list[Holding]:
    """Return what a rank holds of some tensors; their values, or -1 where they are to be filled."""
    layout = scheme.layout
    found: list[Holding] = []
    for index, (value, cut) in enumerate(zip(values, scheme.cuts, strict=True)):
        entry, local = cut_one(str(index), value, cut, layout, rank)
        if not filled:
            local.fill_(-1)
        table = ParameterTable([(entry, local)], layout)
        start, stop, group = 0, local.numel(), GroupSpec()
        if cut.divisions is not None:
            coordinate = layout.data_coordinate(rank)
            ends = [local.numel() * end // 100 for end in (0, *cut.divisions)]
            start, stop, group = ends[coordinate], ends[coordinate + 1], GroupSpec(("data",))
        flat = local.view(-1)[start:stop]
        place = Place(key=entry.key, state="value", tensor=flat, start=start, sharded_over=group)
        found.extend(holdings_of(entry.name, [place], table, layout, rank))
    return found


def cut_one(
    name: str, value: torch.Tensor, cut: Cut, layout: MeshLayout, rank: int
) -> tuple[Entry, torch.Tensor]:
    """Return the entry and the local tensor of one tensor on a rank."""
    shape = tuple(value.shape)
    coordinate = rank % layout.axes[1].degree
    everyone, along_data = layout.everyone(), GroupSpec(("data",))
    zero = (0,) * len(shape)
    if cut.dim is None:
        parts = [TablePart(box=Box(zero, shape), local=zero, holders=everyone)]
        local = value.clone()
    else:
        dim, lo, hi = cut.dim, cut.edges[coordinate], cut.edges[coordinate + 1]
        size = [*shape]
        size[dim] = hi - lo + cut.padding
        local = torch.full(size, 99, dtype=value.dtype)
        middle = lo + (hi - lo) // 2 if cut.swapped else hi
        parts, at = [], 0
        for first, last in ((middle, hi), (lo, middle)):
            if first == last:
                continue
            offset, extent, where = [*zero], [*shape], [*zero]
            offset[dim], extent[dim], where[dim] = first, last - first, at
            box = Box(tuple(offset), tuple(extent))
            local.narrow(dim, at, last - first).copy_(value[box.slices])
            if box.volume:
                parts.append(TablePart(box=box, local=tuple(where), holders=along_data))
            at += last - first
    entry = Entry(
        model="model",
        name=name,
        kind="buffer",
        shape=shape,
        dtype=value.dtype,
        trainable=False,
        parts=tuple(parts),
        reduce=along_data,
    )
    return entry, local


def write(values: Sequence[torch.Tensor], scheme: Scheme, directory: Path) -> None:
    """Let all ranks of a layout write, one after the other."""
    world_size = scheme.layout.world_size
    specs = {
        str(index): Spec(dtype=value.dtype, shape=tuple(value.shape)) for index, value in enumerate(values)
    }
    head = Manifest(step=1, epoch=0, samples=0, objects={}, files={})
    parts = []
    for rank in range(world_size):
        mine = deal(lay_out(values, scheme, rank, filled=True), rank)
        thing = ObjectPart(
            name="model", kind="model", collected=Collected(specs=specs, holdings=mine), details={}
        )
        parts.append(
            Part(
                directory=directory,
                mark=MARK,
                rank=rank,
                world_size=world_size,
                objects=[thing],
                random="{}",
                head=head,
            )
        )
        write_part(parts[-1])
    publish(directory, join_parts(head, wait_for_parts(parts[0], timeout_seconds=1)))


dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex128])
shapes = st.lists(
    st.lists(st.sampled_from([0, 1, 2, 3, 5, 8]), max_size=4).map(tuple), min_size=1, max_size=3
)


@settings(max_examples=150, deadline=None)
@given(st.data(), shapes, dtypes)
def test_random_layouts_exchange_random_shapes_bit_for_bit(
    data: st.DataObject, drawn: list[tuple[int, ...]], dtype: torch.dtype
) -> None:
    """0-d, empty, odd, padded and fused; copies, flat ranges and cuts; every element comes back as it was."""
    writers, readers = data.draw(schemes(drawn)), data.draw(schemes(drawn))
    numbers = itertools.count(1)
    values = [
        torch.tensor([next(numbers) for _ in range(math.prod(shape))]).to(dtype).view(shape)
        for shape in drawn
    ]
    with tempfile.TemporaryDirectory() as folder:
        write(values, writers, Path(folder))
        manifest = read_manifest(Path(folder))

        assert verify(Path(folder)) == ()
        with BlockReader(Path(folder), manifest) as reader:
            for rank in range(readers.layout.world_size):
                for held in lay_out(values, readers, rank, filled=False):
                    record = manifest.objects["model"].tensors[held.name]
                    for block in reader.read(held.name, record, held.box):
                        copy_block(block, dtype, [held])
                    assert torch.equal(held.view, values[int(held.name)][held.box.slices])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 3000), min_size=1, max_size=6), st.integers(1, 8))
def test_ranks_write_equally_much(rows: list[int], num_ranks: int) -> None:
    """What several ranks hold is dealt within a tenth of a fair share, or within the smallest cut."""
    layout = MeshLayout((Axis(name="data", degree=num_ranks, divides_batch=True, gradients="average"),))
    cut = Cut(None, (), 0, False, None)
    values = [torch.zeros(count, 100) for count in rows]
    scheme = Scheme(1, num_ranks, (cut,) * len(rows))

    written = [
        sum(held.view.nbytes for held in deal(lay_out(values, scheme, rank, filled=True), rank))
        for rank in range(layout.world_size)
    ]

    total = sum(value.nbytes for value in values)
    assert sum(written) == total
    assert max(written) <= max(1.1 * total / num_ranks, total / num_ranks + (64 << 10))
