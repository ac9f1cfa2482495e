"""The arithmetic of ranks: coordinates, groups and their members, in plain integers.

The one idea: ranks are numbered row-major over the axes, outermost first, so a rank is the mixed-radix
number of its coordinates. A group is then described by the axes along which its members differ, and, where
only some coordinates belong together, by the blocks of coordinates that do. Nothing here communicates or
imports torch, so every case can be tested exhaustively and planned on a laptop.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from attrs import frozen

from colossal_core.errors import UsageError
from colossal_core.mesh.axes import BASE_AXES, GradientRule

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


@frozen(cache_hash=True)
class GroupSpec:
    """Which ranks belong together, said without naming a rank.

    Ranks that agree on all other axes and differ only along ``axes`` form a group. With ``blocks``, only
    coordinates in the same block belong together; a rank in no block is a group of its own. All ranks give
    the same spec, and each reads its own group from it.

    Attributes:
        axes: Axis names, or the name of an axis that is split for all of its parts; in any order.
        blocks: Disjoint sets of coordinates along ``axes``, in the order of ``axes``, the parts of a split
            axis in mesh order: ``(((0,), (1,)), ((2,), (3,)))`` for two KV heads that are shared by two
            tensor ranks each. None when all coordinates belong together.
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
    def gradient_group(self) -> GroupSpec:
        """Ranks over which gradients of uncut parameters are summed."""
        return self.normalise(GroupSpec(tuple(axis.name for axis in self.axes if axis.gradients != "none")))

    @property
    def gradient_divisor(self) -> int:
        """What that sum is divided by: the product of all axes along which gradients are averaged."""
        return math.prod(axis.degree for axis in self.axes if axis.gradients == "average")

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
        """Return axis names in mesh order, split axes replaced by their parts.

        Axes of core that the mesh lacks are left out: they have degree 1 and change nothing.

        Raises:
            UsageError: A name is neither an axis of the mesh nor one that core knows.
        """
        wanted = set(axes)
        known = {*BASE_AXES, *(name for axis in self.axes for name in (axis.name, axis.part_of))}
        for name in sorted(wanted - known):
            self.axis(name)
        return tuple(axis.name for axis in self.axes if axis.name in wanted or axis.part_of in wanted)

    def everyone(self) -> GroupSpec:
        """Return the group of all ranks."""
        return self.without()

    def without(self, *axes: str) -> GroupSpec:
        """Return the group of all ranks that have the same coordinates along some axes.

        It is who holds a part of a parameter that is cut over these axes and over nothing else.
        """
        fixed = self.expand(axes)
        return self.normalise(GroupSpec(tuple(name for name in self.names if name not in fixed)))

    def members(self, spec: GroupSpec, rank: int) -> tuple[int, ...]:
        """Return the ranks in the group of ``rank``, ascending; only the rank itself when no block holds it.

        Raises:
            UsageError: An axis is unknown, or the blocks overlap or hold what is no coordinate.
        """
        return _members(self, spec, rank)

    def enumerate(self, spec: GroupSpec) -> tuple[tuple[int, ...], ...]:
        """Return every group of the spec, in a fixed order that is the same on all ranks.

        Ranks that no block holds are left out. This is what the collective creation of groups runs over.

        Raises:
            UsageError: See :meth:`members`.
        """
        inner = set(self.expand(spec.axes))
        outer = [axis for axis in self.axes if axis.name not in inner]
        found: list[tuple[int, ...]] = []
        for place in itertools.product(*(range(axis.degree) for axis in outer)):
            fixed = {axis.name: value for axis, value in zip(outer, place, strict=True)}
            found.extend(_groups_like(self, spec, fixed))
        return tuple(found)

    def normalise(self, spec: GroupSpec) -> GroupSpec:
        """Return the one spec of all that mean these groups: fewest axes, mesh order, no block of one rank.

        Raises:
            UsageError: See :meth:`members`.
        """
        axes = tuple(name for name in self.expand(spec.axes) if self.axis(name).degree > 1)
        if spec.blocks is None:
            return GroupSpec(axes)
        order = [_spelled(self, spec).index(name) for name in axes]
        blocks = {
            frozenset(tuple(place[index] for index in order) for place in block)
            for block in _blocks(self, spec)
            if len(block) > 1
        }
        for name in axes:
            kept = tuple(other for other in axes if other != name)
            dropped = _drop_axis(blocks, axes.index(name), self.axis(name).degree)
            if dropped is not None:
                axes, blocks = kept, dropped
        if blocks == {frozenset(itertools.product(*(range(self.axis(name).degree) for name in axes)))}:
            return GroupSpec(axes)
        if not blocks:
            return GroupSpec()
        return GroupSpec(axes, tuple(sorted(tuple(sorted(block)) for block in blocks)))

    def product(self, specs: Sequence[GroupSpec]) -> GroupSpec:
        """Return the group of ranks that any chain of the given groups connects.

        Groups over different axes multiply: KV heads shared by two tensor ranks, times four data ranks, are
        eight holders of one part.
        """
        if all(spec.blocks is None for spec in specs):
            return self.normalise(GroupSpec(tuple(name for spec in specs for name in spec.axes)))

        def connect(rank: int) -> frozenset[int]:
            reached, frontier = frozenset[int](), frozenset({rank})
            while frontier:
                reached |= frontier
                frontier = frozenset(m for r in frontier for s in specs for m in self.members(s, r)) - reached
            return reached

        return self._spec_of(self.expand(name for spec in specs for name in spec.axes), connect)

    def intersection(self, specs: Sequence[GroupSpec]) -> GroupSpec:
        """Return the group of ranks that are together in every given group.

        It is who still holds a part once it is cut further: ``part.holders`` and ``without("tensor")``.

        Args:
            specs: At least one group.
        """
        axes = [self.expand(spec.axes) for spec in specs]
        if all(spec.blocks is None for spec in specs):
            common = set(axes[0]).intersection(*axes)
            return self.normalise(GroupSpec(tuple(common)))

        def meet(rank: int) -> frozenset[int]:
            return frozenset.intersection(*(frozenset(self.members(spec, rank)) for spec in specs))

        return self._spec_of(self.expand(itertools.chain(*axes)), meet)

    def _spec_of(self, axes: tuple[str, ...], members: Callable[[int], frozenset[int]]) -> GroupSpec:
        """Return the spec of groups that are given by the members of each rank, who differ along ``axes``."""
        places = [self.coordinates(rank) for rank in range(self.world_size)]
        blocks: set[tuple[Coordinates, ...]] = set()
        pending = set(range(self.world_size))
        while pending:
            group = members(min(pending))
            pending -= group
            blocks.add(tuple(sorted(tuple(places[rank][name] for name in axes) for rank in group)))
        return self.normalise(GroupSpec(axes, tuple(sorted(blocks))))


