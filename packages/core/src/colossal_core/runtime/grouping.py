"""Which trainable parameters are in which group of an optimizer, to notice when that changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from colossal_core.runtime.engine import Engine

__all__ = ["grouping_of", "is_same", "notice_unfrozen"]


def grouping_of(optimizer: torch.optim.Optimizer) -> list[list[torch.Tensor]]:
    """Return the trainable parameters of each group, in order."""
    return [
        [parameter for parameter in group["params"] if parameter.requires_grad]
        for group in optimizer.param_groups
    ]


def is_same(one: list[list[torch.Tensor]], other: list[list[torch.Tensor]]) -> bool:
    """Whether two groupings hold the same objects in the same order."""
    return len(one) == len(other) and all(
        len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))
        for a, b in zip(one, other, strict=True)
    )


def notice_unfrozen(model: nn.Module, engine: Engine) -> list[RemovableHandle]:
    """Let the memory manager take over parameters that were unfrozen, before the next pass of their model.

    Their gradients arrive as all others then: weighed, scaled and guarded.

    Returns:
        Handles that remove it again.
    """
    still_frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    if not still_frozen:
        return []

    def notice(_: nn.Module, _args: object) -> None:
        if any(parameter.requires_grad for parameter in still_frozen):
            still_frozen[:] = [parameter for parameter in still_frozen if not parameter.requires_grad]
            for index in range(len(engine.optimizers)):
                engine.manager.regroup(index)

    # First of all hooks: managers that gather values do so for what they hold.
    return [model.register_forward_pre_hook(notice, prepend=True)]
