"""Column layers: what enters them, and the product, whose backward keeps the wire busy while it computes.

The one idea: of a common input several layers may compute something, so it enters once: on its way back the
gradients are first added up on this rank and then travel in one message. While they travel, the gradient of a
weight is computed.

# Note [Order of backward]
Autograd runs of the nodes that are ready the one that was made last. A common value passes a `_Wait` and then
an `_Enter`; a weight passes a `_Tap` made between these two, or later. When the last layer has returned the
gradient of its input, `_Enter` starts the message and returns a placeholder at once; the `_Tap` of the layer
that was called first computes its weight's gradient; then `_Wait` waits. Of several layers the others have
computed theirs before. Nothing but speed depends on that order.

# Note [Inputs that are gathered twice]
Of a value that is divided along the tokens layers keep this rank's piece. Backward gathers it a second time,
once for all layers that read it, while the first of them computes the gradient of its input.

Source: Shoeybi et al., *Megatron-LM*, 2019, section 3; Korthikanti et al., *Reducing Activation
Recomputation*, 2022, section 4.2.2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, final

import torch
import torch.nn.functional as F
from attrs import define, field, frozen
from torch.autograd.function import once_differentiable

from colossal_tensor_parallel.tokens import TOKENS, SplitTokens, plain
from colossal_tensor_parallel.wires import Wire, call_function

if TYPE_CHECKING:
    from colossal_tensor_parallel.tokens import Lot

__all__ = ["Entered", "Entrance", "multiply", "multiply_entered"]


def multiply(
    features: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, is_transposed: bool
) -> torch.Tensor:
    """Return the product with a weight, plus a bias; torch's own backward."""
    return F.linear(features, weight.T if is_transposed else weight, bias)


@define(eq=False)
class _Passage:
    """What the nodes of one entered value share; see the notes of the module.

    Attributes:
        wire: The ranks.
        num_tokens: Tokens of all ranks; None when the value is whole.
        num_readers: Weights whose gradients need the value again.
    """

    wire: Wire
    num_tokens: int | None
    num_readers: int = 0
    _num_left: int = 0
    _coming: Callable[[], torch.Tensor] | None = None
    _again: torch.Tensor | None = None
    _going: Callable[[], torch.Tensor] | None = None

    def expect(self, kept: torch.Tensor) -> None:
        """Start to bring the value back, unless it is there or under way."""
        if self.num_tokens is not None and self._again is None and self._coming is None:
            self._coming = self.wire.start_join(kept, self.num_tokens, TOKENS)
            self._num_left = self.num_readers

    def take(self, kept: torch.Tensor) -> torch.Tensor:
        """Return the whole value; the last reader of a backward lets it go."""
        if self.num_tokens is None:
            return kept
        self.expect(kept)
        if self._coming is not None:
            self._again, self._coming = self._coming(), None
        again = self._again
        assert again is not None
        self._num_left -= 1
        if self._num_left <= 0:
            self._again = None
        return again

    def start_back(self, gradient: torch.Tensor) -> None:
        """Start to sum the gradient of the value over the ranks."""
        if self.num_tokens is None:
            total, pending = self.wire.start_sum(gradient)

            def finish() -> torch.Tensor:
                """Wait, and return the sum."""
                pending.wait()
                return total

            self._going = finish
        else:
            self._going = self.wire.start_scatter(gradient, TOKENS)

    def finish_back(self) -> torch.Tensor:
        """Wait for the sum, and return it, or this rank's piece of it."""
        going, self._going = self._going, None
        assert going is not None
        return going()


