"""Ranges of flat buffers that this rank updates, and the stretches of them that the optimizer sees.

The one idea: master, values, gradient and states of a range lie alike, so what moves, is updated or is
published together is found by the same two numbers, whichever of them it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from attrs import define
from torch import nn

from colossal_core.mesh import GroupSpec
from colossal_core.runtime.flat import FlatBuffer, Slot
from colossal_core.runtime.table import Place

__all__ = ["OwnedRange", "RangeHome", "Segment", "State"]

State = dict[str, Any]
"""What an optimizer keeps of one tensor, by name."""


class RangeHome(ABC):
    """Where master, values, gradient and states of a range live while they are not updated.

    The tensors of the range stay valid objects all the time, and may be read between :meth:`bring` and
    :meth:`put`.
    """

    @abstractmethod
    def start(self) -> None:
        """Begin to bring everything where the update runs; does not wait."""

    @abstractmethod
    def bring(self) -> None:
        """Have everything where the update runs."""

    @abstractmethod
    def present(self, state: str) -> AbstractContextManager[None]:
        """Return a context in which one state of the range may be read and written, wherever it is then."""

    @abstractmethod
    def put(self, states: Sequence[tuple[Segment, State]]) -> None:
        """Keep what was updated after :meth:`bring`; the values that models read are new.

        Args:
            states: All segments of the range, with their states, whose tensors may be replaced by equal ones.
        """

    @abstractmethod
    def keep(self, states: Sequence[tuple[Segment, State]]) -> None:
        """Take over states that lie in memory of torch's, such as loaded ones; arguments as above."""


@define(eq=False)
class OwnedRange:
    """A range of a flat buffer whose update this rank computes.

    Attributes:
        buffer: The buffer.
        start: First element of the range in the buffer.
        stop: One past its last element.
        values: The range of the model's values, 1-D.
        master: The range in the dtype of the update; the same tensor as ``values`` where none wider is kept.
        gradient: The range of the reduced gradients, 1-D; may be overwritten by the update.
        divided: Ranks among which the buffer is divided; no axes when this rank owns all of it.
        staged: Where the gradients are copied to before the update, when it runs on another device than the
            model; None when it runs where they are.
        is_staged: Tells when that copy has ended, on accelerators.
        home: Where all of it lives between updates; None where it is there all the time.
    """

    buffer: FlatBuffer
    start: int
    stop: int
    values: torch.Tensor
    master: torch.Tensor
    gradient: torch.Tensor
    divided: GroupSpec = GroupSpec()
    staged: torch.Tensor | None = None
    is_staged: torch.Event | None = None
    home: RangeHome | None = None

    @classmethod
    def whole(cls, buffer: FlatBuffer) -> OwnedRange:
        """Allocate values, gradients and, beside 16-bit values, fp32 masters of an undivided buffer."""
        master = None
        if buffer.kind.dtype.itemsize == 2:
            master = torch.empty(buffer.numel, dtype=torch.float32, device=buffer.device)
        buffer.take_values(master=master)
        buffer.allocate_gradients()
        values = buffer.values
        gradient = buffer.gradients[: buffer.numel]
        return cls(buffer, 0, buffer.numel, values, values if master is None else master, gradient)

    def stage(self) -> None:
        """Start to copy the gradients to where the update runs."""
        if self.staged is not None:
            self.staged.copy_(self.gradient, non_blocking=True)
            if self.gradient.device.type != "cpu":
                self.is_staged = torch.Event(self.gradient.device)
                self.is_staged.record()

    def arrived(self) -> torch.Tensor:
        """Return the gradients where the update runs, waiting for the copy."""
        if self.staged is None:
            return self.gradient
        if self.is_staged is not None:
            self.is_staged.synchronize()
            self.is_staged = None
        return self.staged

    def present(self, state: str) -> AbstractContextManager[None]:
        """Return a context in which one state may be read and written: ``"value"``, ``"gradient"``, ..."""
        return nullcontext() if self.home is None else self.home.present(state)

    @property
    def keeps_master(self) -> bool:
        """Whether the update runs on a wider copy."""
        return self.master is not self.values

    def places(
        self, state: str, tensor: torch.Tensor, *, start: int | None = None, slots: Sequence[Slot] = ()
    ) -> Iterator[Place]:
        """Publish a tensor that lies like the range, or a stretch of it, one place for each parameter in it.

        Args:
            state: What it holds.
            tensor: As many elements as the range or the stretch.
            start: First element of the stretch in the buffer; that of the range when None.
            slots: The parameters in the stretch; all when empty.
        """
        flat = tensor.view(-1)
        begin = self.start if start is None else start
        for slot in slots or self.buffer.slots:
            first, last = slot.within(begin, begin + flat.numel())
            if first < last or (slot.start == slot.stop and not self.divided.axes):
                yield Place(
                    key=slot.entry.key,
                    state=state,
                    tensor=flat[first - begin : last - begin],
                    start=first - slot.start,
                    sharded_over=self.divided,
                    home=self.home,
                )


@define(eq=False)
class Segment:
    """A stretch of an owned range that the optimizer sees as one tensor.

    Attributes:
        owned: The range that it lies in.
        start: First element in the buffer.
        stop: One past its last element.
        group: Index of the parameter group.
        leaf: What the optimizer updates: a view of the master.
        slots: The parameters that it overlaps.
    """

    owned: OwnedRange
    start: int
    stop: int
    group: int
    leaf: nn.Parameter
    slots: tuple[Slot, ...]

    @property
    def numel(self) -> int:
        """Elements of the segment."""
        return self.stop - self.start

    def slice_of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the segment of a tensor that spans the owned range."""
        return flat[self.start - self.owned.start : self.stop - self.owned.start]
