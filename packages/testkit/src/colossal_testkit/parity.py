"""Parity: a boosted run against one plain process over the same global batches.

The reference is torch alone: one process, the whole batch, ``loss.backward()``, ``clip_grad_norm_``,
``optimizer.step()``. Compared are the loss and the gradient norm of every step, and every weight at the end,
by name and with the largest difference. The ranks must also agree among themselves bit for bit about
everything that they all report.

Builders are module-level functions that return a `Workload`; they run in the processes of the ranks.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, final

import attrs
import torch

from colossal_testkit.engine import engine_of
from colossal_testkit.models import Workload
from colossal_testkit.ranks import run_ranks

if TYPE_CHECKING:
    from colossal_core.plugins import Registry
    from colossal_core.runtime.booster import Booster

__all__ = [
    "FP32",
    "FP64",
    "Loop",
    "ParityError",
    "Recipe",
    "Slab",
    "Tolerance",
    "Trace",
    "boost_workload",
    "check_parity",
    "compare_traces",
    "digest_of",
    "join_slabs",
    "reference_trace",
    "share_of",
    "train_boosted",
    "train_serial",
]

Loop = Literal["plain", "forward_backward", "twice"]
"""``plain``: the user's own backward. ``forward_backward``: the Booster's. ``twice``: two plain backward
passes, on
the two halves of the batch, before each step."""


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


def _sort_items(
    arguments: Mapping[str, object] | Iterable[tuple[str, object]],
) -> tuple[tuple[str, object], ...]:
    """Return keyword arguments in a form that hashes."""
    return tuple(sorted(dict(arguments).items()))


@final
@attrs.frozen(kw_only=True)
class Recipe:
    """How a run goes; a value that hashes, so that ranks and the reference share it.

    Attributes:
        builder: Module-level function that returns the `Workload`.
        arguments: Its keyword arguments, given as a mapping.
        loop: How backward is called.
        max_grad_norm: Bound of the gradient norm, or None.
        clips_by_hand: Whether the loop calls ``clip_grad_norm_`` itself, in the largest-element norm, instead
            of leaving it to the step.
        sets_to_none: How gradients are cleared after a step: dropped, or filled with zeros.
        adapt: Module-level function that gives the reference, which has no Booster, what the pieces add to
            the mathematics (a cap on logits, say). None where pieces change the computation and not its
            result.
    """

    builder: Callable[..., Workload]
    arguments: tuple[tuple[str, object], ...] = attrs.field(default=(), converter=_sort_items)
    loop: Loop = "plain"
    max_grad_norm: float | None = None
    clips_by_hand: bool = False
    sets_to_none: bool = True
    adapt: Callable[[Workload], Workload] | None = None

    def build(self) -> Workload:
        """Return the workload, made anew."""
        return self.builder(**dict(self.arguments))

    @property
    def norm_type(self) -> float:
        """Order of the gradient norm that this run reports and clips."""
        return math.inf if self.clips_by_hand else 2.0


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


def check_parity(
    recipe: Recipe,
    *,
    nproc: int,
    pieces: Sequence[object] = (),
    settings: Mapping[str, object] | None = None,
    registry: Callable[[], Registry] | None = None,
    tolerance: Tolerance = FP64,
    timeout_seconds: float = 30.0,
) -> list[Trace]:
    """Run a recipe through a Booster on many ranks and compare with one plain process.

    Args:
        recipe: The run.
        nproc: Number of ranks.
        pieces: Options objects or names for the Booster.
        settings: Further keywords of the Booster; precision follows the recipe's dtype unless given.
        registry: Module-level function that makes the registry; by default what is installed.
        tolerance: Bound of all differences.
        timeout_seconds: For each of the two runs.

    Returns:
        The traces of all ranks.

    Raises:
        ParityError: Something differs, from the reference or between ranks.
    """
    traces = run_ranks(
        train_boosted,
        nproc,
        recipe,
        tuple(pieces),
        dict(settings or {}),
        registry,
        timeout_seconds=timeout_seconds,
    )
    compare_traces(traces, reference_trace(recipe), tolerance)
    return traces


@functools.lru_cache(maxsize=128)
def reference_trace(recipe: Recipe) -> Trace:
    """Return the trace of the plain run, computed once in a process of its own."""
    return run_ranks(train_serial, 1, recipe, process_group=False)[0]


def train_serial(recipe: Recipe) -> Trace:
    """Train with torch alone, on the whole global batches."""
    work = recipe.build() if recipe.adapt is None else recipe.adapt(recipe.build())
    losses: list[torch.Tensor] = []
    norms: list[float] = []
    for batch in work.batches:
        parts = _halves(batch) if recipe.loop == "twice" else [batch]
        losses.append(torch.stack([_backward(work, part) for part in parts]).sum())
        norms.append(_norm_of(work.model.parameters(), recipe.norm_type))
        if recipe.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(work.model.parameters(), recipe.max_grad_norm, recipe.norm_type)
        work.optimizer.step()
        work.optimizer.zero_grad(set_to_none=recipe.sets_to_none)
    slabs = {name: [_whole(parameter)] for name, parameter in work.model.named_parameters()}
    return Trace(losses=losses, norms=norms, slabs=slabs)


def boost_workload(
    recipe: Recipe,
    pieces: Sequence[object] = (),
    settings: Mapping[str, object] | None = None,
    registry: Callable[[], Registry] | None = None,
    *,
    work: Workload | None = None,
) -> tuple[Booster, Workload]:
    """Build a workload on this rank and boost it; return the Booster and the boosted workload.

    Args:
        recipe: The run; its ``max_grad_norm`` becomes the Booster's.
        pieces: Options objects or names.
        settings: Further keywords of the Booster.
        registry: What makes the registry; by default what is installed.
        work: What is boosted; by default what the recipe builds.
    """
    from colossal_core.runtime.booster import Booster

    work = recipe.build() if work is None else work
    dtypes = {parameter.dtype for parameter in work.model.parameters()}
    keywords: dict[str, Any] = {
        "precision": "fp64" if torch.float64 in dtypes else "fp32",
        "max_grad_norm": None if recipe.clips_by_hand else recipe.max_grad_norm,
        **(settings or {}),
    }
    booster = Booster(*pieces, registry=None if registry is None else registry(), **keywords)
    model, optimizer = booster.boost(work.model, work.optimizer)
    return booster, attrs.evolve(work, model=model, optimizer=optimizer)


def train_boosted(
    recipe: Recipe,
    pieces: Sequence[object] = (),
    settings: Mapping[str, object] | None = None,
    registry: Callable[[], Registry] | None = None,
) -> Trace:
    """Train through a Booster on this rank's shares of the global batches; collective over all ranks."""
    booster, work = boost_workload(recipe, pieces, settings, registry)
    optimizer: Any = work.optimizer
    losses: list[torch.Tensor] = []
    norms: list[float] = []
    for batch in work.batches:
        if recipe.loop == "forward_backward":
            share = share_of(batch, booster.data_rank, booster.data_degree)
            losses.append(booster.forward_backward(work.model, share, work.criterion))
        else:
            parts = _halves(batch) if recipe.loop == "twice" else [batch]
            shares = [share_of(part, booster.data_rank, booster.data_degree, equal=True) for part in parts]
            mine = torch.stack([_backward(work, share) for share in shares]).sum()
            losses.append(torch.tensor(booster.mean(mine), dtype=torch.float64))
        by_hand = None
        if recipe.clips_by_hand and recipe.max_grad_norm is not None:
            by_hand = optimizer.clip_grad_norm_(recipe.max_grad_norm, norm_type=recipe.norm_type)
        optimizer.step()
        norms.append(float(optimizer.grad_norm if by_hand is None else by_hand))
        optimizer.zero_grad(set_to_none=recipe.sets_to_none)
    return Trace(losses=losses, norms=norms, slabs=_collect_slabs(booster, work.model))


