"""From the axes of pieces to the layout of ranks: which axes there are, in which order, with which degrees.

Axes have a fixed order, outermost to innermost: ``pipeline, replica, data, sequence, tensor``. A piece may
place a new axis just inside one of them, or split one into named parts, whose degrees multiply to the degree
of the whole. ``data`` is core's own; when its degree is ``"auto"`` it takes what the others leave of the
world.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias, final

import attrs

from colossal_core.errors import ColossalError, PlanError
from colossal_core.mesh.axes import BASE_AXES, DATA_AXIS
from colossal_core.mesh.layout import Axis, MeshLayout
from colossal_core.plugins.records import PHASES, AxisSpec, StrategySpec

if TYPE_CHECKING:
    from colossal_core.plan import PlannedPiece

__all__ = ["Degree", "PlannedAxis", "arrange", "find_axis_problems", "list_axes", "order_strategies"]

Degree: TypeAlias = int | Literal["auto"]


@final
@attrs.frozen
class PlannedAxis:
    """An axis that exists under the options of its piece.

    Attributes:
        spec: What the record says.
        degree: The degree by the options; None for a part that takes the rest.
        piece: Name of the piece.
    """

    spec: AxisSpec
    degree: int | None
    piece: str


def list_axes(pieces: Iterable[PlannedPiece]) -> tuple[PlannedAxis, ...]:
    """Return the axes that exist, in the order of the pieces and their records.

    An axis whose degree attribute is None does not exist; a part that would take the rest exists when another
    part of the same axis does.

    Raises:
        PlanError: A degree is not an integer of at least 1.
    """
    found = []
    for piece in pieces:
        for spec in piece.record.axes:
            degree = None if spec.takes_rest else _read_degree(piece, spec)
            if spec.takes_rest or degree is not None:
                found.append(PlannedAxis(spec, degree, piece.name))
    split = {axis.spec.part_of for axis in found if axis.degree is not None}
    return tuple(axis for axis in found if axis.degree is not None or axis.spec.part_of in split)


def _read_degree(piece: PlannedPiece, spec: AxisSpec) -> int | None:
    """Return the degree of an axis from the options.

    Raises:
        PlanError: It is not an integer of at least 1, or the options have no such attribute.
    """
    try:
        degree: object = getattr(piece.options, spec.degree)
    except AttributeError as err:
        raise PlanError(
            f"piece {piece.name!r} has no {spec.degree!r}, which is to hold the degree of axis {spec.name!r}",
            hint=f"this is a fault of plugin {piece.plugin!r}",
        ) from err
    if degree is None:
        return None
    if not isinstance(degree, int) or isinstance(degree, bool) or degree < 1:
        raise PlanError(
            f"piece {piece.name!r}: {spec.degree} is {degree!r}, expected an integer of at least 1",
            hint="only the data axis can be 'auto'"
            if degree == "auto"
            else "give the number of ranks along it",
        )
    return degree


def find_axis_problems(pieces: Sequence[PlannedPiece], data: Degree) -> list[ColossalError]:
    """Return everything that is wrong with the axes of a plan, whatever the size of the world."""
    problems: list[ColossalError] = []
    for piece in pieces:
        try:
            list_axes([piece])
        except PlanError as err:
            problems.append(err)
    if problems:
        return problems
    axes = list_axes(pieces)
    owners: dict[str, str] = {}
    for axis in axes:
        owner = owners.setdefault(axis.spec.name, axis.piece)
        if owner != axis.piece:
            message = f"pieces {owner!r} and {axis.piece!r} both bring the axis {axis.spec.name!r}"
            problems.append(PlanError(message, hint="keep one of them"))
    if problems:
        return problems
    order = _order_wholes(axes)
    for axis in axes:
        anchor = axis.spec.part_of or axis.spec.inside_of
        if (axis.spec.part_of or axis.spec.name) not in order:
            message = (
                f"axis {axis.spec.name!r} of piece {axis.piece!r} goes with {anchor!r}, which no piece brings"
            )
            problems.append(PlanError(message, hint=f"add the piece that brings the axis {anchor!r}"))
    for whole in order:
        problems.extend(_find_split_problems(whole, axes, data))
    return problems


def _find_split_problems(whole: str, axes: Sequence[PlannedAxis], data: Degree) -> list[ColossalError]:
    """Return what is wrong with the parts of one axis."""
    parts = [axis for axis in axes if axis.spec.part_of == whole]
    rests = [axis for axis in parts if axis.degree is None]
    product = math.prod(axis.degree or 1 for axis in parts)
    degree = data if whole == DATA_AXIS else _find_degree(whole, axes)
    shown = " x ".join(f"{axis.spec.name}({axis.degree or 'rest'})" for axis in parts)
    if len(rests) > 1:
        message = f"{rests[0].spec.name!r} and {rests[1].spec.name!r} both take the rest of axis {whole!r}"
        return [PlanError(message, hint="give one of them a degree")]
    if rests and degree is None:
        message = f"{rests[0].spec.name!r} takes the rest of axis {whole!r}, whose degree no piece gives"
        return [PlanError(message, hint=f"add the piece that brings the axis {whole!r}")]
    if not parts or not isinstance(degree, int):
        return []
    if product != degree and (not rests or degree % product):
        expected = "must divide" if rests else "must equal"
        message = (
            f"{shown} = {product} along the parts of axis {whole!r}, which {expected} its degree of {degree}"
        )
        return [PlanError(message, hint="change one of the degrees")]
    return []


def _find_degree(whole: str, axes: Iterable[PlannedAxis]) -> int | None:
    """Return the degree that a piece gives to an axis as a whole, or None."""
    return next((axis.degree for axis in axes if axis.spec.name == whole and axis.spec.part_of is None), None)


def _order_wholes(axes: Sequence[PlannedAxis]) -> list[str]:
    """Return the names of all axes that are not parts, outermost first, absent base axes included.

    An axis whose anchor is nowhere is left out.
    """
    order = list(BASE_AXES)
    # Sorted in reverse, each going directly behind its anchor, new axes inside one anchor end up in order of
    # names.
    pending = sorted(
        (a.spec for a in axes if a.spec.part_of is None), key=lambda spec: spec.name, reverse=True
    )
    pending = [spec for spec in pending if spec.name not in order]
    while placeable := [spec for spec in pending if spec.inside_of in order]:
        for spec in placeable:
            order.insert(order.index(str(spec.inside_of)) + 1, spec.name)
        pending = [spec for spec in pending if spec not in placeable]
    return order


def arrange(pieces: Sequence[PlannedPiece], data: Degree, world_size: int) -> MeshLayout:
    """Return the layout of ranks.

    The axes of the layout are those that pieces bring, and ``data``, outermost first; parts stand in place of
    the axis that they split.

    Args:
        pieces: Pieces of a valid plan.
        data: Degree of the data axis, or ``"auto"``.
        world_size: Number of ranks, at least 1.

    Raises:
        PlanError: The degrees do not multiply to the world. Shows the arithmetic.
    """
    axes = list_axes(pieces)
    order = _order_wholes(axes)
    degrees: dict[str, int] = {}
    for whole in order:
        parts = [axis for axis in axes if axis.spec.part_of == whole]
        degree = _find_degree(whole, axes)
        if degree is not None or (parts and whole != DATA_AXIS):
            degrees[whole] = degree or math.prod(axis.degree or 1 for axis in parts)
    share = math.prod(axis.degree or 1 for axis in axes if axis.spec.part_of == DATA_AXIS)
    degrees[DATA_AXIS] = _fit_data(degrees, order, data, world_size, share=share)
    found: list[Axis] = []
    for whole in order:
        if whole in degrees:
            found.extend(_expand(whole, degrees[whole], axes))
    return MeshLayout(tuple(found))


def _fit_data(
    others: Mapping[str, int], order: Sequence[str], data: Degree, world_size: int, *, share: int
) -> int:
    """Return the degree of the data axis, after checking the product of all degrees against the world.

    Args:
        others: Degrees of all axes but data.
        order: All axes, outermost first.
        data: What the plan says.
        world_size: Number of ranks.
        share: Product of the parts of the data axis, which must divide its degree; 1 without parts.
    """
    product = math.prod(others.values())
    if data == "auto":
        shown = _multiply({**others, f"parts of {DATA_AXIS}": share} if share > 1 else others, order)
        needed = product * share
        if world_size % needed == 0 and world_size >= needed:
            return world_size // product
        more = -(-world_size // needed) * needed
        fewer = (world_size // needed) * needed
        start = f"start {fewer} or {more} processes" if fewer else f"start {more} processes"
        raise PlanError(
            f"{shown} = {needed} ranks, and the world of {world_size} is not a multiple of that",
            hint=f"{start}, or change a degree",
        )
    total = product * data
    if total != world_size:
        shown = _multiply({**others, DATA_AXIS: data}, order)
        raise PlanError(
            f"{shown} = {total} ranks, but the world has {world_size}",
            hint=f"{'lower' if total > world_size else 'raise'} one degree or start {total} processes",
        )
    return data


def _multiply(degrees: Mapping[str, int], order: Sequence[str]) -> str:
    """Print a product of degrees, outermost first: ``pipeline(2) x data(2) x tensor(4)``."""
    names = sorted(degrees, key=lambda name: order.index(name) if name in order else len(order))
    return " x ".join(f"{name}({degrees[name]})" for name in names)


def _expand(whole: str, degree: int, axes: Sequence[PlannedAxis]) -> list[Axis]:
    """Return an axis, or the parts that stand in its place."""
    parts = [axis for axis in axes if axis.spec.part_of == whole]
    if parts:
        rest = degree // math.prod(axis.degree or 1 for axis in parts)
        return [_make_axis(axis.spec, axis.degree or rest) for axis in parts]
    if whole == DATA_AXIS:
        return [Axis(name=DATA_AXIS, degree=degree, divides_batch=True, gradients="average")]
    return [_make_axis(axis.spec, degree) for axis in axes if axis.spec.name == whole]


def _make_axis(spec: AxisSpec, degree: int) -> Axis:
    """Return the axis of a layout for a record."""
    return Axis(
        name=spec.name,
        degree=degree,
        divides_batch=spec.divides_batch,
        gradients=spec.gradients,
        part_of=spec.part_of,
    )


def order_strategies(strategies: Iterable[PlannedPiece]) -> tuple[PlannedPiece, ...]:
    """Return strategies in the order in which they cut: by phase, then outermost axis first, then by name.

    Phases come first because a transformed module must see what sharding left of it, whichever axis is
    outside. Strategies without an axis are last in their phase.
    """
    pieces = sorted(strategies, key=lambda piece: piece.qualified_name)
    order = _order_wholes([PlannedAxis(spec, 1, p.name) for p in pieces for spec in p.record.axes])

    def find_position(piece: PlannedPiece) -> tuple[int, int]:
        """Return phase and place of the outermost axis."""
        phase = PHASES.index(piece.record.phase) if isinstance(piece.record, StrategySpec) else len(PHASES)
        names = {spec.part_of or spec.name for spec in piece.record.axes}
        return phase, min((order.index(name) for name in names if name in order), default=len(order))

    return tuple(sorted(pieces, key=find_position))
