"""Parity: a boosted run against one plain process over the same global batches.

The reference is torch alone: one process, the whole batch, ``loss.backward()``, ``clip_grad_norm_``,
``optimizer.step()``. Compared are the loss and the gradient norm of every step, and every weight at the end,
by name and with the largest difference. The ranks must also agree among themselves bit for bit about
everything that they all report.

Builders are module-level functions that return a `Workload`; they run in the processes of the ranks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Literal, final

import attrs
import torch

from colossal_testkit.engine import engine_of
from colossal_testkit.models import Workload
from colossal_testkit.ranks import run_ranks
from colossal_testkit.traces import (
    FP32,
    FP64,
    ParityError,
    Slab,
    Tolerance,
    Trace,
    compare_traces,
    digest_of,
    join_slabs,
)

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
    "collect_slabs",
    "compare_traces",
    "digest_of",
    "join_slabs",
    "reference_trace",
    "share_of",
    "take_steps",
    "train_boosted",
    "train_serial",
]

Loop = Literal["plain", "forward_backward", "twice", "held"]
"""``plain``: the user's own backward. ``forward_backward``: the Booster's. ``twice``: two plain backward
passes, on the two halves of the batch, before each step. ``held``: the same, the first inside ``no_sync``."""


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
        clears: Whether gradients are cleared at all; otherwise each step adds to what the one before left.
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
    clears: bool = True
    adapt: Callable[[Workload], Workload] | None = None

    def build(self) -> Workload:
        """Return the workload, made anew."""
        return self.builder(**dict(self.arguments))

    @property
    def norm_type(self) -> float:
        """Order of the gradient norm that this run reports and clips."""
        return math.inf if self.clips_by_hand else 2.0


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
        parts = _halves(batch) if recipe.loop in ("twice", "held") else [batch]
        losses.append(torch.stack([_backward(work, part) for part in parts]).sum())
        norms.append(_norm_of(work.model.parameters(), recipe.norm_type))
        if recipe.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(work.model.parameters(), recipe.max_grad_norm, recipe.norm_type)
        work.optimizer.step()
        if recipe.clears:
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
    losses, norms = take_steps(recipe, booster, work)
    return Trace(losses=losses, norms=norms, slabs=collect_slabs(booster, work.model))


def take_steps(recipe: Recipe, booster: Booster, work: Workload) -> tuple[list[torch.Tensor], list[float]]:
    """Take a step on this rank's share of each batch; return global losses and gradient norms; collective."""
    optimizer: Any = work.optimizer
    losses: list[torch.Tensor] = []
    norms: list[float] = []
    for batch in work.batches:
        if recipe.loop == "forward_backward":
            share = share_of(batch, booster.data_rank, booster.data_degree)
            losses.append(booster.forward_backward(work.model, share, work.criterion))
        else:
            parts = _halves(batch) if recipe.loop in ("twice", "held") else [batch]
            shares = [share_of(part, booster.data_rank, booster.data_degree, equal=True) for part in parts]
            mine = []
            for number, share in enumerate(shares):
                is_held = recipe.loop == "held" and number == 0
                with booster.no_sync() if is_held else nullcontext():
                    mine.append(_backward(work, share))
            losses.append(torch.tensor(booster.mean(torch.stack(mine).sum()), dtype=torch.float64))
        by_hand = None
        if recipe.clips_by_hand and recipe.max_grad_norm is not None:
            by_hand = optimizer.clip_grad_norm_(recipe.max_grad_norm, norm_type=recipe.norm_type)
        optimizer.step()
        norms.append(float(optimizer.grad_norm if by_hand is None else by_hand))
        if recipe.clears:
            optimizer.zero_grad(set_to_none=recipe.sets_to_none)
    return losses, norms


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


def _whole(tensor: torch.Tensor) -> Slab:
    """Return the slab of a tensor that is not cut."""
    return Slab(shape=tuple(tensor.shape), offset=(0,) * tensor.dim(), values=tensor.detach().clone())


def collect_slabs(booster: Booster, model: torch.nn.Module) -> dict[str, list[Slab]]:
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
