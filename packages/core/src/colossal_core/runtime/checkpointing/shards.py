"""What this rank holds of each serial tensor, and which part of that it writes.

The one idea: a place says which range of a local tensor it holds, the table says which boxes of the serial
tensor that local tensor is made of, so every piece of state becomes a box with a view of its memory. Save,
load and export are written over these and know no plan. Ranks that hold the same boxes divide the writing of
them
without asking each other: all of them see the same list.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from attrs import evolve, field, frozen
from torch import nn

from colossal_core.boxes import Box, flat_range_boxes
from colossal_core.checkpoint.manifest import BLOCK_BYTES
from colossal_core.errors import CapabilityError
from colossal_core.mesh import MeshLayout

if TYPE_CHECKING:
    from colossal_core.runtime.averages import Average
    from colossal_core.runtime.engine import Engine
    from colossal_core.runtime.table import Entry, Key, ParameterTable, Part, Place

    PlacesByKey = dict[Key, dict[str, list[Place]]]

__all__ = [
    "DTYPE_NAMES",
    "WRAPPERS",
    "Collected",
    "Holding",
    "Spec",
    "average_holdings",
    "blocks_of",
    "boxes_of",
    "bytes_of",
    "deal",
    "dtype_name",
    "holdings_of",
    "model_holdings",
    "optimizer_holdings",
    "places_by_key",
    "plain_name",
    "qualified_name",
]

DTYPE_NAMES: Mapping[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.complex128: "C128",
}
"""Names of element types in safetensors files."""

WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
"""Levels that ``torch.compile`` and torch's wrapper for recomputation put into the names of modules."""

KEPT = "kept"
"""Name under which :func:`places_by_key` sorts what is kept of values."""

SMALLEST_CUT = 64 << 10
"""Bytes below which a box is written by one rank: finer cuts make the manifest longer and nothing faster."""

LARGEST_ROW = 256 << 10
"""Bytes of a row up to which boxes are cut between rows only, so that a cut stays one box."""


