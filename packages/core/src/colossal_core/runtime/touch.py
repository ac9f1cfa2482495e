"""What happens to the gradient of one parameter within a gradient window.

The one idea: ``p.grad`` is a place where autograd, the user and the window all write, so the window
remembers what it last let ``p.grad`` show, and whatever else it finds there is what the user did: cleared,
zeroed or assigned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import torch
from attrs import define, frozen

from colossal_core.errors import UsageError
from colossal_core.runtime.guards import GradientGuard

if TYPE_CHECKING:
    from colossal_core.runtime.flat import Slot

__all__ = ["Change", "Touch", "Watch", "is_watched"]

Shown = Literal["nothing", "guard", "view"]
Change = Literal["cleared", "zeroed", "assigned"]


@define(eq=False)
class Touch:
    """What happened to one parameter's gradient in this window.

    Attributes:
        slot: Its place in the buffer.
        view: Its gradient in the buffer, in the parameter's shape.
        guard: What ``p.grad`` shows while the buffer holds an unreduced gradient.
        shown: What we last let ``p.grad`` show.
        is_live: Whether ``view`` holds a gradient: of this window, or one that the user did not clear after a
            step.
        was_sent: Whether it did so when the buffer left.
        carried: Factor that a gradient which backward did not deliver in this window still lacks; None when
            there is no such gradient.
        wide: Sum of several 16-bit gradients of this window, until the buffer leaves.
        late: Gradient that arrived after the buffer had left.
        late_change: What the user did to ``p.grad`` after the buffer had left.
        shares: Boxes of the gradient, and by what a whole one is multiplied there to be this rank's share of
            the sum over all ranks that is divided afterwards; empty when it is one already.
        divisor: What gradients are divided by when they arrive.
        num_touches: How often backward delivered a gradient in this window.
        num_predicted: How often it did in the previous one; None before the first.
        num_before: How often it did the time before, for lanes that expect the larger of the two.
        num_most: The largest number of times in one round of this window, for lanes that have rounds.
        withdraws: Whether the user cleared what this rank has sent in this window, and other ranks were not
            told yet.
    """

    slot: Slot
    view: torch.Tensor
    guard: GradientGuard
    shown: Shown = "nothing"
    is_live: bool = False
    was_sent: bool = False
    carried: float | None = None
    wide: torch.Tensor | None = None
    late: torch.Tensor | None = None
    late_change: Change | None = None
    shares: tuple[tuple[tuple[slice, ...], float], ...] = ()
    divisor: int = 1
    num_touches: int = 0
    num_predicted: int | None = None
    num_before: int = 0
    num_most: int = 0
    withdraws: bool = False

    @classmethod
    def of(cls, slot: Slot, view: torch.Tensor, divisor: int) -> Touch:
        """Return the record of an untouched slot."""
        return cls(slot, view, GradientGuard(slot.parameter, slot.name), divisor=divisor)

    @property
    def is_withdrawn(self) -> bool:
        """Whether this rank sent a gradient in this window and the user cleared it since."""
        return self.was_sent and self.late_change is not None

    @property
    def is_cleared(self) -> bool:
        """Whether there is no gradient that the user still wants."""
        return not self.is_live or self.slot.parameter.grad is None

    def changed_by_user(self) -> Change | None:
        """Tell what the user did to ``p.grad`` since we last set it; None when nothing."""
        gradient = self.slot.parameter.grad
        if gradient is None:
            return None if self.shown == "nothing" else "cleared"
        if gradient is self.view:
            return None
        if self.guard.is_shown_by(gradient):
            return "zeroed" if self.guard.was_zeroed() else None
        return "assigned"

    def take_over(self, change: Change | None) -> None:
        """Bring the buffer in line with what the user did."""
        if change == "cleared":
            self.is_live, self.shown = False, "nothing"
        elif change == "zeroed":
            self.view.zero_()
        elif change == "assigned":
            gradient = self.slot.parameter.grad
            if gradient is not None:
                self.copy_from(gradient)
            self.is_live = True
            self.show_view()
        if change is not None:
            self.carried, self.wide = (1.0 if change == "assigned" else None), None

    def settle(self, scale: float) -> None:
        """Bring a gradient that the last step left or the user assigned to the terms of this window.

        Args:
            scale: Loss scale of the window.
        """
        if self.carried is not None and self.is_live:
            self._bring(self.view, self.carried * scale)
        self.carried = None

    def _bring(self, gradient: torch.Tensor, factor: float) -> None:
        """Multiply a whole gradient in place, and make it this rank's share of the coming sum."""
        if factor != 1.0:
            gradient.mul_(factor)
        for box, share in self.shares:
            gradient[box].mul_(share)

    def add(self, gradient: torch.Tensor, factor: float) -> None:
        """Add a gradient of this window to the buffer.

        16-bit gradients are summed in fp32, and narrowed when the buffer leaves.

        Args:
            gradient: What backward delivered; the buffer's own view when autograd has added it already.
            factor: What it is multiplied by.
        """
        if gradient is self.view:
            return
        if not self.is_live:
            self.copy_from(gradient, factor)
        elif self.is_narrow:
            if self.wide is None:
                self.wide = self.view.float()
            self.wide.add_(gradient.detach().to(self.wide.dtype), alpha=factor)
        else:
            self.view.add_(gradient.detach(), alpha=factor)
        self.is_live = True

    @property
    def is_narrow(self) -> bool:
        """Whether the buffer holds 16-bit gradients."""
        return self.view.dtype.itemsize == 2

    def narrow(self) -> None:
        """Bring the sum of several gradients back into the buffer."""
        if self.wide is not None:
            if self.is_live:
                self.view.copy_(self.wide)
            self.wide = None

    def note_change(self, change: Change | None, scale: float) -> None:
        """Remember what the user did to ``p.grad`` while the buffer is away.

        Args:
            change: From :meth:`changed_by_user`.
            scale: Loss scale of the window.
        """
        if change is None:
            return
        if change == "assigned":
            self.late, self.late_change = self.take_assigned(scale), "cleared"
            self.show_guard()
            return
        self.late, self.late_change = None, change
        if change == "cleared":
            self.shown = "nothing"

    def take_assigned(self, scale: float) -> torch.Tensor | None:
        """Return a copy of what the user assigned to ``p.grad``, as this rank's share of the coming sum.

        Args:
            scale: Loss scale of the window.
        """
        gradient = self.slot.parameter.grad
        if gradient is None:
            return None
        copy = gradient.detach().clone()
        self._bring(copy, scale)
        return copy

    def add_late(self, gradient: torch.Tensor, factor: float) -> None:
        """Keep a gradient that arrived after the buffer had left; several are summed in fp32 at least."""
        if factor != 1.0:
            gradient = gradient * factor
        if self.late is None:
            self.late = gradient
        else:
            wide = torch.promote_types(gradient.dtype, torch.float32)
            self.late = self.late.to(wide) + gradient

    def fold_in(self, *, keeps: bool) -> None:
        """Bring the buffer, which is back, in line with the late news.

        Args:
            keeps: Whether it holds something of this parameter that counts: this rank's share of the sum that
                was there.
        """
        if not keeps and self.late_change == "zeroed":
            self.view.zero_()
            keeps = True
        if self.late is not None:
            if keeps:
                self.view.add_(self.late)
            else:
                self.view.copy_(self.late)
        self.is_live = keeps or self.late is not None
        self.late, self.late_change = None, None

    def copy_from(self, gradient: torch.Tensor, factor: float = 1.0) -> None:
        """Copy a gradient into the buffer.

        Args:
            gradient: The gradient, strided.
            factor: What it is multiplied by on the way.

        Raises:
            UsageError: It is sparse.
        """
        if gradient.layout is not torch.strided:
            raise UsageError(
                f"parameter {self.slot.name!r} has a sparse gradient",
                hint="build the embedding with sparse=False",
            )
        values = gradient.detach()
        if factor == 1.0:
            self.view.copy_(values)
        elif values.dtype == self.view.dtype and values.device == self.view.device:
            torch.mul(values, factor, out=self.view)
        else:
            self.view.copy_(values).mul_(factor)

    def show_view(self) -> None:
        """Let ``p.grad`` show the buffer."""
        self.slot.parameter.grad = self.view
        self.shown = "view"

    def show_guard(self) -> None:
        """Let ``p.grad`` show the guard."""
        self.guard.renew()
        self.slot.parameter.grad = self.guard.tensor
        self.shown = "guard"

    def show_again(self) -> None:
        """Let ``p.grad`` show what we last let it show."""
        {"nothing": self.show_nothing, "guard": self.show_guard, "view": self.show_view}[self.shown]()

    def show_nothing(self) -> None:
        """Let ``p.grad`` be None."""
        self.slot.parameter.grad = None
        self.shown = "nothing"


@frozen
class Watch:
    """A hook on a parameter; a class, so that ``boost`` recognises what is boosted already.

    Attributes:
        then: Called after autograd has accumulated.
    """

    then: Callable[[], None]

    def __call__(self, _: torch.Tensor) -> None:
        """Run, as torch calls hooks."""
        self.then()


def is_watched(parameter: torch.Tensor) -> bool:
    """Whether the gradients of a parameter belong to some gradient window."""
    hooks = parameter._post_accumulate_grad_hooks  # noqa: SLF001 - torch has no getter
    return any(isinstance(hook, Watch) for hook in (hooks or {}).values())
