"""The memory manager ``replicated``: every rank holds everything, gradients are summed once per window."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, final

import torch

from colossal_core.errors import CapabilityError
from colossal_core.runtime.flat_manager import AbstractFlatManager, Owned
from colossal_core.runtime.precision import Precision
from colossal_core.runtime.segments import OwnedRange

if TYPE_CHECKING:
    from torch import nn

    from colossal_core.pieces import Replicated
    from colossal_core.plan import Plan
    from colossal_core.runtime.buckets import LanePlan
    from colossal_core.runtime.context import Context
    from colossal_core.runtime.table import ParameterTable

__all__ = ["ReplicatedManager"]


@final
class ReplicatedManager(AbstractFlatManager):
    """Holds everything on every rank: 16 bytes per parameter with Adam, in fp32 as in bf16."""

    def __init__(self, options: Replicated) -> None:
        """Remember the options; see :class:`colossal_core.Replicated`."""
        self.options = options
        self._shows_gradients = False

    def check(self, plan: Plan, table: ParameterTable) -> None:
        """Refuse to show gradients that the update does not use."""
        del table
        if self.options.reduce == "backward" and Precision(plan.precision).is_narrow:
            raise CapabilityError(
                f"Replicated(reduce='backward') with precision {plan.precision!r}: p.grad would show "
                "16-bit gradients, while the update needs them in fp32",
                hint="use precision='fp32', or leave reduce='window' and clip with max_grad_norm",
            )

    def attach(
        self, models: Mapping[str, nn.Module], optimizers: Sequence[torch.optim.Optimizer], context: Context
    ) -> None:
        """Move the parameters into flat buffers; see :class:`~.interfaces.AbstractMemoryManager`."""
        each_backward = self.options.reduce == "backward"
        guards = context.mesh.layout.world_size > 1 or context.precision.is_narrow
        self._shows_gradients = not guards or each_backward
        self._attach(models, optimizers, context, guards=not self._shows_gradients, averages=each_backward)

    @property
    def shows_gradients(self) -> bool:
        """True on one rank, and with ``reduce="backward"``."""
        return self._shows_gradients

    def _take_lane(self, owned: Owned, plan: LanePlan) -> None:
        """Take buffers whole."""
        owned.ranges.extend(OwnedRange.whole(buffer) for buffer in plan.buffers)
        owned.window.add_summed_lane(self._context.mesh.group(plan.reduce, owned.channel), plan.buffers)

    def estimate(
        self, table: ParameterTable, precision: Precision, optimizer_states: int = 2
    ) -> Mapping[str, int]:
        """Return bytes per rank by category: nothing is divided."""
        found = {"values": 0, "gradients": 0, "masters": 0, "states": 0}
        for entry, parameter in table.parameters():
            dtype = precision.dtype_of(entry.name, entry.dtype)
            numel = math.prod(parameter.shape)
            found["values"] += numel * dtype.itemsize
            if not entry.trainable:
                continue
            wide = max(dtype.itemsize, torch.float32.itemsize)
            found["gradients"] += numel * dtype.itemsize
            found["masters"] += numel * wide if dtype.itemsize < wide else 0
            found["states"] += numel * wide * optimizer_states
        return found
