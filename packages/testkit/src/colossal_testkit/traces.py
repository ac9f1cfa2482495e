"""What runs report, and how far two of them may be apart.

A trace holds the numbers of one rank. Losses and norms are the same on all ranks; weights may be cut, so each
rank reports boxes of them, and comparing starts by putting the boxes together.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import final

import attrs
import torch

__all__ = [
    "FP32",
    "FP64",
    "ParityError",
    "Slab",
    "Tolerance",
    "Trace",
    "compare_tensors",
    "compare_traces",
    "digest_of",
    "distance_of",
    "join_slabs",
]


class ParityError(AssertionError):
    """A run differs from its reference by more than the tolerance. Lists what differs, the worst first."""


@final
@attrs.frozen(kw_only=True)
class Tolerance:
    """How much a run may differ.

    Attributes:
        name: For messages.
        relative: Bound of the difference, relative to the largest element of the reference tensor, or to 1
            when that is smaller.
        reason: Why it is not zero.
    """

    name: str
    relative: float
    reason: str

    def bound_of(self, reference: torch.Tensor) -> float:
        """Return the largest difference that is allowed, in the unit of the tensor."""
        largest = float(reference.abs().max()) if reference.numel() else 0.0
        return self.relative * max(largest, 1.0)


FP64 = Tolerance(name="fp64", relative=1e-10, reason="only the order of sums differs")
FP32 = Tolerance(
    name="fp32", relative=1e-4, reason="only the order of sums differs, over a few optimizer steps"
)


@final
@attrs.frozen(kw_only=True, eq=False)
class Slab:
    """A box of a parameter, with its values.

    Attributes:
        shape: Of the whole parameter.
        offset: First index of the box along each dim.
        values: Of the box's shape.
    """

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    values: torch.Tensor


@final
@attrs.frozen(kw_only=True, eq=False)
class Trace:
    """What a run reports on one rank.

    Attributes:
        losses: Of each step, over the global batch; 0-d, in the dtype that they came in.
        norms: Gradient norm of each step, before clipping.
        slabs: By serial name, what the rank holds of each weight at the end; one whole box where nothing is
            cut.
    """

    losses: Sequence[torch.Tensor]
    norms: Sequence[float]
    slabs: Mapping[str, Sequence[Slab]]

    @property
    def digest(self) -> str:
        """A hash of names and exact values of the weights that the rank holds."""
        return digest_of(
            {name: torch.cat([s.values.flatten() for s in held]) for name, held in self.slabs.items()}
        )


def compare_traces(traces: Sequence[Trace], reference: Trace, tolerance: Tolerance) -> None:
    """Compare losses, gradient norms and weights of a run with its reference, and its ranks with each other.

    Raises:
        ParityError: Something differs by more than the tolerance; lists every such thing, the worst first. Or
            ranks report different bits of what they should have in common.
    """
    for rank, trace in enumerate(traces[1:], start=1):
        _compare_numbers(trace, traces[0], rank)
    _raise_findings(_differences(traces, reference, tolerance), tolerance)


def _raise_findings(findings: Iterator[tuple[float, str]], tolerance: Tolerance) -> None:
    """Raise with all findings, the worst first, when there are any."""
    found = sorted(findings, reverse=True)
    if found:
        lines = "\n".join(f"  {text}" for _, text in found[:20])
        head = f"{len(found)} differences from one plain process ({tolerance.name}: {tolerance.reason})"
        raise ParityError(f"{head}:\n{lines}")


def compare_tensors(
    mine: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor], tolerance: Tolerance
) -> None:
    """Compare tensors by name.

    Raises:
        ParityError: One is missing on either side, or differs by more than the tolerance.
    """
    _raise_findings(_named_differences("", mine, reference, tolerance), tolerance)


def distance_of(traces: Sequence[Trace], reference: Trace) -> float:
    """Return the norm of the difference of all weights, relative to that of the reference's weights."""
    mine, theirs = join_slabs(traces), join_slabs([reference])
    gaps = torch.cat([(mine[name].double() - theirs[name].double()).flatten() for name in theirs])
    sizes = torch.cat([theirs[name].double().flatten() for name in theirs])
    return float(gaps.norm() / sizes.norm())


