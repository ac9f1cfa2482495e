"""What memory managers have in common that divide what training holds among data ranks.

The one idea: what ``replicated`` does with whole buffers is done with shards. Gradients arrive by
reduce-scatter instead of all-reduce, and the optimizer runs on the shard. How updated values become whole
again is up to the manager.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from colossal_core.errors import CapabilityError
from colossal_core.mesh import GroupSpec
from colossal_core.runtime.division import copies_of, divided_over
from colossal_core.runtime.exchange import exchange_states
from colossal_core.runtime.flat_manager import AbstractFlatManager, Owned
from colossal_core.runtime.scattered import ScatteredLane, Shard
from colossal_core.runtime.segments import OwnedRange

if TYPE_CHECKING:
    from torch import nn

    from colossal_core.runtime.buckets import LanePlan
    from colossal_core.runtime.context import Context
    from colossal_core.runtime.flat import FlatBuffer
    from colossal_core.runtime.mesh import Group
    from colossal_core.runtime.table import Entry, ParameterTable

__all__ = ["AbstractDividedManager", "refuse_compiled"]


class AbstractDividedManager(AbstractFlatManager):
    """Divides gradients and optimizer state among the ranks that the table sums gradients over."""

    # --- where managers differ ------------------------------------------------------------------------------

    @property
    def _reduces_each_backward(self) -> bool:
        """Whether each backward is reduced into the shard, so that no gradients are kept whole between."""
        return True

    _lane_class: type[ScatteredLane] = ScatteredLane
    """What reduces gradients into shards."""

    def _shows_guards(self, context: Context) -> bool:
        """Whether ``p.grad`` shows guards until gradients are reduced."""
        return context.mesh.layout.world_size > 1 or context.precision.is_narrow

    @property
    def _updates_on_host(self) -> bool:
        """Whether masters and optimizer state live in host memory, and the update runs there."""
        return False

    # --- set-up ---------------------------------------------------------------------------------------------

    def groups(self, table: ParameterTable) -> Iterable[GroupSpec]:
        """Return the groups that divide and copy what the table sums."""
        for entry in table:
            yield divided_over(entry, table.layout)
            yield copies_of(entry.reduce, table.layout)

    def attach(
        self, models: Mapping[str, nn.Module], optimizers: Sequence[torch.optim.Optimizer], context: Context
    ) -> None:
        """Divide the parameters' buffers; see :class:`~colossal_core.interfaces.AbstractMemoryManager`."""
        guards = self._shows_guards(context)
        self._shows_gradients = not guards
        self._attach(models, optimizers, context, guards=guards)

    @property
    def shows_gradients(self) -> bool:
        """True on one rank."""
        return self._shows_gradients

    def _divided(self, entry: Entry) -> GroupSpec:
        """Return the ranks among which the buffer of a parameter is divided."""
        return divided_over(entry, self._context.mesh.layout)

    def _take_lane(self, owned: Owned, plan: LanePlan) -> None:
        """Allocate buffers and this rank's shards."""
        mesh, channel = self._context.mesh, owned.channel
        everyone = mesh.group(plan.reduce, channel)
        group = mesh.group(plan.divided, channel)
        if not plan.is_divided:
            owned.ranges.extend(self._hold(buffer) for buffer in plan.buffers)
            owned.window.add_summed_lane(everyone, plan.buffers)
            return
        ranges = [self._divide(buffer, group, plan.divided) for buffer in plan.buffers]
        owned.ranges.extend(ranges)
        shards = [self._shard(held) for held in ranges]
        owned.window.add_lane(
            self._lane_class(
                group,
                shards,
                self._context.collectives,
                owned.window.terms,
                everyone=everyone,
                copies=mesh.group(copies_of(plan.reduce, mesh.layout), channel),
                each_backward=self._reduces_each_backward,
            )
        )

    def _shard(self, held: OwnedRange) -> Shard:
        """Return where the reduced gradients of a divided range arrive."""
        return Shard(held.buffer, held.start, held.gradient, is_inside=not self._reduces_each_backward)

    def _hold(self, buffer: FlatBuffer) -> OwnedRange:
        """Allocate one buffer that this rank holds whole."""
        master = self._allocate_master(buffer, buffer.numel)
        buffer.take_values(master=master)
        buffer.allocate_gradients()
        values, gradient = buffer.values, buffer.gradients[: buffer.numel]
        held = OwnedRange(buffer, 0, buffer.numel, values, values if master is None else master, gradient)
        return self._with_staging(held)

    def _divide(self, buffer: FlatBuffer, group: Group, divided: GroupSpec) -> OwnedRange:
        """Allocate one buffer, and what this rank keeps of it."""
        span = buffer.span_numel
        start, stop = group.index * span, (group.index + 1) * span
        master = self._allocate_master(buffer, span)
        buffer.take_values(master=master, start=start)
        buffer.allocate_gradients()
        gradient = buffer.gradients[start:stop]
        if self._reduces_each_backward:
            gradient = torch.zeros_like(gradient)
        values = self._keep_values(buffer, start)
        return self._with_staging(
            OwnedRange(buffer, start, stop, values, values if master is None else master, gradient, divided)
        )

    def _allocate_master(self, buffer: FlatBuffer, numel: int) -> torch.Tensor | None:
        """Return memory for masters: beside 16-bit values, and in host memory beside all when offloading."""
        wide = torch.promote_types(buffer.kind.dtype, torch.float32)
        if self._updates_on_host:
            return torch.zeros(numel, dtype=wide, device="cpu")
        if buffer.kind.dtype.itemsize > 2:
            return None
        return torch.zeros(numel, dtype=wide, device=buffer.device)

    def _with_staging(self, held: OwnedRange) -> OwnedRange:
        """Give a range memory on the host for its gradients, when the update runs there."""
        if self._updates_on_host:
            is_remote = held.gradient.device.type != "cpu"
            held.staged = torch.empty(
                held.gradient.shape, dtype=held.gradient.dtype, device="cpu", pin_memory=is_remote
            )
        return held

    def _keep_values(self, buffer: FlatBuffer, start: int) -> torch.Tensor:
        """Return this rank's shard of the values of a buffer."""
        return buffer.values[start : start + buffer.span_numel]

    # --- books ----------------------------------------------------------------------------------------------

    def _whole_gradient(self, held: OwnedRange) -> torch.Tensor:
        """Gather the reduced gradients of one buffer."""
        if not held.buffer.is_divided:
            return held.gradient
        with held.present("gradient"):
            return self._gather_gradient(held)

    def _gather_gradient(self, held: OwnedRange) -> torch.Tensor:
        """Gather the reduced gradients of one divided buffer."""
        whole = torch.empty(held.buffer.padded_numel, dtype=held.gradient.dtype, device=held.buffer.device)
        group = self._context.mesh.group(held.divided)
        self._context.collectives.all_gather(whole, held.gradient, group, phase="inspection").wait()
        return whole

    def state(self, optimizer: int) -> dict[torch.Tensor, dict[str, Any]]:
        """Return the optimizer's state by parameter, gathered from the ranks that own it; collective."""
        owned = self._owned[optimizer]
        if owned.driver is None:
            return {}
        return exchange_states(owned.driver, self._context)


def refuse_compiled(models: Mapping[str, nn.Module], what: str, hint: str) -> None:
    """Refuse compiled models where parameters come and go, which compiled code does not notice.

    Args:
        models: The models.
        what: What lets them come and go.
        hint: What to do instead.

    Raises:
        CapabilityError: Naming the model.
    """
    for name, model in models.items():
        for module in model.modules():
            is_wrapped = isinstance(module, torch._dynamo.OptimizedModule)  # noqa: SLF001 - its only home
            if is_wrapped or module._compiled_call_impl is not None:  # noqa: SLF001 - torch has no getter
                raise CapabilityError(
                    f"model {name!r} is compiled, and {what} cannot gather inside compiled code",
                    hint=f"{hint}, or drop torch.compile",
                )
