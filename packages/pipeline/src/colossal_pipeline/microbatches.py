"""Cutting a rank's share of a batch into micro-batches, and what each of them weighs.

The one idea: the loss of a share is the mean over what counts in it, so that of a micro-batch weighs as much
as counts in it, by the same rule as shares among ranks. Micro-batches without anything that counts weigh
nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
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
        counted: list[float | None] = [float(weight(_cut(batch, part, rows))) for part in slices]
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
    """Return dim 0 of the first tensor among inputs, and refuse what may or may not have rows."""
    tensors: list[tuple[str, torch.Tensor]] = []

    def visit(path: str, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0:
            tensors.append((path, leaf))
        return leaf

    map_leaves(visit, call.args, path="inputs")
    map_leaves(visit, call.kwargs, path="inputs")
    map_leaves(visit, call.target, path="target")
    if not tensors:
        raise UsageError(
            "the batch holds no tensor with a batch dim, so it cannot be cut into micro-batches",
            hint="give inputs whose dim 0 is the sample",
        )
    first = max(tensors, key=lambda found: found[1].dim() > 1)[1]
    rows = int(first.shape[0])
    # Of two dims, numbers of tokens have positions; features have none.
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
                hint="use a batch size that differs from the length, or give it the shape [1, length]",
            )
    return rows


def _cut_call(call: Call, rows: slice, num_rows: int) -> Call:
    """Return some rows of a call."""
    args, kwargs, target = _cut((call.args, call.kwargs, call.target), rows, num_rows)
    return Call(tuple(args), dict(kwargs), target)


def _cut(tree: Any, rows: slice, num_rows: int) -> Any:
    """Return some rows of a batch; what has no rows is in every micro-batch."""

    def cut(_: str, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf[rows] if leaf.dim() > 0 and leaf.shape[0] == num_rows else leaf
        if is_list_of_values(leaf):
            return leaf[rows] if len(leaf) == num_rows else leaf
        return leaf

    return map_leaves(cut, tree, is_leaf=is_list_of_values)
