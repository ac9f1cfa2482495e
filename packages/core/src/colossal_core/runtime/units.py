"""What is known of module units whose values come and go, and of the memory that these values lie in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from attrs import define, field

from colossal_core.errors import UsageError

if TYPE_CHECKING:
    import torch

    from colossal_core.runtime.collectives import Pending
    from colossal_core.runtime.flat import FlatBuffer, Slot
    from colossal_core.runtime.ranges import OwnedRange

__all__ = ["Home", "Kept", "Saved", "Unit"]


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
        versions: How often each parameter had been written when it was released.
    """

    unit: Unit
    held: OwnedRange
    storage: torch.UntypedStorage
    num_references: int = 0
    tag: int = 0
    views: dict[Slot, torch.Tensor] = field(factory=dict)
    guards: dict[Slot, torch.Tensor] = field(factory=dict)
    versions: dict[Slot, int] = field(factory=dict)

    @property
    def buffer(self) -> FlatBuffer:
        """The buffer."""
        return self.held.buffer


@define(eq=False)
class Saved:
    """What autograd saved of a unit's values: a place instead of a tensor.

    Attributes:
        home: Where it belongs.
        size: Its size.
        stride: Its stride.
        offset: Its first element in the storage.
        slot: The parameter that it lies in.
        version: How often that had been written.
    """

    home: Home
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    slot: Slot | None
    version: int


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
