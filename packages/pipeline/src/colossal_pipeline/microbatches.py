"""Cutting a rank's share of a batch into micro-batches, and what each of them weighs.

The one idea: the loss of a share is the mean over what counts in it, so that of a micro-batch weighs as much
as counts in it, by the same rule as shares among ranks. Micro-batches without anything that counts weigh
nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from attrs import frozen

from colossal_core.errors import UsageError
from colossal_core.runtime.batches import Call, Weight, loss_weight
from colossal_core.runtime.trees import is_list_of_values, map_leaves

if TYPE_CHECKING:
    from torch import nn

__all__ = ["MicroBatch", "Share", "cut_share"]


@frozen(eq=False)
class MicroBatch:
    """Some rows of a share.

    Attributes:
        call: How the model and the criterion are called.
        weight: What its loss is multiplied by in the weighted sum of the share.
        rows: Which rows of the share it has.
    """

    call: Call
    weight: float
    rows: slice


@frozen(eq=False)
class Share:
    """A rank's share of a batch.

    Attributes:
        microbatches: Its micro-batches; their weights sum to :attr:`weight`, or their losses add up.
        weight: What the share weighs, None where losses are summed over all ranks.
        rule: By which rule, in words.
    """

    microbatches: tuple[MicroBatch, ...]
    weight: float | None
    rule: str


def cut_share(
    call: Call,
    batch: Any,
    criterion: Callable[..., torch.Tensor] | None,
    weight: Weight,
    model: nn.Module,
    *,
    number: int,
) -> Share:
    """Cut a share into micro-batches of sizes that differ by at most one row.

    Args:
        call: The share, on the device.
        batch: The same as the user gave it.
        criterion: The loss, or None when outputs carry it.
        weight: What the user says that the share weighs; a function also says it of each micro-batch.
        model: The model.
        number: How many micro-batches there are, unless there are fewer rows.

    Raises:
        UsageError: Nothing has rows, or it is not clear what has.
    """
    rows = _count_rows(call)
    number = max(1, min(number, rows))
    ends = [rows * index // number for index in range(number + 1)]
    slices = [slice(start, stop) for start, stop in itertools.pairwise(ends)]
    calls = [call] if number == 1 else [_cut_call(call, part, rows) for part in slices]
    total, rule = loss_weight(batch, call, criterion, weight, model)
    if callable(weight):  # the user knows what counts in any part of a batch
        counted: list[float | None] = [float(weight(_cut_batch(batch, call, part, rows))) for part in slices]
    else:
        counted = [loss_weight(piece.target, piece, criterion, None, model)[0] for piece in calls]
    given = criterion is None and call.kwargs.get("num_items_in_batch") is not None
    if total is None or given:  # losses of micro-batches are parts of a sum already
        weights = [1.0 if total is None else total] * number
    else:
        natural = sum(value or 0.0 for value in counted)
        weights = [(value or 0.0) * (total / natural if natural else 0.0) for value in counted]
    pieces = zip(calls, weights, slices, strict=True)
    return Share(tuple(MicroBatch(*piece) for piece in pieces), total, rule)


def _count_rows(call: Call) -> int:
    """Return how many samples there are, and refuse what may or may not be cut.

    They are counted where the user named their dim, else in dim 0 of the first tensor with more than one dim.
    """
    named, others = [], []
    for path, leaf in call.tensors():
        dim, is_named = call.dim_of(path)
        if is_named and dim is not None:
            named.append((path, leaf, dim))
        elif not is_named and leaf.dim() > 0:
            others.append((path, leaf, 0))
    if not named and not others:
        raise UsageError(
            "the batch holds no tensor with a batch dim, so it cannot be cut into micro-batches",
            hint="give inputs whose dim 0 is the sample, or name another dim in batch_dims",
        )
    found = named or [max(others, key=lambda entry: entry[1].dim() > 1)]
    sizes = {path: int(leaf.shape[dim]) for path, leaf, dim in found}
    if len(set(sizes.values())) > 1:
        raise UsageError(
            f"batch_dims names dims of different sizes: {sizes}",
            hint="name the dims of samples, and None for what every sample needs as a whole",
        )
    rows = next(iter(sizes.values()))
    _check_clear([(path, leaf) for path, leaf, _ in others], rows)
    return rows


def _check_clear(tensors: list[tuple[str, torch.Tensor]], rows: int) -> None:
    """Refuse indices that may count samples or positions, where there are as many of both.

    Of two dims, numbers of tokens have positions; features have none.
    """
    square = any(
        tuple(leaf.shape[:2]) == (rows, rows) and not (leaf.dim() == 2 and leaf.is_floating_point())
        for _, leaf in tensors
        if leaf.dim() > 1
    )
    for path, leaf in tensors:
        is_index = leaf.dim() == 1 and not leaf.is_floating_point() and path.startswith("inputs")
        if rows > 1 and square and is_index and leaf.shape[0] == rows:
            raise UsageError(
                f"{path} has {rows} elements, and it is not clear whether these are the {rows} samples or "
                f"the {rows} positions of a sample",
                hint="say which: batch_dims={name: 0} for samples, {name: None} for positions",
            )


def _cut_call(call: Call, rows: slice, num_rows: int) -> Call:
    """Return some rows of a call."""
    args, kwargs = (_cut(tree, call, rows, num_rows, path="inputs") for tree in (call.args, call.kwargs))
    target = _cut(call.target, call, rows, num_rows, path="target")
    return Call(tuple(args), dict(kwargs), target, call.dims)


def _cut_batch(batch: Any, call: Call, rows: slice, num_rows: int) -> Any:
    """Return some rows of a batch as the user gave it."""
    if isinstance(batch, Mapping):
        return _cut(batch, call, rows, num_rows, path="target")
    inputs, target = batch
    path = "inputs" if isinstance(inputs, Mapping | tuple | list) else "inputs[0]"
    pair = (
        _cut(inputs, call, rows, num_rows, path=path),
        _cut(target, call, rows, num_rows, path="target"),
    )
    return list(pair) if isinstance(batch, list) else pair


def _cut(tree: Any, call: Call, rows: slice, num_rows: int, *, path: str) -> Any:
    """Return some rows of what stands at a path; what has no rows is in every micro-batch."""

    def cut(where: str, leaf: Any) -> Any:
        dim, is_named = call.dim_of(where)
        if dim is None:
            return leaf
        if isinstance(leaf, torch.Tensor):
            has_rows = is_named or (leaf.dim() > 0 and leaf.shape[0] == num_rows)
            return leaf[(slice(None),) * dim + (rows,)] if has_rows else leaf
        if is_list_of_values(leaf):
            return leaf[rows] if len(leaf) == num_rows else leaf
        return leaf

    return map_leaves(cut, tree, is_leaf=is_list_of_values, path=path)
