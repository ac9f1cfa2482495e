"""This rank's part of the reduced gradients of one buffer, and the messages whose results add up there.

The one idea: the first result of a window goes straight into the part; later ones add to a total in fp32 at
least, which is brought into the part at the end. In fp32 and wider that total is the part itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import define

if TYPE_CHECKING:
    from colossal_core.runtime.collectives import Pending
    from colossal_core.runtime.flat import FlatBuffer, Slot

__all__ = ["Message", "Shard"]


@define(eq=False)
class Message:
    """Something on its way: a buffer, or the closing message of a round.

    Attributes:
        index: The buffer; None for a closing message.
        pending: The collective.
        result: What it leaves.
        content: The memory that it was sent from.
        is_first: Whether a closing message is the first of its window.
    """

    index: int | None
    pending: Pending
    result: torch.Tensor
    content: torch.Tensor
    is_first: bool = False


@define(eq=False)
class Shard:
    """This rank's part of the reduced gradients of one buffer.

    Attributes:
        buffer: The buffer.
        start: First element of the part in the buffer.
        gradient: The part, 1-D, ``span_numel`` elements; the same tensor for as long as the buffer lives.
        is_inside: Whether it is a view of the buffer's own gradients.
        total: What earlier rounds left, in fp32 at least; None while there is nothing to add to.
        has_result: Whether a round of this window left a result in ``gradient``.
        is_awaited: Whether the first round of this window was sent, which leaves its result there.
    """

    buffer: FlatBuffer
    start: int
    gradient: torch.Tensor
    is_inside: bool
    total: torch.Tensor | None = None
    has_result: bool = False
    is_awaited: bool = False

    def receive(self) -> torch.Tensor:
        """Return where the result of the next round goes: the part, or what is added to it then."""
        self.restore()
        if self.has_result or self.is_awaited:
            return torch.empty_like(self.gradient)
        self.is_awaited = True
        return self.gradient

    def take(self, result: torch.Tensor) -> None:
        """Keep the result of a round, which lies where :meth:`receive` said; in the order of rounds."""
        if result is self.gradient:
            self.has_result, self.is_awaited = True, False
            return
        self.keep()
        if self.total is not None:
            self.total.add_(result)

    def restore(self) -> None:
        """Have memory for the reduced gradients again, with undefined content."""
        storage = self.gradient.untyped_storage()
        if storage.nbytes() == 0 and not self.is_inside:
            storage.resize_(self.gradient.numel() * self.gradient.dtype.itemsize)

    def release(self) -> None:
        """Give the memory back."""
        if self.is_inside:
            self.buffer.release_gradients()
        else:
            self.gradient.untyped_storage().resize_(0)

    def keep(self) -> None:
        """Let what is there be added to, and its memory be used for the next round."""
        if self.has_result and self.total is None:
            wide = torch.promote_types(self.gradient.dtype, torch.float32)
            stays = not self.is_inside and self.gradient.dtype == wide
            self.total = self.gradient if stays else self.gradient.to(wide, copy=True)

    def settle(self) -> None:
        """Bring the total of several rounds into the gradient."""
        if self.total is not None and self.total is not self.gradient:
            self.gradient.copy_(self.total)
        self.total, self.has_result = None, False

    def part_of(self, slot: Slot) -> torch.Tensor:
        """Return what this rank holds of a parameter; may be empty."""
        first, last = slot.within(self.start, self.start + self.gradient.numel())
        return (self.gradient if self.total is None else self.total)[first - self.start : last - self.start]
