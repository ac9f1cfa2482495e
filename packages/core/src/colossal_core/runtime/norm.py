"""The one routine for the gradient norm, for clipping and for non-finite gradients, whatever the plan.

The one idea: the table says how many ranks hold each element, so the squared norm of the serial model is a
weighted sum of the squares of what each rank holds, and one message of 8 bytes finishes it. Infinities and
NaNs survive sums, so the same message agrees whether a gradient is not finite: no rank can decide alone.
Everything accumulates in fp64, hence the norm of finite fp32 gradients is finite, and its bits hardly depend
on how the gradients are cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, final

import torch
from attrs import frozen

from colossal_core.boxes import Box, flat_range_boxes
from colossal_core.errors import UsageError

if TYPE_CHECKING:
    from colossal_core.runtime.collectives import Collectives
    from colossal_core.runtime.mesh import Group
    from colossal_core.runtime.table import ParameterTable, Place

__all__ = ["EarlySums", "NormPiece", "clip_factor", "gradient_norm", "non_finite_names", "norm_pieces"]

CHUNK_NUMEL = 1 << 16
"""Elements squared at a time on CPU: 512 KiB of fp64 stay in the second-level cache. 15M fp32 elements take
about 8 ms on one core where ``vector_norm(dtype=float64)`` takes 53."""

CLIP_EPSILON = 1e-6
"""Added to the norm before dividing, as in ``torch.nn.utils.clip_grad_norm_``."""


@frozen(eq=False)
class NormPiece:
    """Some gradient elements that count alike.

    Attributes:
        tensor: The elements, any shape.
        weight: Factor of their squares: 1 / (number of ranks that hold the same elements).
        scale: Factor of the elements themselves: 1 / (divisor of the gradient sum).
        names: The parameters that they belong to, as ``model.name``.
        place: Where the elements lie.
    """

    tensor: torch.Tensor
    weight: float
    scale: float
    names: tuple[str, ...]
    place: Place


@final
class EarlySums:
    """Squares that were summed while other gradients were on their way; the bits are those of later sums."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._sums: dict[NormPiece, tuple[int, torch.Tensor]] = {}

    def begin(self, pieces: Iterable[NormPiece]) -> Callable[[torch.Tensor], None]:
        """Forget everything, and return what sums the pieces that share memory with a tensor."""
        self._sums.clear()
        by_memory: dict[int, list[NormPiece]] = {}
        for piece in pieces:
            if piece.tensor.device.type == "cpu" and piece.place.home is None:
                by_memory.setdefault(piece.tensor.untyped_storage()._cdata, []).append(piece)

        def measure(tensor: torch.Tensor) -> None:
            for piece in by_memory.get(tensor.untyped_storage()._cdata, ()):
                self._sums[piece] = (piece.tensor._version, _power_sum(piece.tensor, 2.0))

        return measure

    def take(self, piece: NormPiece) -> torch.Tensor | None:
        """Return the sum of a piece that was not written since."""
        version, total = self._sums.pop(piece, (-1, None))
        return total if version == piece.tensor._version else None


def norm_pieces(table: ParameterTable, places: Iterable[Place], rank: int) -> list[NormPiece]:
    """Cut gradients into pieces of equal weight; neighbours in memory with equal weights become one.

    Args:
        table: Says who holds what.
        places: Where the gradients live on this rank.
        rank: This rank, for the sizes of its groups.
    """
    pieces: list[NormPiece] = []
    for place in places:
        for piece in _pieces_of(table, place, rank):
            merged = _merge(pieces[-1], piece) if pieces else None
            if merged is None:
                pieces.append(piece)
            else:
                pieces[-1] = merged
    return pieces


def gradient_norm(
    pieces: Sequence[NormPiece],
    everyone: Group,
    collectives: Collectives,
    *,
    norm_type: float = 2.0,
    early: EarlySums | None = None,
) -> float:
    """Return the norm of all gradients of the serial models; collective over all ranks.

    One message of 8 bytes.

    Args:
        pieces: This rank's pieces from :func:`norm_pieces`.
        everyone: All ranks.
        collectives: Where the message goes.
        norm_type: Any positive order, or infinity.
        early: Sums of squares that are known; for order 2.

    Returns:
        The norm, the same on all ranks; NaN or infinite when any gradient on any rank is.

    Raises:
        UsageError: ``norm_type`` is not positive.
    """
    if not norm_type > 0:
        raise UsageError(f"norm_type is {norm_type!r}", hint="use a positive order, such as 2.0 or math.inf")
    total = torch.zeros((), dtype=torch.float64, device=everyone.device)
    if math.isinf(norm_type):
        for piece in pieces:
            if piece.tensor.numel():
                with piece.place.present():
                    largest = torch.linalg.vector_norm(piece.tensor, math.inf).double() * piece.scale
                # The larger of two numbers is no NaN on every backend; an infinity tells the same.
                total = torch.maximum(total, largest.nan_to_num(nan=math.inf, posinf=math.inf))
        collectives.all_reduce(total, everyone, phase="norm", op="max").wait()
        return float(total)
    for piece in pieces:
        power = early.take(piece) if early is not None and norm_type == 2.0 else None
        if power is None:
            with piece.place.present():
                power = _power_sum(piece.tensor, norm_type)
        total += power * (piece.weight * piece.scale**norm_type)
    collectives.all_reduce(total, everyone, phase="norm").wait()
    return math.pow(float(total), 1 / norm_type)


