"""Which states of an optimizer are shaped like their parameter: those can be cut and divided like it.

The one idea: torch's optimizers keep plain mappings, so the shape of a state has to say what it is; where a
0-d parameter leaves that open, its name decides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

if TYPE_CHECKING:
    import torch

__all__ = ["Blank", "is_like"]

_COUNTERS = frozenset({"step", "eta", "mu", "mu_product"})
"""0-d states of torch's elementwise optimizers that are not shaped like the parameter."""


@frozen
class Blank:
    """Stands for a state shaped like its parameter that is to be allocated, and filled in through its place.

    Attributes:
        dtype: Element type; moments of a wider update take that of the update.
    """

    dtype: torch.dtype


def is_like(name: str, value: object, parameter: torch.Tensor) -> bool:
    """Whether a state has one element for each of the parameter's; for 0-d parameters its name decides."""
    if isinstance(value, Blank):
        return True
    if getattr(value, "shape", None) != parameter.shape:
        return False
    return parameter.dim() > 0 or name not in _COUNTERS
