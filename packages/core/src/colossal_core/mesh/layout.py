"""The arithmetic of ranks: coordinates, groups and their members, in plain integers.

The one idea: ranks are numbered row-major over the axes, outermost first, so a rank is the mixed-radix
number of its coordinates. A group is then described by the axes along which its members differ, and, where
only some coordinates belong together, by the blocks of coordinates that do. Nothing here communicates or
imports torch, so every case can be tested exhaustively and planned on a laptop.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

from attrs import frozen

from colossal_core.errors import UsageError
from colossal_core.mesh.axes import GradientRule

__all__ = ["Axis", "Coordinates", "GroupSpec", "MeshLayout"]

Coordinates = tuple[int, ...]
"""Coordinates of a rank along some axes, in the order of those axes."""


@frozen(kw_only=True)
class Axis:
    """One axis of the mesh.

    Attributes:
        name: Unique name, e.g. ``"data"``.
        degree: Number of ranks along the axis, at least 1.
        divides_batch: Whether ranks along this axis bring different samples.
        gradients: What happens to gradients along it.
        part_of: Name of the axis that this one is a part of, or None. The parts of an axis stand next to each
            other, and the parent's name stays usable for all of them together.
    """

    name: str
    degree: int
    divides_batch: bool = False
    gradients: GradientRule = "none"
    part_of: str | None = None

    def __attrs_post_init__(self) -> None:
        """Refuse degrees below 1."""
        if self.degree < 1:
            raise UsageError(
                f"axis {self.name!r} has degree {self.degree}", hint="give a degree of at least 1"
            )


@frozen
class GroupSpec:
    """Which ranks belong together, said without naming a rank.

    Ranks that agree on all other axes and differ only along ``axes`` form a group. With ``blocks``, only
    coordinates in the same block belong together; a rank in no block is a group of its own. All ranks give
    the same spec, and each reads its own group from it.

    Attributes:
        axes: Axis names (or parents of axes), in any order; stored as given.
        blocks: Disjoint sets of coordinates along ``axes``, e.g. ``(((0,), (1,)), ((2,), (3,)))`` for two KV
            heads that are shared by two tensor ranks each. None when all coordinates belong together.
    """

    axes: tuple[str, ...] = ()
    blocks: tuple[tuple[Coordinates, ...], ...] | None = None


@frozen
class MeshLayout:
    """Ranks arranged along named axes.

    Attributes:
        axes: The axes, outermost first. Names are unique, and the parts of one parent are adjacent.
    """

    axes: tuple[Axis, ...]

    def __attrs_post_init__(self) -> None:
        """Refuse repeated names, and parts of one axis that do not stand together."""
        names = [axis.name for axis in self.axes]
        parents = [key for key, _ in itertools.groupby(axis.part_of or axis.name for axis in self.axes)]
        for kind, seen in (("axis", names), ("parent axis", parents)):
            repeated = sorted({name for name in seen if seen.count(name) > 1})
            if repeated:
                raise UsageError(
                    f"{kind} {repeated[0]!r} appears more than once among {names}",
                    hint="give each axis once, parts of one axis side by side",
                )

    @property
    def world_size(self) -> int:
        """Number of ranks: the product of all degrees."""
        return math.prod(axis.degree for axis in self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        """Axis names, outermost first."""
        return tuple(axis.name for axis in self.axes)

    @property
    def data_degree(self) -> int:
        """Number of different shares of the batch: the product over all axes that divide the batch."""
        return math.prod(axis.degree for axis in self.axes if axis.divides_batch)

    def axis(self, name: str) -> Axis:
        """Return the axis of that name.

        Raises:
            UsageError: There is no such axis.
        """
        for axis in self.axes:
            if axis.name == name:
                return axis
        raise UsageError(
            f"there is no mesh axis {name!r}; the mesh has {', '.join(self.names) or 'none'}",
            hint="use one of these names, or add the piece that owns the axis",
        )

    def degree(self, name: str) -> int:
        """Return the number of ranks along an axis, or all parts of a parent; 1 if the axis is absent."""
        return math.prod(axis.degree for axis in self.axes if name in (axis.name, axis.part_of))

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the coordinate of a rank along each axis.

        Raises:
            UsageError: The rank is outside the world.
        """
        if not 0 <= rank < self.world_size:
            raise UsageError(
                f"rank {rank} is outside a world of {self.world_size}", hint="ranks count from 0"
            )
        found: dict[str, int] = {}
        for axis in reversed(self.axes):
            rank, found[axis.name] = divmod(rank, axis.degree)
        return {axis.name: found[axis.name] for axis in self.axes}

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """Return the rank at these coordinates; axes that are not given count as 0."""
        rank = 0
        for axis in self.axes:
            rank = rank * axis.degree + coordinates.get(axis.name, 0)
        return rank

    def data_coordinate(self, rank: int) -> int:
        """Return which share of the batch a rank brings, in ``[0, data_degree)``."""
        place = self.coordinates(rank)
        share = 0
        for axis in self.axes:
            if axis.divides_batch:
                share = share * axis.degree + place[axis.name]
        return share

    def expand(self, axes: Iterable[str]) -> tuple[str, ...]:
        """Return axis names in mesh order, parents replaced by their parts.

        Names that the mesh lacks are left out: axes of degree 1 change nothing.
        """
        wanted = set(axes)
        return tuple(axis.name for axis in self.axes if axis.name in wanted or axis.part_of in wanted)

    def everyone(self) -> GroupSpec:
        """Return the group of all ranks."""
        return GroupSpec(self.names)

    def members(self, spec: GroupSpec, rank: int) -> tuple[int, ...]:
        """Return the ranks in the group of ``rank``, ascending; only itself when no block holds it."""
        for group in self._groups_like(spec, self.coordinates(rank)):
            if rank in group:
                return group
        return (rank,)

    def enumerate(self, spec: GroupSpec) -> tuple[tuple[int, ...], ...]:
        """Return every group of the spec, in a fixed order that is the same on all ranks.

        Ranks that no block holds are left out. This is what the collective creation of groups runs over.
        """
        inner = set(self.expand(spec.axes))
        outer = [axis for axis in self.axes if axis.name not in inner]
        found: list[tuple[int, ...]] = []
        for place in itertools.product(*(range(axis.degree) for axis in outer)):
            fixed = {axis.name: value for axis, value in zip(outer, place, strict=True)}
            found.extend(self._groups_like(spec, fixed))
        return tuple(found)

    def product(self, specs: Sequence[GroupSpec]) -> GroupSpec:
        """Return the group of ranks that any chain of the given groups connects.

        Groups over different axes multiply: KV heads shared by two tensor ranks, times four data ranks, are
        eight holders of one part. Blocks over the same axis must be the same.
        """
        axes = self.expand(name for spec in specs for name in spec.axes)
        if all(spec.blocks is None for spec in specs):
            return GroupSpec(axes)
        world = [self.coordinates(rank) for rank in range(self.world_size)]
        pending = set(range(self.world_size))
        blocks: set[tuple[Coordinates, ...]] = set()
        while pending:
            reached, frontier = set(), {min(pending)}
            while frontier:
                reached |= frontier
                frontier = {m for r in frontier for spec in specs for m in self.members(spec, r)} - reached
            pending -= reached
            blocks.add(tuple(sorted(tuple(world[r][name] for name in axes) for r in reached)))
        return GroupSpec(axes, tuple(sorted(blocks)))

    def _groups_like(self, spec: GroupSpec, fixed: Mapping[str, int]) -> Iterable[tuple[int, ...]]:
        """Yield the groups of a spec for fixed coordinates on the axes outside it."""
        axes = self.expand(spec.axes)
        outside = {name: value for name, value in fixed.items() if name not in axes}
        blocks: Iterable[Sequence[Coordinates]]
        if spec.blocks is None:
            blocks = [list(itertools.product(*(range(self.axis(name).degree) for name in axes)))]
        else:
            blocks = spec.blocks
        for block in blocks:
            places = [dict(zip(axes, coordinates, strict=True)) for coordinates in block]
            yield tuple(sorted(self.rank({**outside, **place}) for place in places))
