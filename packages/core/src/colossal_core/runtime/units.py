"""What is known of module units whose values come and go, and of the memory that these values lie in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from attrs import define, field

from colossal_core.errors import UsageError

if TYPE_CHECKING:
    from torch import nn

    from colossal_core.runtime.collectives import Pending
    from colossal_core.runtime.flat import FlatBuffer, Slot
    from colossal_core.runtime.ranges import OwnedRange

__all__ = ["Home", "Kept", "Openings", "Saved", "Unit"]


@define(eq=False)
class Unit:
    """The values of one module unit, divided among ranks.

    Attributes:
        name: Name of the unit, for messages.
        is_root: Whether it is what no repeated block holds; it stays for as long as anything else is needed.
        ranges: Its buffers with this rank's shards.
        state: Whether the values are there, on their way, or only as shards.
        pending: Gathers on their way.
        after: The unit that forward needed next the last time.
        before: The unit that forward needed before this one the last time; for the root the last of all.
    """

    name: str
    is_root: bool
    ranges: list[OwnedRange] = field(factory=list)
    state: Literal["released", "pending", "resident"] = "released"
    pending: list[Pending] = field(factory=list)
    after: Unit | None = None
    before: Unit | None = None


@define(eq=False)
class Home:
    """Where the values of one storage belong.

    Attributes:
        unit: The unit.
        held: The buffer with this rank's shard.
        storage: Its storage, held so that it can be told from others.
        num_references: How often the storage is referred to when nobody else does.
        tag: What the last element of the buffer holds.
        views: What each parameter shows while it is there.
        guards: What each parameter shows while it is released.
        pointers: Where the memory of each guard is, in the order of the buffer's slots.
        versions: How often each parameter had been written when it was released, in that order.
    """

    unit: Unit
    held: OwnedRange
    storage: torch.UntypedStorage
    num_references: int = 0
    tag: int = 0
    views: dict[Slot, torch.Tensor] = field(factory=dict)
    guards: dict[Slot, torch.Tensor] = field(factory=dict)
    pointers: list[int] = field(factory=list)
    versions: list[int] = field(factory=list)

    @property
    def buffer(self) -> FlatBuffer:
        """The buffer."""
        return self.held.buffer

    def count_writes(self) -> list[int]:
        """Tell how often each parameter was written, in the order of the buffer's slots."""
        return [slot.parameter._version for slot in self.held.buffer.slots]


NUM_FOLLOWED = 2
"""How often backward has to have followed the forward of a model directly, before it is expected to: two
forward passes with one backward alternate."""


@define(eq=False)
class Openings:
    """Which unit backward needs first after the forward of each model, where it follows directly."""

    _known: dict[nn.Module, tuple[int, Unit]] = field(factory=dict)
    _last: nn.Module | None = None

    def forward_ended(self, model: nn.Module) -> Unit | None:
        """Hear of a forward, and return what a backward will need that is expected to follow."""
        if self._last is not None:
            self._known.pop(self._last, None)
        self._last = model
        times, first = self._known.get(model, (0, None))
        return first if times >= NUM_FOLLOWED else None

    def backward_began(self, first: Unit) -> None:
        """Hear what a backward needs first."""
        model, self._last = self._last, None
        if model is not None:
            times, _ = self._known.get(model, (0, first))
            self._known[model] = (times + 1, first)


@define(eq=False)
class Saved:
    """What autograd saved of a unit's values: a place instead of a tensor.

    Attributes:
        home: Where it belongs.
        size: Its size.
        stride: Its stride.
        offset: Its first element in the storage.
        dtype: How it reads the storage, which may be as complex numbers.
        is_conj: Whether it shows the conjugates of what is there.
        is_neg: Whether it shows the negatives of what is there.
        slot: The parameter that it lies in.
        version: How often that had been written.
    """

    home: Home
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    is_conj: bool
    is_neg: bool
    slot: Slot | None
    version: int

    @classmethod
    def of(cls, tensor: torch.Tensor, home: Home) -> Saved:
        """Describe a tensor that lies in a home."""
        offset = int(tensor.storage_offset())
        first = offset * tensor.dtype.itemsize // home.buffer.kind.dtype.itemsize
        slot = next((slot for slot in home.buffer.slots if slot.start <= first < slot.stop), None)
        return cls(
            home=home,
            size=tensor.size(),
            stride=tensor.stride(),
            offset=offset,
            dtype=tensor.dtype,
            is_conj=tensor.is_conj(),
            is_neg=tensor.is_neg(),
            slot=slot,
            version=0 if slot is None else slot.parameter._version,
        )

    def take(self) -> torch.Tensor:
        """Return the tensor; the values are there."""
        values = self.home.buffer.values
        if self.dtype == values.dtype:
            found = values.as_strided(self.size, self.stride, self.offset)
        else:
            found = values.new_empty(0, dtype=self.dtype)
            found.set_(values.untyped_storage(), self.offset, self.size, self.stride)
        found = found.conj() if self.is_conj else found
        return torch._neg_view(found) if self.is_neg else found  # noqa: SLF001 - no public name

    def check(self) -> None:
        """Refuse what was updated since it was saved.

        Raises:
            UsageError: Naming the parameter.
        """
        if self.slot is not None and self.slot.parameter._version != self.version:
            raise UsageError(
                f"parameter {self.slot.name!r} was updated after the forward whose backward runs now",
                hint="run backward before optimizer.step(), or run forward again",
            )


@define(eq=False)
class Kept:
    """What autograd saved of anything else; torch does not look for writes where tensors are packed.

    Attributes:
        values: The tensor, without its graph.
        version: How often it had been written.
    """

    values: torch.Tensor
    version: int

    def take(self) -> torch.Tensor:
        """Return the tensor.

        Raises:
            UsageError: It was written since, so that gradients would be wrong.
        """
        if self.values._version != self.version:
            raise UsageError(
                f"a tensor of shape {tuple(self.values.shape)} that backward needs was changed in "
                "place after it was used",
                hint="compute a new tensor instead, or clone it before",
            )
        return self.values