def _placeholder(like: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return what stands for a gradient that comes later, in the memory of one element."""
    return like.new_empty(()).expand(shape)


class _Wait(torch.autograd.Function):
    """Identity; backward waits for what `_Enter` has started."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, passage: _Passage) -> torch.Tensor:
        """Return the value."""
        ctx.passage = passage
        return value.view_as(value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        """Return the summed gradient."""
        return ctx.passage.finish_back(), None


class _Enter(torch.autograd.Function):
    """A common value, or one whose pieces are gathered; backward starts the sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, passage: _Passage) -> torch.Tensor:
        """Return the whole value."""
        ctx.passage, ctx.shape = passage, value.shape
        if passage.num_tokens is None:
            return value.view_as(value)
        return passage.wire.join(value, passage.num_tokens, TOKENS)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Start the sum, and return a placeholder for it."""
        ctx.passage.start_back(gradients[0])
        return _placeholder(gradients[0], ctx.shape), None


@define(eq=False)
class _Link:
    """What a product and the tap of its weight share.

    Attributes:
        passage: Brings the product's input back.
        is_transposed: Whether the weight is ``[in, out]``.
        gradient: That of the outputs, from the product's backward to the tap's.
    """

    passage: _Passage
    is_transposed: bool
    gradient: torch.Tensor | None = field(default=None, init=False)


class _Tap(torch.autograd.Function):
    """A weight on its way to a product; backward computes its gradient."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, kept: torch.Tensor, link: _Link) -> torch.Tensor:
        """Return the weight; of its product's input the kept part is given."""
        ctx.save_for_backward(kept)
        ctx.link = link
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        """Return the gradient of the weight."""
        (kept,) = ctx.saved_tensors
        link = ctx.link
        outer, link.gradient = link.gradient.flatten(0, -2), None
        inner = link.passage.take(kept).flatten(0, -2)
        return inner.T @ outer if link.is_transposed else outer.T @ inner, None, None


class _Product(torch.autograd.Function):
    """A product with a tapped weight, plus a bias; backward leaves the weight's gradient to the tap."""

    @staticmethod
    def forward(
        ctx: Any,
        features: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        inner: tuple[torch.Tensor, _Link],
    ) -> torch.Tensor:
        """Return the outputs; what is kept of the features comes with the link."""
        kept, ctx.link = inner
        ctx.save_for_backward(weight, kept)
        return multiply(features, weight, bias, is_transposed=ctx.link.is_transposed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Return the gradients of features and bias, and a placeholder for that of the weight."""
        gradient = gradients[0]
        weight, kept = ctx.saved_tensors
        ctx.link.passage.expect(kept)
        ctx.link.gradient = gradient
        back = None
        if ctx.needs_input_grad[0]:
            back = gradient @ (weight.T if ctx.link.is_transposed else weight)
        bias = gradient.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        return back, _placeholder(gradient, weight.shape), bias, None


@final
@frozen(kw_only=True, eq=False)
class Entered:
    """A value that column layers read.

    Attributes:
        whole: All of it.
        kept: What products keep of it; this rank's piece where it is divided.
        passage: Shared by its nodes; None where nothing is differentiated.
    """

    whole: torch.Tensor
    kept: torch.Tensor
    passage: _Passage | None


def multiply_entered(
    entered: Entered, weight: torch.Tensor, bias: torch.Tensor | None, *, is_transposed: bool
) -> torch.Tensor:
    """Return the product of an entered value with a weight, plus a bias.

    Args:
        entered: ``[..., in]``.
        weight: ``[out, in]``, or ``[in, out]`` when transposed.
        bias: ``[out]``, or None.
        is_transposed: Which of the two.
    """
    passage, whole = entered.passage, entered.whole
    is_plain = passage is None or not weight.requires_grad or whole.dim() < 2
    if passage is None or is_plain or torch.is_autocast_enabled(whole.device.type):
        return multiply(whole, weight, bias, is_transposed=is_transposed)
    passage.num_readers += 1
    link = _Link(passage, is_transposed)
    tapped = call_function(_Tap, weight, entered.kept, link)
    return call_function(_Product, whole, tapped, bias, (entered.kept, link))


@final
class Entrance:
    """Where the layers of one model enter common values; one value that several layers read enters once.

    Queries, keys and values read the same tensor: its gradients are then summed on this rank first, and
    travel in one message.
    """

    def __init__(self, wire: Wire, lot: Lot | None = None) -> None:
        """Hold the wire, and how values are divided along the tokens where they are."""
        self.wire = wire
        self.lot = lot
        self._last: tuple[torch.Tensor, int, bool, Entered] | None = None

    def enter(self, value: torch.Tensor) -> Entered:
        """Return the value for use by a cut layer."""
        is_divided = isinstance(value, SplitTokens)
        learns = value.requires_grad and torch.is_grad_enabled()
        if not (learns or is_divided):
            return Entered(whole=value, kept=value, passage=None)
        if self._last is not None:
            seen, version, learned, entered = self._last
            if seen is value and version == value._version and learned == learns:
                return entered
        entered = self._enter(value, learns=learns)
        self._last = (value, value._version, learns, entered)
        return entered

    def _enter(self, value: torch.Tensor, *, learns: bool) -> Entered:
        """Let a value pass."""
        num_tokens = value.num_tokens if isinstance(value, SplitTokens) else None
        piece = plain(value)
        passage = _Passage(self.wire, num_tokens)
        waited = call_function(_Wait, piece, passage) if learns else piece
        whole = call_function(_Enter, waited, passage)
        is_training = torch.is_grad_enabled()
        kept = piece.detach() if num_tokens is not None else whole.detach()
        return Entered(whole=whole, kept=kept, passage=passage if is_training else None)

    def clear(self) -> None:
        """Forget the last value, which would keep its graph alive."""
        self._last = None