def clip_factor(norm: float, max_norm: float | None) -> float:
    """Return the factor that brings the norm of gradients to at most ``max_norm``; 1.0 without a bound."""
    return 1.0 if max_norm is None else min(1.0, max_norm / (norm + CLIP_EPSILON))


def non_finite_names(pieces: Iterable[NormPiece], places: Iterable[Place]) -> list[str]:
    """Return the parameters with a non-finite gradient on this rank, in the order of ``places``.

    They are named ``model.name``: two models may have parameters of one name. Padding is part of places, and
    not of pieces, so it blames nobody.
    """
    blamed = [piece.names for piece in pieces if not _is_finite(piece.place, piece.tensor)]
    certain = {names[0] for names in blamed if len(names) == 1}
    possible = {name for names in blamed for name in names} - certain
    found = [
        name
        for name, place in ((".".join(place.key), place) for place in places)
        if name in certain or (name in possible and not _is_finite(place, place.tensor))
    ]
    return list(dict.fromkeys(found))


def _is_finite(place: Place, tensor: torch.Tensor) -> bool:
    """Whether all elements of what lies in a place are finite."""
    with place.present():
        return bool(torch.isfinite(tensor).all())


def _power_sum(tensor: torch.Tensor, order: float) -> torch.Tensor:
    """Return the sum of ``|x| ** order`` as a 0-d fp64 tensor."""
    flat = tensor.reshape(-1)
    if order != 2.0:
        # No in-place step before there is a copy: in fp64, double() returns the gradients themselves.
        powers: torch.Tensor = flat.double().abs().pow_(order)
        return powers.sum()
    if flat.device.type != "cpu":
        norm: torch.Tensor = torch.linalg.vector_norm(flat, dtype=torch.float64)
        return norm.square()
    total = torch.zeros((), dtype=torch.float64)
    scratch = None
    if flat.dtype != torch.float64:
        scratch = torch.empty(min(CHUNK_NUMEL, flat.numel()), dtype=torch.float64)
    for start in range(0, flat.numel(), CHUNK_NUMEL):
        chunk = flat[start : start + CHUNK_NUMEL]
        wide = chunk if scratch is None else scratch[: chunk.numel()].copy_(chunk)
        total += torch.dot(wide, wide)
    return total


def _merge(left: NormPiece, right: NormPiece) -> NormPiece | None:
    """Return one piece for two that lie behind each other in memory and count alike, else None."""
    a, b = left.tensor, right.tensor
    if (
        (left.weight, left.scale, a.dtype) != (right.weight, right.scale, b.dtype)
        or a.dim() != 1
        or b.dim() != 1
    ):
        return None
    if left.place.home is not right.place.home:
        return None
    same_memory = a.untyped_storage()._cdata == b.untyped_storage()._cdata
    if not same_memory or a.storage_offset() + a.numel() != b.storage_offset():
        return None
    joined = a.as_strided((a.numel() + b.numel(),), (1,))
    return NormPiece(joined, left.weight, left.scale, left.names + right.names, left.place)


def _pieces_of(table: ParameterTable, place: Place, rank: int) -> Iterator[NormPiece]:
    """Yield the pieces of one place: one when all of it counts alike, else one per part and row range."""
    entry = table[place.key]
    layout = table.layout
    copies = len(layout.members(place.sharded_over, rank))
    weights = [copies / len(layout.members(part.holders, rank)) for part in entry.parts]
    local_shape = tuple(table.tensor(entry).shape)
    scale = 1.0 / entry.divisor
    if place.tensor.numel() == 0:
        return
    if len(set(weights)) == 1 and sum(part.box.volume for part in entry.parts) == math.prod(local_shape):
        yield NormPiece(place.tensor.view(-1), weights[0], scale, (".".join(entry.key),), place)
        return
    flat = place.tensor.view(-1)
    for box, first in flat_range_boxes(local_shape, place.start, place.start + flat.numel()):
        window = flat[first - place.start : first - place.start + box.volume].view(box.size)
        for part, weight in zip(entry.parts, weights, strict=True):
            common = box.intersect(Box(part.local, part.box.size))
            if common is not None:
                inside = common.shifted([-start for start in box.offset])
                yield NormPiece(window[inside.slices], weight, scale, (".".join(entry.key),), place)
