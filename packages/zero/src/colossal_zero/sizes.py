"""What a rank holds, by arithmetic: the plan of the buffers, without the buffers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from colossal_core.errors import UsageError
from colossal_core.mesh import GroupSpec, MeshLayout
from colossal_core.mesh.layout import Axis
from colossal_core.runtime.buckets import BucketRules, plan_lanes
from colossal_core.runtime.division import REPLICA_AXIS, divided_over
from colossal_core.runtime.precision import Precision
from colossal_core.runtime.table import ParameterTable

if TYPE_CHECKING:
    from torch import nn

    from colossal_zero.options import Zero

__all__ = ["estimate_model", "estimate_table"]


def estimate_table(
    options: Zero, table: ParameterTable, precision: Precision, optimizer_states: int
) -> dict[str, int]:
    """Return the bytes of one rank by category; see :meth:`Zero.estimate`.

    Args:
        options: Stage and copies.
        table: The parameters.
        precision: Dtypes of the plan.
        optimizer_states: States per element that the optimizer keeps.
    """
    layout = table.layout

    def num_ranks(spec: GroupSpec) -> int:
        """Count the ranks that divide a buffer; every group of a spec has as many."""
        return len(layout.members(spec, 0))

    rules = BucketRules(
        dtype_of=lambda entry, _: precision.dtype_of(entry.name, entry.dtype),
        divided=lambda entry: divided_over(entry, layout),
        num_ranks=num_ranks,
        by_unit=options.stage == 3,
    )
    members = [pair for pair in table.parameters() if pair[0].trainable and pair[0].parts]
    found = {"values": 0, "gradients": 0, "masters": 0, "states": 0}
    for plan in plan_lanes(members, rules):
        for buffer in plan.buffers:
            dtype = buffer.kind.dtype
            wide = max(dtype.itemsize, torch.float32.itemsize)
            whole, span = buffer.padded_numel, buffer.span_numel
            found["values"] += (span if options.stage == 3 else whole) * dtype.itemsize
            found["gradients"] += (whole if options.stage == 1 else span) * dtype.itemsize
            if options.offload is not None:
                found["gradients"] += span * dtype.itemsize  # the copy on the host, where the update runs
            found["masters"] += span * wide if dtype.itemsize < wide or options.offload is not None else 0
            found["states"] += span * wide * optimizer_states
    for entry, parameter in table.parameters():
        if not (entry.trainable and entry.parts):
            num_bytes = math.prod(parameter.shape) * precision.dtype_of(entry.name, entry.dtype).itemsize
            ranks = num_ranks(divided_over(entry, layout)) if options.stage == 3 else 1
            found["values"] += -(-num_bytes // ranks)
    return found


def estimate_model(
    options: Zero, model: nn.Module, *, ranks: int, precision: str, optimizer_states: int
) -> Mapping[str, int]:
    """Return the bytes of one of some data ranks; see :meth:`Zero.estimate`.

    Raises:
        UsageError: The ranks do not divide into that many copies.
    """
    if ranks < 1 or ranks % options.replicas:
        raise UsageError(
            f"{ranks} data ranks do not divide into {options.replicas} replicas",
            hint="let ranks be a multiple of replicas",
        )
    axes = (
        Axis(name=REPLICA_AXIS, degree=options.replicas, divides_batch=True, gradients="average"),
        Axis(name="data", degree=ranks // options.replicas, divides_batch=True, gradients="average"),
    )
    table = ParameterTable.serial({"model": model}, MeshLayout(axes))
    return estimate_table(options, table, Precision(precision), optimizer_states)
