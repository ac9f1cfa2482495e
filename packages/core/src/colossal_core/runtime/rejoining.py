"""Putting cut parameters together again when a model is released, with the states of their optimizers.

The one idea: the table still says which boxes this rank holds, so what users see whole while a model is
boosted becomes what the parameters are. A state of the local shape is cut as the parameter is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from colossal_core.runtime.whole import is_everywhere, whole_tensors

if TYPE_CHECKING:
    from colossal_core.runtime.context import Context
    from colossal_core.runtime.table import Entry, Key

__all__ = ["rejoin"]


def rejoin(context: Context, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Give every rank whole parameters, buffers and optimizer states; collective over all ranks.

    Args:
        context: Of the boosted models; parameters own their memory again.
        optimizers: The users' own, over those parameters.
    """
    layout, rank = context.mesh.layout, context.mesh.rank
    cut = [entry for entry in context.table if not is_everywhere(entry, layout, rank)]
    if not cut:
        return
    states = [_agree(dict(_shaped_states(optimizer, cut, context)), context) for optimizer in optimizers]
    for optimizer, named in zip(optimizers, states, strict=True):
        for state, dtypes in named.items():
            local = {
                key: optimizer.state[context.table.tensor(context.table[key])][state]
                for key in dtypes
                if context.table[key].parts
            }
            with whole_tensors(local, dtypes, context) as shown:
                joined = {key: tensor.clone() for key, tensor in shown.items()}
            for key, tensor in joined.items():
                optimizer.state[context.table.tensor(context.table[key])][state] = tensor
    tensors = {entry.key: context.table.tensor(entry) for entry in cut}
    with whole_tensors(
        {entry.key: tensors[entry.key] for entry in cut if entry.parts},
        {key: tensor.dtype for key, tensor in tensors.items()},
        context,
    ) as shown:
        joined = {key: tensor.clone() for key, tensor in shown.items()}
    for key, tensor in joined.items():
        tensors[key].grad = None
        tensors[key].data = tensor


def _shaped_states(
    optimizer: torch.optim.Optimizer, cut: Sequence[Entry], context: Context
) -> Iterator[tuple[str, dict[Key, torch.dtype]]]:
    """Yield name and dtypes of the states that have the shape of a cut parameter on this rank."""
    found: dict[str, dict[Key, torch.dtype]] = {}
    for entry in cut:
        tensor = context.table.tensor(entry)
        for name, value in optimizer.state.get(tensor, {}).items():
            is_like = isinstance(value, torch.Tensor) and value.dim() and value.shape == tensor.shape
            if is_like and entry.parts:
                found.setdefault(name, {})[entry.key] = value.dtype
    yield from found.items()


def _agree(
    mine: Mapping[str, Mapping[Key, torch.dtype]], context: Context
) -> dict[str, dict[Key, torch.dtype]]:
    """Return the states of all ranks, in one order; a rank may hold nothing of a parameter."""
    plain = [
        [name, *key, str(dtype).removeprefix("torch.")]
        for name, dtypes in mine.items()
        for key, dtype in dtypes.items()
    ]
    texts = context.agreement.share("states to put together", json.dumps(plain))
    found: dict[str, dict[Key, torch.dtype]] = {}
    for name, model, parameter, dtype in sorted({tuple(row) for text in texts for row in json.loads(text)}):
        found.setdefault(name, {})[model, parameter] = getattr(torch, dtype)
    return found
