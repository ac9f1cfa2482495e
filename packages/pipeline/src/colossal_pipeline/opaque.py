"""Modules that look at values, in a run that has none.

The one idea: what experts return has the form of what they were given, whichever of them compute; so where
code inside an item needs values, the innermost module around it is taken to return a tensor like its first
floating argument. That is a guess: the stage that computes the item compares it with what was really
returned, before anything is sent.

# Note [Work of a guess]
Operations are counted as they run, and a guess runs none. A module that is guessed counts two for each of
its weights and each row that it is given: with indices among its arguments, as many rows as there are
indices; of weights that are stacked, each row meets one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from colossal_core.errors import CapabilityError
from colossal_core.runtime.swapping import replaced_forwards
from colossal_pipeline.absent import NeedsValuesError
from colossal_pipeline.flow import list_leaves

if TYPE_CHECKING:
    from torch import nn

    from colossal_pipeline.items import Item

__all__ = ["guessed_where_values_are_needed"]

_SHOWN = 3
"""Guessed modules that an error names."""


@contextmanager
def guessed_where_values_are_needed(items: Sequence[Item], count: Callable[[float], None]) -> Iterator[None]:
    """Let modules inside of items that look at values return something of the likely form.

    Args:
        items: Items of a model whose parameters are absent.
        count: Told how many floating point operations a guess stands for.

    Raises:
        CapabilityError: Something else needed values in the end, or could not use what was guessed.
    """
    guessed: dict[str, None] = {}
    inner = {
        module: f"{item.name}.{path}"
        for item in items
        for path, module in item.module.named_modules()
        if module is not item.module
    }
    forwards = {
        module: functools.partial(
            _call_or_guess, module, module.forward, count, functools.partial(guessed.setdefault, name)
        )
        for module, name in inner.items()
    }
    try:
        with replaced_forwards(forwards):
            yield
    except NeedsValuesError as err:
        if not guessed:
            raise
        shown = ", ".join(map(repr, list(guessed)[:_SHOWN]))
        raise CapabilityError(
            f"{err.message}; what {shown} return was guessed, since their forward looks at values",
            hint="let what looks at values return a tensor of the shape of its first floating argument",
        ) from err


def _call_or_guess(
    module: nn.Module,
    forward: Callable[..., Any],
    count: Callable[[float], None],
    note: Callable[[], object],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call forward, or guess what it returns."""
    try:
        return forward(*args, **kwargs)
    except NeedsValuesError:
        given = [leaf for leaf in list_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        floating = [leaf for leaf in given if leaf.is_floating_point()]
        if not floating:
            raise
        note()
        weights = [
            weight
            for part in module.modules()
            for weight in part._parameters.values()  # noqa: SLF001 - absent tensors are no Parameter objects
            if weight is not None
        ]
        count(_operations(floating[0], given, weights))
        # It depends on all of this, also in the graph.
        result = floating[0]
        for other in (*floating[1:], *weights):
            result = result + other.sum().to(result.dtype)
        return result + 0 if result is floating[0] else result


def _operations(first: torch.Tensor, given: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> float:
    """Return how many operations a module does; see Note [Work of a guess]."""
    rows = math.prod(first.shape[:-1])
    indices = [
        leaf.numel() for leaf in given if not leaf.is_floating_point() and leaf.dtype is not torch.bool
    ]
    met = sum(weight.numel() / (weight.shape[0] if weight.dim() > 2 else 1) for weight in weights)
    return 2.0 * max([rows, *indices]) * met
