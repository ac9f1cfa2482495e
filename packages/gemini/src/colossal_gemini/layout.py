"""Which chunks a model has, from its table alone: the same on every rank and on the ``meta`` device.

The one idea: parameters of one unit and one kind lie together, in the order in which backward reaches them,
and are cut where :mod:`colossal_gemini.search` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs

from colossal_core.mesh import MeshLayout
from colossal_core.mesh.layout import Axis
from colossal_core.runtime.table import ParameterTable
from colossal_gemini.search import ChunkChoice, choose_chunk_bytes, cut_unit, pad_numel
from colossal_gemini.trace import Chunk

if TYPE_CHECKING:
    import torch
    from torch import nn

    from colossal_core.runtime.precision import Precision

__all__ = ["Layout", "lay_out"]


@attrs.frozen(kw_only=True, eq=False)
class Layout:
    """The chunks of one model.

    Attributes:
        chunks: All of them, trainable ones first, in the order in which backward reaches them.
        chunk_of: The chunk of each parameter.
        dtypes: What each parameter computes in.
        units: Chunks of each unit; ``""`` is what no repeated block holds.
        choice: The size of chunks, with its waste.
        ranks: Among how many ranks chunks are divided.
    """

    chunks: tuple[Chunk, ...]
    chunk_of: Mapping[nn.Parameter, int]
    dtypes: Mapping[nn.Parameter, torch.dtype]
    units: Mapping[str, tuple[int, ...]]
    choice: ChunkChoice
    ranks: int = 1

    def unit_of(self, path: str) -> str:
        """Return the unit that a module lies in, by its name."""
        return next((u for u in self.units if u and (path == u or path.startswith(f"{u}."))), "")


def lay_out(
    model: nn.Module, precision: Precision, *, ranks: int = 1, chunk_bytes: int | None = None
) -> Layout:
    """Return the chunks of a model.

    Args:
        model: The serial model; may be on the ``meta`` device.
        precision: What its parameters compute in.
        ranks: Among how many ranks chunks are divided.
        chunk_bytes: Most bytes of a chunk; None to choose it.
    """
    axis = Axis(name="data", degree=ranks, divides_batch=True, gradients="average")
    table = ParameterTable.serial({"model": model}, MeshLayout((axis,)))
    groups: dict[tuple[bool, str, torch.dtype], list[nn.Parameter]] = {}
    dtypes: dict[nn.Parameter, torch.dtype] = {}
    for entry, parameter in reversed(list(table.parameters())):
        if parameter.is_floating_point() or parameter.is_complex():
            dtypes[parameter] = precision.dtype_of(entry.name, entry.dtype)
            key = (not entry.trainable, entry.unit, dtypes[parameter])
            groups.setdefault(key, []).append(parameter)
    choice = choose_chunk_bytes(
        ([parameter.numel() for parameter in members] for members in groups.values()),
        value_bytes=precision.compute.itemsize,
        ranks=ranks,
        bound=chunk_bytes,
    )
    position = {parameter: number for number, parameter in enumerate(dtypes)}
    pieces: list[tuple[bool, int, str, list[nn.Parameter]]] = []
    for (is_frozen, unit, dtype), members in groups.items():
        sizes = [parameter.numel() for parameter in members]
        parts = cut_unit(sizes, value_bytes=dtype.itemsize, chunk_bytes=choice.chunk_bytes)
        for number, part in enumerate(parts):
            held = [members[index] for index in part]
            name = unit or type(model).__name__
            name = name if len(parts) == 1 else f"{name} {number + 1}/{len(parts)}"
            pieces.append((is_frozen, max(position[parameter] for parameter in held), name, held))
    chunks: list[Chunk] = []
    chunk_of: dict[nn.Parameter, int] = {}
    units: dict[str, tuple[int, ...]] = {}
    unit_of = {parameter: key[1] for key, members in groups.items() for parameter in members}
    # The buffer that backward fills first leaves first; the root's embeddings come last.
    for is_frozen, _, name, held in sorted(pieces, key=lambda piece: piece[:2]):
        unit, dtype = unit_of[held[0]], dtypes[held[0]]
        used = sum(parameter.numel() for parameter in held)
        chunk_of.update((parameter, len(chunks)) for parameter in held)
        units[unit] = (*units.get(unit, ()), len(chunks))
        chunks.append(
            Chunk(
                index=len(chunks),
                name=name,
                numel=pad_numel(used, ranks=ranks, value_bytes=dtype.itemsize),
                used=used,
                value_bytes=dtype.itemsize,
                is_trainable=not is_frozen,
                is_pinned=not unit,
            )
        )
    return Layout(
        chunks=tuple(chunks), chunk_of=chunk_of, dtypes=dtypes, units=units, choice=choice, ranks=ranks
    )