@frozen(kw_only=True)
class Spec:
    """What is the same on all ranks about a serial tensor.

    Attributes:
        dtype: Element type in which it is kept.
        shape: Global shape.
        aliases: Further names of it in the same object.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    aliases: tuple[str, ...] = ()


@frozen(kw_only=True, eq=False)
class Holding:
    """A box of a serial tensor that this rank holds.

    Attributes:
        name: Name of the tensor in its object.
        box: The box in the global index space; not empty.
        view: Its elements, of the box's size; a view of where they live, so what is copied into it counts.
        copies: Ranks that hold this very box with the same elements; this rank is one of them.
        place: The place that the view is of; None for memory that is there all the time.
    """

    name: str
    box: Box
    view: torch.Tensor
    copies: tuple[int, ...]
    place: Place | None = None

    def present(self) -> AbstractContextManager[None]:
        """Return a context in which the view may be read and written."""
        return nullcontext() if self.place is None else self.place.present()


@frozen(kw_only=True)
class Collected:
    """What this rank holds of one object.

    Attributes:
        specs: The tensors of the object by name, as far as this rank knows them.
        holdings: What it holds of them.
    """

    specs: dict[str, Spec] = field(factory=dict)
    holdings: list[Holding] = field(factory=list)

    def add(self, name: str, spec: Spec, holdings: Iterable[Holding]) -> None:
        """Take in one tensor."""
        self.specs[name] = spec
        self.holdings.extend(holdings)


# --- the books ----------------------------------------------------------------------------------------------


def model_holdings(
    engine: Engine,
    model: str,
    *,
    places: PlacesByKey | None = None,
    borrowed: bool = False,
    hidden: bool = False,
) -> Collected:
    """Return what this rank holds of the parameters and persistent buffers of a model, in serial order.

    Parameters appear as the memory manager keeps them, masters in their wider dtype for example. Who writes
    into them lets the manager publish what models compute with.

    Args:
        engine: The built pieces.
        model: Name of the model.
        places: From :func:`places_by_key`, for callers that read several objects.
        borrowed: Also return tensors that another model owns and this one shares, under its own names.
        hidden: Also return buffers that are not persistent.
    """
    table, layout, rank = engine.context.table, engine.context.mesh.layout, engine.context.mesh.rank
    places = places_by_key(engine) if places is None else places
    left_out = set() if hidden else _non_persistent(engine.models[model])
    found = Collected()
    for entry in table:
        names = [name for owner, name in (entry.key, *entry.aliases) if owner == model]
        if not names or names[0] in left_out or not (borrowed or entry.model == model):
            continue
        names = [plain_name(name) for name in names]
        source = places.get(entry.key, {})
        kept = source.get(KEPT, [])
        dtype = _kept_dtype(engine, entry, kept)
        spec = Spec(dtype=dtype, shape=entry.shape, aliases=tuple(names[1:]))
        found.add(names[0], spec, holdings_of(names[0], kept, table, layout, rank))
    return found


def optimizer_holdings(engine: Engine, index: int, *, places: PlacesByKey | None = None) -> Collected:
    """Return what this rank holds of the states of an optimizer that are shaped like their parameter.

    Args:
        engine: The built pieces.
        index: Position of the optimizer in the ``boost`` call.
        places: As for :func:`model_holdings`.
    """
    table, layout, rank = engine.context.table, engine.context.mesh.layout, engine.context.mesh.rank
    groups = engine.optimizers[index].param_groups
    mine = {parameter for group in groups for parameter in group["params"]}
    found = Collected()
    for key, source in (places_by_key(engine) if places is None else places).items():
        entry = table[key]
        if table.tensor(entry) not in mine:
            continue
        for state, kept in source.items():
            if state in {KEPT, "gradient"}:
                continue
            name = f"{qualified_name(engine, entry.key)}.{state}"
            spec = Spec(dtype=kept[0].tensor.dtype, shape=entry.shape)
            found.add(name, spec, holdings_of(name, kept, table, layout, rank))
    return found


def average_holdings(engine: Engine, model: str, average: Average) -> Collected:
    """Return what this rank holds of a running average, under the names of the model's parameters.

    Args:
        engine: The built pieces.
        model: Name of the model.
        average: One of its averages.
    """
    table, layout, rank = engine.context.table, engine.context.mesh.layout, engine.context.mesh.rank
    places: dict[Key, list[Place]] = {}
    for place in average.places():
        places.setdefault(table[place.key].key, []).append(place)
    found = Collected()
    for entry, parameter in table.parameters():
        names = [name for owner, name in (entry.key, *entry.aliases) if owner == model]
        if names and parameter.is_floating_point():
            name = plain_name(names[0])
            # As averages are kept: also said by ranks that hold nothing of this parameter.
            dtype = torch.promote_types(parameter.dtype, torch.float32)
            kept = places.get(entry.key, [])
            found.add(
                name, Spec(dtype=dtype, shape=entry.shape), holdings_of(name, kept, table, layout, rank)
            )
    return found


def qualified_name(engine: Engine, key: Key) -> str:
    """Return the name of a parameter among all models: its serial name where there is one model only."""
    name = plain_name(key[1])
    return name if len(engine.models) == 1 else f"{key[0]}.{name}"


def plain_name(name: str) -> str:
    """Return a name as the bare model has it: compiled and recomputed modules add a level."""
    return ".".join(level for level in name.split(".") if level not in WRAPPERS)


def places_by_key(engine: Engine) -> PlacesByKey:
    """Sort the places of this rank by parameter, in the order of the table, and state.

    What is kept of values stands under :data:`KEPT`: for parameters as the manager says, for buffers
    themselves.
    """
    table = engine.context.table
    found: PlacesByKey = {entry.key: {} for entry in table}
    for place in engine.manager.places():
        entry = table[place.key]
        if place.state not in {"value", "master"}:
            found[entry.key].setdefault(place.state, []).append(place)
        elif entry.kind == "buffer":
            found[entry.key].setdefault(KEPT, []).append(place)
    for place in engine.manager.kept_places():
        if table[place.key].kind == "parameter":
            found[table[place.key].key].setdefault(KEPT, []).append(place)
    return found


def _kept_dtype(engine: Engine, entry: Entry, kept: Sequence[Place]) -> torch.dtype:
    """Return the dtype in which a tensor is kept, which a rank may have to say that keeps nothing of it."""
    tensor = engine.context.table.tensor(entry)
    if kept:
        return kept[0].tensor.dtype
    if entry.kind == "buffer" or not tensor.is_floating_point() or not tensor.requires_grad:
        return tensor.dtype
    is_updated = any(
        tensor is parameter
        for optimizer in engine.optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    )
    return torch.promote_types(tensor.dtype, torch.float32) if is_updated else tensor.dtype


def _non_persistent(model: nn.Module) -> set[str]:
    """Return the names of buffers that a state dict leaves out."""
    return {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name in module._non_persistent_buffers_set  # noqa: SLF001 - torch has no getter
    }


def holdings_of(
    name: str, places: Iterable[Place], table: ParameterTable, layout: MeshLayout, rank: int
) -> Iterator[Holding]:
    """Yield the boxes of one tensor that this rank holds."""
    for place in places:
        for part, box, view in boxes_of(place, table):
            copies = _copies(layout, part, place, rank)
            yield Holding(name=name, box=box, view=view, copies=copies, place=place)


def boxes_of(place: Place, table: ParameterTable) -> Iterator[tuple[Part, Box, torch.Tensor]]:
    """Yield ``(part, box, view)``: boxes of the serial tensor in a place, and where they live in it."""
    entry = table[place.key]
    local_shape = tuple(table.tensor(entry).shape)
    flat = place.tensor.view(-1)
    if flat.numel() == 0:
        return
    for outer, first in flat_range_boxes(local_shape, place.start, place.start + flat.numel()):
        start = first - place.start
        window = flat[start : start + outer.volume].view(outer.size)
        for part in entry.parts:
            common = outer.intersect(Box(part.local, part.box.size))
            if common is not None:
                inside = common.shifted([-begin for begin in outer.offset])
                moved = [there - here for there, here in zip(part.box.offset, part.local, strict=True)]
                yield part, common.shifted(moved), window[inside.slices]


def _copies(layout: MeshLayout, part: Part, place: Place, rank: int) -> tuple[int, ...]:
    """Return the ranks that hold the elements of a place: holders at the same position of the division."""
    position = layout.members(place.sharded_over, rank).index(rank)
    return tuple(
        other
        for other in layout.members(part.holders, rank)
        if layout.members(place.sharded_over, other).index(other) == position
    )


# --- who writes what ----------------------------------------------------------------------------------------


def deal(holdings: Sequence[Holding], rank: int) -> list[Holding]:
    """Return what this rank writes, so that every box is written once and all ranks write equally much.

    The boxes that the same ranks hold are thought of as one line of bytes, cut into equal stretches, with
    cuts between rows, and none through small boxes. Every holder sees the same line, so nothing is
    communicated.

    Args:
        holdings: What this rank holds, in an order that all ranks share.
        rank: This rank.
    """
    totals: dict[tuple[int, ...], int] = {}
    for held in holdings:
        totals[held.copies] = totals.get(held.copies, 0) + held.view.nbytes
    positions: dict[tuple[int, ...], int] = {}
    found: list[Holding] = []
    for held in holdings:
        copies, num_bytes = held.copies, held.view.nbytes
        begin = positions.get(copies, 0)
        positions[copies] = begin + num_bytes
        index, total = copies.index(rank), totals[copies]
        first, last = (total * number // len(copies) - begin for number in (index, index + 1))
        found.extend(_cut(held, first, last))
    return found


def _cut(held: Holding, first: int, last: int) -> Iterator[Holding]:
    """Yield the boxes of a holding in its bytes ``[first, last)``, rounded as :func:`deal` says."""
    num_bytes, item = held.view.nbytes, held.view.element_size()
    if num_bytes < SMALLEST_CUT or (first <= 0 and last >= num_bytes):
        if first <= num_bytes // 2 < last:
            yield held
        return
    row = item * math.prod(held.box.size[1:])
    step = row if row <= LARGEST_ROW else item
    start, stop = (min(max(round(edge / step) * step, 0), num_bytes) // item for edge in (first, last))
    for box, _ in flat_range_boxes(held.box.size, start, stop):
        yield evolve(held, box=box.shifted(held.box.offset), view=held.view[box.slices])


# --- bytes --------------------------------------------------------------------------------------------------


def dtype_name(dtype: torch.dtype, name: str) -> str:
    """Return the name of an element type in files.

    Raises:
        CapabilityError: Files have none for it.
    """
    found = DTYPE_NAMES.get(dtype)
    if found is None:
        raise CapabilityError(
            f"tensor {name!r} has elements of {dtype}, which safetensors files do not know",
            hint="register the buffer with persistent=False, or keep it in another dtype",
        )
    return found


def blocks_of(view: torch.Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in row-major order, in blocks as they are checked.

    A block stays valid until the next one is asked for; a tensor in host memory that is contiguous is not
    copied, any other one block by block.
    """
    per_block = BLOCK_BYTES // view.element_size()
    flat = view.detach().reshape(-1) if view.is_contiguous() else None
    for start in range(0, view.numel(), per_block):
        stop = min(start + per_block, view.numel())
        if flat is not None:
            block = flat[start:stop]
        else:
            pieces = flat_range_boxes(tuple(view.shape), start, stop)
            block = torch.cat([view.detach()[box.slices].reshape(-1) for box, _ in pieces])
        yield bytes_of(block.cpu())


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the host; torch offers it only through numpy otherwise."""
    if tensor.numel() == 0:
        return memoryview(b"")
    array = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    array.owner = tensor  # type: ignore[attr-defined] # the memory lives as long as who looks at it
    return memoryview(array).cast("B")
