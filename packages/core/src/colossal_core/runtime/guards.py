"""Guards: what ``p.grad`` shows while the gradient is not there to be read.

The one idea: a guard has the right shape and dtype, reads as NaN and cannot be written, so code that clips,
unscales or inspects a gradient that was not reduced yet fails at that line instead of silently doing nothing.
It is a NaN scalar expanded to the shape, so it holds one element of memory. ``p.grad is None`` still means
that the user cleared it.

torch lets a few writes through (``zero_``, ``fill_``, and any write to a one-element guard); they raise the
guard's version, and :meth:`GradientGuard.was_zeroed` tells what they meant.
"""

from __future__ import annotations

import math

import torch
from attrs import define, field
from torch import nn

from colossal_core.errors import UsageError

__all__ = ["GradientGuard"]


@define(eq=False)
class GradientGuard:
    """The guard of one parameter's gradient.

    Attributes:
        parameter: The Parameter whose ``grad`` it stands in for.
        name: Its name, for messages.
        tensor: The guard itself.
    """

    parameter: nn.Parameter
    name: str
    tensor: torch.Tensor = field(init=False)
    _version: int = field(init=False, default=0)

    def __attrs_post_init__(self) -> None:
        """Make the guard tensor."""
        like = self.parameter
        self.tensor = torch.full((), math.nan, dtype=like.dtype, device=like.device).expand(like.shape)
        self._version = self.tensor._version

    def renew(self) -> None:
        """Forget what was written, before the guard is shown again."""
        if self.tensor._version != self._version:
            self.tensor.fill_(math.nan)
            self._version = self.tensor._version

    def was_zeroed(self) -> bool:
        """Tell whether the user zeroed the gradient in place since the last call.

        Raises:
            UsageError: Something else was written through the guard.
        """
        if self.tensor._version == self._version:
            return False
        zeroed = bool((self.tensor == 0).all())
        self.renew()
        if zeroed:
            return True
        raise UsageError(
            f"the gradient of {self.name!r} was written before it was reduced over the ranks",
            hint="clip with Booster(max_grad_norm=...) or optimizer.clip_grad_norm_(...)",
        )
