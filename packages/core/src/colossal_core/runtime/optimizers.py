"""What core knows of optimizers: which may see flat ranges, which need shapes, which cannot work.

The one idea: an update that treats every element alike gives the same numbers on any flat range, so it may
run on ranges cut without regard to shapes. That has to be known, not guessed: the allow-list below is tested,
optimizers from elsewhere are taken as whole-shaped, and a subclass that overrides ``step`` is no longer what
its parent is known to be.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Literal

import torch
from attrs import frozen

from colossal_core.errors import CapabilityError

__all__ = ["OptimizerSpec", "optimizer_spec"]


@frozen(kw_only=True)
class OptimizerSpec:
    """How an optimizer may be run.

    Attributes:
        shapes: ``"flat"`` when the update of an element depends on that element only, so that flat ranges may
            be updated; ``"whole"`` when it needs parameters in their shape.
        reason: Why it cannot be used at all, or an empty string.
    """

    shapes: Literal["flat", "whole"]
    reason: str = ""


_FLAT = (
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "ASGD",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
)

_REFUSED: Mapping[str, str] = {
    "LBFGS": "it evaluates the loss several times in one step and keeps one flat history of all parameters",
    "SparseAdam": "it needs sparse gradients, which are not reduced over ranks",
}


def optimizer_spec(optimizer: torch.optim.Optimizer) -> OptimizerSpec:
    """Return how an optimizer may be run.

    Raises:
        CapabilityError: It cannot be run here at all; says why.
    """
    kind = type(optimizer)
    for name, reason in _REFUSED.items():
        if isinstance(optimizer, getattr(torch.optim, name)):
            raise CapabilityError(
                f"optimizer {kind.__name__} cannot be boosted: {reason}", hint="use torch.optim.AdamW or SGD"
            )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise CapabilityError(
            f"optimizer {kind.__name__} has differentiable=True: updates on flat buffers have no graph",
            hint="use differentiable=False",
        )
    for name in _FLAT:
        known = getattr(torch.optim, name)
        # torch wraps ``step`` on the class of the first instance: only the functions inside compare.
        if isinstance(optimizer, known) and inspect.unwrap(kind.step) is inspect.unwrap(known.step):
            return OptimizerSpec(shapes="flat")
    return OptimizerSpec(shapes="whole")
