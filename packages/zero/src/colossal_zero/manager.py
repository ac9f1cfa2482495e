"""The memory managers ``zero1`` and ``zero2``: each rank updates its shard of every flat buffer.

The one idea: what ``replicated`` does with whole buffers is done with shards. Gradients arrive by
reduce-scatter instead of all-reduce, the optimizer runs on the shard, and the updated values are gathered in
place, buffer by buffer, while the next buffers are still being updated. What ``zero3`` does alike is in the
abstract manager.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, final

import torch

from colossal_core.errors import CapabilityError
from colossal_core.mesh import GroupSpec
from colossal_core.runtime.flat_manager import AbstractFlatManager, Owned
from colossal_core.runtime.scattered import ScatteredLane, Shard
from colossal_core.runtime.segments import OwnedRange
from colossal_zero.division import copies_of, divided_over
from colossal_zero.exchange import exchange_states
from colossal_zero.late import LateValues
from colossal_zero.sizes import estimate_table

if TYPE_CHECKING:
    from torch import nn

    from colossal_core.runtime.buckets import LanePlan
    from colossal_core.runtime.collectives import Pending
    from colossal_core.runtime.context import Context
    from colossal_core.runtime.flat import FlatBuffer
    from colossal_core.runtime.mesh import Group
    from colossal_core.runtime.precision import Precision
    from colossal_core.runtime.table import Entry, ParameterTable
    from colossal_zero.options import Zero

__all__ = ["AbstractZeroManager", "ZeroManager", "refuse_compiled"]

PHASE = "parameters"


class AbstractZeroManager(AbstractFlatManager):
    """Divides gradients and optimizer state among data ranks."""

    def __init__(self, options: Zero) -> None:
        """Remember the options; see :class:`colossal_zero.Zero`."""
        self.options = options

    def groups(self, table: ParameterTable) -> Iterable[GroupSpec]:
        """Return the groups that divide and copy what the table sums."""
        for entry in table:
            yield divided_over(entry, table.layout)
            yield copies_of(entry.reduce, table.layout)

    def attach(
        self, models: Mapping[str, nn.Module], optimizers: Sequence[torch.optim.Optimizer], context: Context
    ) -> None:
        """Divide the parameters' buffers; see :class:`~colossal_core.interfaces.AbstractMemoryManager`."""
        guards = context.mesh.layout.world_size > 1 or context.precision.is_narrow
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
        if group.size == 1:
            owned.ranges.extend(self._hold(buffer) for buffer in plan.buffers)
            owned.window.add_summed_lane(everyone, plan.buffers)
            return
        shards = []
        for buffer in plan.buffers:
            held = self._divide(buffer, group, plan.divided)
            owned.ranges.append(held)
            is_inside = self.options.stage == 1
            shards.append(Shard(buffer, held.start, held.gradient, is_inside=is_inside))
        owned.window.add_lane(
            ScatteredLane(
                group,
                shards,
                self._context.collectives,
                owned.window.terms,
                everyone=everyone,
                copies=mesh.group(copies_of(plan.reduce, mesh.layout), channel),
                each_backward=self.options.stage > 1,
            )
        )

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
        if self.options.stage > 1:
            gradient = torch.zeros_like(gradient)
        values = self._keep_values(buffer, start)
        return self._with_staging(
            OwnedRange(buffer, start, stop, values, values if master is None else master, gradient, divided)
        )

    def _allocate_master(self, buffer: FlatBuffer, numel: int) -> torch.Tensor | None:
        """Return memory for masters: beside 16-bit values, and in host memory beside all when offloading."""
        wide = torch.promote_types(buffer.kind.dtype, torch.float32)
        if self.options.offload is not None:
            return torch.zeros(numel, dtype=wide, device="cpu")
        if buffer.kind.dtype.itemsize > 2:
            return None
        return torch.zeros(numel, dtype=wide, device=buffer.device)

    def _with_staging(self, held: OwnedRange) -> OwnedRange:
        """Give a range memory on the host for its gradients, when the update runs there."""
        if self.options.offload is not None:
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
        if not held.divided.axes:
            return held.gradient
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

    def estimate(
        self, table: ParameterTable, precision: Precision, optimizer_states: int = 2
    ) -> Mapping[str, int]:
        """Return bytes per rank by category, padding included."""
        return estimate_table(self.options, table, precision, optimizer_states)


@final
class ZeroManager(AbstractZeroManager):
    """Keeps values whole on every rank."""

    def __init__(self, options: Zero) -> None:
        """Remember the options; see :class:`colossal_zero.Zero`."""
        super().__init__(options)
        self._late = LateValues()

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