def join_slabs(traces: Sequence[Trace]) -> dict[str, torch.Tensor]:
    """Put the weights of all ranks together.

    Raises:
        ParityError: An element is held by no rank, or two ranks hold different bits of it.
    """
    joined: dict[str, torch.Tensor] = {}
    filled: dict[str, torch.Tensor] = {}
    for rank, trace in enumerate(traces):
        for name, held in trace.slabs.items():
            for slab in held:
                whole = joined.setdefault(name, torch.zeros(slab.shape, dtype=slab.values.dtype))
                known = filled.setdefault(name, torch.zeros(slab.shape, dtype=torch.bool))
                box = tuple(
                    slice(start, start + n) for start, n in zip(slab.offset, slab.values.shape, strict=True)
                )
                if not _agrees(whole[box][known[box]], slab.values[known[box]]):
                    raise ParityError(f"rank {rank} holds other bits of {name!r} than a rank before it")
                whole[box], known[box] = slab.values, True
    for name, known in filled.items():
        if not bool(known.all()):
            raise ParityError(f"{int((~known).sum())} of {known.numel()} elements of {name!r} are on no rank")
    return joined


def _differences(
    traces: Sequence[Trace], reference: Trace, tolerance: Tolerance
) -> Iterator[tuple[float, str]]:
    """Yield what differs: how many times the bound, and the words."""
    for step, (mine, theirs) in enumerate(zip(traces[0].losses, reference.losses, strict=True)):
        # A loss that was reported in fp32 cannot be better than that.
        precision = torch.finfo(mine.dtype).eps if mine.is_floating_point() else 0.0
        at_least = attrs.evolve(tolerance, relative=max(tolerance.relative, 2 * precision))
        yield from _difference(f"loss of step {step}", mine, theirs, at_least)
    for step, (mine_norm, their_norm) in enumerate(zip(traces[0].norms, reference.norms, strict=True)):
        pair = torch.tensor([mine_norm, their_norm], dtype=torch.float64)
        yield from _difference(f"gradient norm of step {step}", pair[0], pair[1], tolerance)
    yield from _named_differences("weight ", join_slabs(traces), join_slabs([reference]), tolerance)


def _named_differences(
    kind: str, mine: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor], tolerance: Tolerance
) -> Iterator[tuple[float, str]]:
    """Yield the differences of tensors by name."""
    for name in sorted(mine.keys() | reference.keys()):
        if name not in mine or name not in reference:
            yield math.inf, f"{kind}{name!r} is on one side only"
        else:
            yield from _difference(f"{kind}{name!r}", mine[name], reference[name], tolerance)


def _difference(
    what: str, mine: torch.Tensor, reference: torch.Tensor, tolerance: Tolerance
) -> Iterator[tuple[float, str]]:
    """Yield one difference, when there is one."""
    if mine.shape != reference.shape:
        yield math.inf, f"{what}: shape {tuple(mine.shape)}, expected {tuple(reference.shape)}"
        return
    if not mine.numel():
        return
    gaps = (mine.double() - reference.double()).abs()
    bound = tolerance.bound_of(reference.double())
    # A NaN on either side compares as different from everything.
    worst = math.inf if bool(torch.isnan(gaps).any()) else float(gaps.max())
    if worst > bound:
        place = tuple(int(i) for i in torch.unravel_index(gaps.nan_to_num(math.inf).argmax(), gaps.shape))
        yield worst / bound, f"{what}: {worst:.3g} at {list(place)}, expected at most {bound:.3g}"


def _agrees(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Say whether two tensors are equal, NaN counting as equal to itself."""
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def _compare_numbers(trace: Trace, first: Trace, rank: int) -> None:
    """Raise when a rank reports other numbers than the first one, which would let them drift apart."""
    for what, mine, theirs in (
        ("losses", [loss.item() for loss in trace.losses], [loss.item() for loss in first.losses]),
        ("gradient norms", list(trace.norms), list(first.norms)),
    ):
        if mine != theirs:
            raise ParityError(f"rank {rank} has other {what} than rank 0: {mine} and {theirs}")


def digest_of(weights: Mapping[str, torch.Tensor]) -> str:
    """Return a hash of names and exact values."""
    found = hashlib.sha256()
    for name, value in sorted(weights.items()):
        found.update(name.encode())
        found.update(str(value.detach().double().flatten().tolist()).encode())
    return found.hexdigest()
