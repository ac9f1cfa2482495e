"""Whether a table of rows divides by rows: a proof as for groups of layers, on one module.

Embeddings of their own class may scale what they look up, count positions, or do anything else. A copy runs
as it is, and once for each rank with that rank's rows, the ids that are elsewhere replaced and their results
set to zero; the ranks' results have to add up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from colossal_tensor_parallel.spans import split_evenly
from colossal_tensor_parallel.tracing import copy_module, make_values

if TYPE_CHECKING:
    from colossal_tensor_parallel.tracing import Recorded

__all__ = ["is_plain_table", "rows_are_additive"]


def is_plain_table(module: nn.Module) -> bool:
    """Whether a module looks up rows as torch's embedding does."""
    return type(module).forward is nn.Embedding.forward


def rows_are_additive(module: nn.Embedding, call: Recorded | None, degree: int) -> bool:
    """Whether results of ranks that have some of the rows add up to the result of all.

    Args:
        module: The user's embedding.
        call: What it was called with.
        degree: Number of ranks.
    """
    if is_plain_table(module):
        return True
    if call is None or len(call.args) != 1 or call.kwargs or type(call.args[0]) is not torch.Tensor:
        return False
    ids = call.args[0]
    if ids.is_floating_point() or not ids.numel():
        return False
    try:
        twin = copy_module(module, make_values(torch.Generator().manual_seed(71), torch.float64))
        whole = twin.get_parameter("weight").detach().clone()
        vars(twin)["padding_idx"] = None  # matters for gradients only
        with torch.no_grad():
            expected = twin(ids)
            total = torch.zeros_like(expected)
            for start, stop in split_evenly(len(whole), degree):
                twin.register_parameter("weight", nn.Parameter(whole[start:stop].clone()))
                outside = (ids < start) | (ids >= stop)
                total += twin((ids - start).masked_fill(outside, 0)).masked_fill(outside.unsqueeze(-1), 0.0)
    except Exception:  # noqa: BLE001 - the user's code meets what it was not written for
        return False
    return bool(torch.allclose(total, expected, rtol=1e-9, atol=1e-9))
