"""Which ranks divide the buffer of a parameter, and which hold copies of the same shard.

The one idea: gradients are summed over the ranks that the table names (``entry.reduce``), so these ranks hold
the same parameter, and it can be divided among them; or among those of them that differ along other axes than
``replica``, whose ranks then hold copies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from colossal_core.mesh import GroupSpec

if TYPE_CHECKING:
    from colossal_core.mesh import MeshLayout
    from colossal_core.runtime.table import Entry

__all__ = ["copies_of", "divided_over"]

REPLICA_AXIS = "replica"


def divided_over(entry: Entry, layout: MeshLayout) -> GroupSpec:
    """Return the ranks among which a parameter is divided; no axes when each holds it whole.

    Parameters whose gradient other ranks compute shares of stay whole: those shares are added after the sum
    over data ranks, box by box, and the buffers of those ranks need not lie alike. For norm weights in
    sequence regions that is cheap, since messages of their own would cost more than their memory; for an
    embedding tied across stages of a pipeline it costs what dividing would have saved.

    Args:
        entry: The parameter.
        layout: Axes of the run.
    """
    if any(layout.normalise(part.sum_over).axes for part in entry.parts):
        return GroupSpec()
    return _split(entry.reduce, layout)[0]


def copies_of(reduce: GroupSpec, layout: MeshLayout) -> GroupSpec:
    """Return the ranks that hold the same shard of what is summed over ``reduce``."""
    return _split(reduce, layout)[1]


def _split(reduce: GroupSpec, layout: MeshLayout) -> tuple[GroupSpec, GroupSpec]:
    """Split a group into the axes that divide and those that copy."""
    normal = layout.normalise(reduce)
    if normal.blocks is not None:
        return normal, GroupSpec()
    inside = tuple(axis for axis in normal.axes if axis != REPLICA_AXIS)
    outside = tuple(axis for axis in normal.axes if axis == REPLICA_AXIS)
    return layout.normalise(GroupSpec(inside)), layout.normalise(GroupSpec(outside))
