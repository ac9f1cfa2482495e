"""How large chunks are in a plan, and what a rank holds of them, by arithmetic."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from colossal_core.runtime.buckets import BucketRules, plan_lanes
from colossal_core.runtime.division import divided_over
from colossal_gemini.search import choose_chunk_bytes, cut_unit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from colossal_core.mesh import MeshLayout
    from colossal_core.runtime.precision import Precision
    from colossal_core.runtime.table import ParameterTable
    from colossal_gemini.options import Gemini

__all__ = ["choose_bytes", "estimate_table"]


def choose_bytes(options: Gemini, table: ParameterTable, precision: Precision, layout: MeshLayout) -> int:
    """Return the most bytes of the values of one chunk.

    Args:
        options: The user may have said it.
        table: The parameters.
        precision: Dtypes of the plan.
        layout: Axes of the run.
    """
    if options.chunk_bytes is not None:
        return options.chunk_bytes
    units: dict[object, list[int]] = {}  # as they are laid out: by kind, in the order of backward
    ranks = 1
    for entry, parameter in reversed(list(table.parameters())):
        if entry.parts and (parameter.is_floating_point() or parameter.is_complex()):
            dtype = precision.dtype_of(entry.name, entry.dtype)
            key = (entry.trainable, entry.model, entry.unit, dtype, divided_over(entry, layout))
            units.setdefault(key, []).append(parameter.numel())
            ranks = max(ranks, len(layout.members(key[-1], 0)))
    return choose_chunk_bytes(units.values(), value_bytes=precision.compute.itemsize, ranks=ranks).chunk_bytes


def estimate_table(
    options: Gemini, table: ParameterTable, precision: Precision, optimizer_states: int
) -> dict[str, int]:
    """Return the bytes that one rank holds in all tiers together, by category.

    Args:
        options: Size of chunks.
        table: The parameters.
        precision: Dtypes of the plan.
        optimizer_states: States per element that the optimizer keeps.
    """
    layout = table.layout
    chunk_bytes = choose_bytes(options, table, precision, layout)

    def cut(sizes: Sequence[int], item_bytes: int) -> Sequence[Sequence[int]]:
        return cut_unit(sizes, value_bytes=item_bytes, chunk_bytes=chunk_bytes)

    rules = BucketRules(
        dtype_of=lambda entry, _: precision.dtype_of(entry.name, entry.dtype),
        divided=lambda entry: divided_over(entry, layout),
        num_ranks=lambda spec: len(layout.members(spec, 0)),
        by_unit=True,
        cut=cut,
        divides_alone=lambda entry: not any(layout.normalise(part.sum_over).axes for part in entry.parts),
    )
    found = {"values": 0, "gradients": 0, "masters": 0, "states": 0}
    members = [pair for pair in table.parameters() if pair[0].trainable and pair[0].parts]
    for plan in plan_lanes(members, rules):
        for buffer in plan.buffers:
            dtype, span = buffer.kind.dtype, buffer.span_numel
            wide = max(dtype.itemsize, torch.float32.itemsize)
            found["values"] += span * dtype.itemsize
            found["gradients"] += span * dtype.itemsize
            found["masters"] += span * wide if dtype.itemsize < wide else 0
            found["states"] += span * wide * optimizer_states
    for entry, parameter in table.parameters():
        if not (entry.trainable and entry.parts):
            num_bytes = math.prod(parameter.shape) * precision.dtype_of(entry.name, entry.dtype).itemsize
            found["values"] += -(-num_bytes // len(layout.members(divided_over(entry, layout), 0)))
    return found