def share_of(batch: Any, rank: int, degree: int, *, equal: bool = False) -> Any:
    """Return the rows of a batch that one data rank brings: a contiguous range, larger ones first.

    Args:
        batch: Tensors, in tuples, lists and mappings, with the sample as dim 0.
        rank: Data rank.
        degree: Number of data ranks.
        equal: Refuse shares of different sizes.
    """

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows."""
        if equal and len(tensor) % degree:
            raise ValueError(
                f"{len(tensor)} samples do not divide among {degree} ranks, as a plain loop needs"
            )
        return tensor.tensor_split(degree)[rank]

    return _map_tensors(cut, batch)


def compare_traces(traces: Sequence[Trace], reference: Trace, tolerance: Tolerance) -> None:
    """Compare losses, gradient norms and weights of a run with its reference, and its ranks with each other.

    Raises:
        ParityError: Something differs by more than the tolerance; lists every such thing, the worst first. Or
            ranks report different bits of what they should have in common.
    """
    for rank, trace in enumerate(traces[1:], start=1):
        _compare_numbers(trace, traces[0], rank)
    findings = sorted(_differences(traces, reference, tolerance), reverse=True)
    if findings:
        lines = "\n".join(f"  {text}" for _, text in findings[:20])
        head = f"{len(findings)} differences from one plain process ({tolerance.name}: {tolerance.reason})"
        raise ParityError(f"{head}:\n{lines}")


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
    mine_weights, their_weights = join_slabs(traces), join_slabs([reference])
    for name in sorted(mine_weights.keys() | their_weights.keys()):
        if name not in mine_weights or name not in their_weights:
            yield math.inf, f"weight {name!r} is on one side only"
        else:
            yield from _difference(f"weight {name!r}", mine_weights[name], their_weights[name], tolerance)


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


def _whole(tensor: torch.Tensor) -> Slab:
    """Return the slab of a tensor that is not cut."""
    return Slab(shape=tuple(tensor.shape), offset=(0,) * tensor.dim(), values=tensor.detach().clone())


def _collect_slabs(booster: Booster, model: torch.nn.Module) -> dict[str, list[Slab]]:
    """Return what this rank holds of each weight, by the parameter table; collective."""
    entries = {entry.name: entry for entry in engine_of(booster).context.table if entry.kind == "parameter"}
    slabs: dict[str, list[Slab]] = {}
    with booster.full_parameters(model) as full:
        for name, value in full.items():
            entry = entries[name]
            if tuple(value.shape) == entry.shape:
                slabs[name] = [_whole(value)]
                continue
            slabs[name] = []
            for part in entry.parts:
                box = tuple(slice(at, at + n) for at, n in zip(part.local, part.box.size, strict=True))
                values = value[box].detach().clone()
                slabs[name].append(Slab(shape=entry.shape, offset=part.box.offset, values=values))
    return slabs


def digest_of(weights: Mapping[str, torch.Tensor]) -> str:
    """Return a hash of names and exact values."""
    found = hashlib.sha256()
    for name, value in sorted(weights.items()):
        found.update(name.encode())
        found.update(str(value.detach().double().flatten().tolist()).encode())
    return found.hexdigest()


def _backward(work: Workload, batch: tuple[Any, torch.Tensor]) -> torch.Tensor:
    """Run forward and backward in the user's own way; return the loss."""
    inputs, target = batch
    outputs = work.model(*inputs) if isinstance(inputs, tuple) else work.model(inputs)
    loss = work.criterion(outputs, target)
    loss.backward()
    return loss.detach()


def _norm_of(parameters: Iterable[torch.nn.Parameter], norm_type: float) -> float:
    """Return the norm of all gradients that are there."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norms = [torch.linalg.vector_norm(gradient.double(), norm_type) for gradient in gradients]
    return float(torch.linalg.vector_norm(torch.stack(norms), norm_type))


def _halves(batch: tuple[Any, torch.Tensor]) -> list[Any]:
    """Return the first and the second half of a batch."""
    return [share_of(batch, half, 2) for half in range(2)]


def _map_tensors(function: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """Apply a function to every tensor in tuples, lists and mappings."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        return {key: _map_tensors(function, value) for key, value in tree.items()}
    if isinstance(tree, tuple | list):
        return type(tree)(_map_tensors(function, value) for value in tree)
    return tree
