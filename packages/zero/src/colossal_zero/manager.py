"""The memory managers ``zero1`` and ``zero2``: each rank updates its shard of every flat buffer.

The one idea: values stay whole on every rank, and only what this rank updates is divided. Updated values are
gathered in place, buffer by buffer, while the next buffers are still being updated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, final

from colossal_core.runtime.divided_manager import AbstractDividedManager, refuse_compiled
from colossal_zero.late import LateValues
from colossal_zero.sizes import estimate_table

if TYPE_CHECKING:
    import torch
    from torch import nn

    from colossal_core.runtime.collectives import Pending
    from colossal_core.runtime.context import Context
    from colossal_core.runtime.flat_manager import Owned
    from colossal_core.runtime.precision import Precision
    from colossal_core.runtime.segments import OwnedRange
    from colossal_core.runtime.table import ParameterTable
    from colossal_zero.options import Zero

__all__ = ["ZeroManager"]

PHASE = "parameters"


@final
class ZeroManager(AbstractDividedManager):
    """Keeps values whole on every rank."""

    def __init__(self, options: Zero) -> None:
        """Remember the options; see :class:`colossal_zero.Zero`."""
        self.options = options
        self._late = LateValues()

    @property
    def _reduces_each_backward(self) -> bool:
        """Stage 1 keeps gradients whole until the step."""
        return self.options.stage > 1

    @property
    def _updates_on_host(self) -> bool:
        """When optimizer state is offloaded."""
        return self.options.offload is not None

    # --- set-up ---------------------------------------------------------------------------------------------

    def attach(
        self, models: Mapping[str, nn.Module], optimizers: Sequence[torch.optim.Optimizer], context: Context
    ) -> None:
        """Divide the parameters' buffers; see :class:`~colossal_core.interfaces.AbstractMemoryManager`.

        Raises:
            CapabilityError: A model is compiled, and values are to be waited for in forward.
        """
        self._models = dict(models)
        if self.options.gather == "forward":
            refuse_compiled(models, "Zero(gather='forward')", "leave gather out")
        super().attach(models, optimizers, context)

    def _take(self, owned: Owned) -> None:
        """Take over parameters, and wait in forward for those, too."""
        self._late.settle()
        super()._take(owned)
        if self.options.gather == "forward":
            divided = [held for own in self._owned for held in own.ranges if held.divided.axes]
            self._late.watch(self._models, self._context.table, divided)

    # --- a step ---------------------------------------------------------------------------------------------

    def _publish(self, owned: Owned, live: Callable[[Any], bool]) -> Callable[[int], None]:
        """Gather each divided buffer as soon as this rank's shard of it is updated."""
        self._late.settle()  # two gathers of one buffer must not meet
        pending: list[tuple[OwnedRange, Pending]] = []
        ranges = iter(enumerate(owned.ranges))
        upcoming = next(ranges, None)

        def updated(count: int) -> None:
            nonlocal upcoming
            while upcoming is not None and upcoming[0] < count:
                held = upcoming[1]
                if held.divided.axes and any(live(slot) for slot in held.buffer.slots):
                    group = self._context.mesh.group(held.divided, owned.channel)
                    values = held.buffer.values
                    gather = self._context.collectives.all_gather(values, held.values, group, phase=PHASE)
                    pending.append((held, gather))
                upcoming = next(ranges, None)
            if upcoming is None:
                for held, gather in pending:
                    if self.options.gather == "forward":
                        self._late.send(held, gather)
                    else:
                        gather.wait()
                pending.clear()

        return updated

    def publish_values(self) -> None:
        """Narrow masters into values, and have those of others here: torch counts that as writing."""
        super().publish_values()
        self._late.settle()

    def _take_edits(self, owned: Owned) -> None:
        """Have the values here before edits are looked for."""
        self._late.settle()
        super()._take_edits(owned)

    # --- books ----------------------------------------------------------------------------------------------

    @contextmanager
    def full_parameters(self, model: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
        """Show every parameter; they are whole on every rank."""
        self._late.settle()
        with super().full_parameters(model) as shown:
            yield shown

    def detach(self) -> None:
        """Give the models back."""
        self._late.settle()
        self._late.close()
        super().detach()

    def estimate(
        self, table: ParameterTable, precision: Precision, optimizer_states: int = 2
    ) -> Mapping[str, int]:
        """Return bytes per rank by category, padding included."""
        return estimate_table(self.options, table, precision, optimizer_states)