@functools.lru_cache(maxsize=4096)
def _members(layout: MeshLayout, spec: GroupSpec, rank: int) -> tuple[int, ...]:
    """Return the group of a rank; kept, since every part of every parameter asks for the same few groups."""
    for group in _groups_like(layout, spec, layout.coordinates(rank)):
        if rank in group:
            return group
    return (rank,)


def _spelled(layout: MeshLayout, spec: GroupSpec) -> tuple[str, ...]:
    """Return the axes of a spec in the order in which its blocks give coordinates."""
    return tuple(dict.fromkeys(part for name in spec.axes for part in layout.expand((name,))))


def _blocks(layout: MeshLayout, spec: GroupSpec) -> Sequence[Sequence[Coordinates]]:
    """Return the blocks of a spec: its own, or one with all coordinates.

    Raises:
        UsageError: Blocks overlap, or hold what is no coordinate.
    """
    axes = [layout.axis(name) for name in _spelled(layout, spec)]
    if spec.blocks is None:
        return [list(itertools.product(*(range(axis.degree) for axis in axes)))]
    seen: set[Coordinates] = set()
    for place in itertools.chain(*spec.blocks):
        inside = len(place) == len(axes) and all(
            0 <= index < axis.degree for index, axis in zip(place, axes, strict=True)
        )
        if not inside or place in seen:
            shown = " x ".join(f"{axis.name}({axis.degree})" for axis in axes) or "no axis"
            problem = f"holds {place} twice" if inside else f"holds {place}, which is outside"
            raise UsageError(
                f"a group with blocks over {shown} {problem}",
                hint="blocks are disjoint sets of coordinates along the group's axes, in their order",
            )
        seen.add(place)
    return spec.blocks


def _groups_like(layout: MeshLayout, spec: GroupSpec, fixed: Mapping[str, int]) -> Iterable[tuple[int, ...]]:
    """Yield the groups of a spec for fixed coordinates on the axes outside it."""
    axes = _spelled(layout, spec)
    outside = {name: value for name, value in fixed.items() if name not in axes}
    for block in _blocks(layout, spec):
        places = [dict(zip(axes, coordinates, strict=True)) for coordinates in block]
        yield tuple(sorted(layout.rank({**outside, **place}) for place in places))


def _drop_axis(
    blocks: set[frozenset[Coordinates]], position: int, degree: int
) -> set[frozenset[Coordinates]] | None:
    """Return blocks without one axis, or None when they say something about it.

    They say nothing when no block varies along it and the same blocks stand at every coordinate.
    """
    found: dict[frozenset[Coordinates], set[int]] = {}
    for block in blocks:
        values = {place[position] for place in block}
        if len(values) > 1:
            return None
        rest = frozenset(place[:position] + place[position + 1 :] for place in block)
        found.setdefault(rest, set()).update(values)
    return set(found) if all(len(values) == degree for values in found.values()) else None
