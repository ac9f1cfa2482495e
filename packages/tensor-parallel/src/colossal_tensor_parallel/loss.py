"""Cross entropy of logits that are cut along the vocabulary: three words per token travel, and no logits.

With the largest logit ``m`` of a token over all ranks, the loss is ``log(sum(exp(z - m))) - (z_target - m)``.
The maximum, and then the sum of exponentials with the target's logit, which only one rank has, are all that
ranks have to tell each other. The gradient, softmax minus one-hot, needs nothing more. Label smoothing needs
one more word, the sum of all logits. The logarithm of the sum by itself, which z-loss squares, takes two.

Source: Shoeybi et al., *Megatron-LM*, 2019, section 3 (the fused cross entropy).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch

from colossal_core.errors import UsageError
from colossal_tensor_parallel.spans import split_evenly
from colossal_tensor_parallel.wires import call_function

if TYPE_CHECKING:
    from colossal_tensor_parallel.wires import Wire

__all__ = ["cut_cross_entropy", "cut_logsumexp"]

Reduction = Literal["none", "mean", "sum"]


def cut_cross_entropy(
    piece: torch.Tensor,
    target: torch.Tensor,
    wire: Wire,
    size: int,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Return the cross entropy of logits of which each rank has a piece; the same on all ranks.

    Args:
        piece: This rank's logits ``[token, this rank's classes]``; 16-bit ones are widened.
        target: Class numbers ``[token]``, the same on all ranks.
        wire: The ranks.
        size: Number of classes.
        ignore_index: Targets that do not count.
        reduction: ``"none"``, ``"mean"`` over targets that count, or ``"sum"``.
        label_smoothing: How much of the target is spread over all classes.

    Raises:
        UsageError: A target is no class. Checked on the CPU only, where looking costs nothing.
    """
    counts = target != ignore_index
    if target.device.type == "cpu" and bool(((target < 0) | (target >= size)).logical_and(counts).any()):
        raise UsageError(
            f"targets reach from {int(target.min())} to {int(target.max())}, but there are {size} classes",
            hint=f"use 0 to {size - 1}, or ignore_index={ignore_index}",
        )
    wide = piece.float() if piece.element_size() < 4 else piece
    losses = call_function(_CutCrossEntropy, wide, target, counts, (wire, size, label_smoothing))
    if reduction == "none":
        return losses
    total = losses.sum()
    return total / counts.sum() if reduction == "mean" else total


def cut_logsumexp(piece: torch.Tensor, wire: Wire) -> torch.Tensor:
    """Return the logarithm of the sum of exponentials of all classes; the same on all ranks.

    Args:
        piece: This rank's logits ``[..., this rank's classes]``.
        wire: The ranks.
    """
    return call_function(_CutLogSumExp, piece, wire)


class _CutLogSumExp(torch.autograd.Function):
    """Logarithm of the sum of exponentials over the last dim, of which each rank has a piece."""

    @staticmethod
    def forward(ctx: Any, piece: torch.Tensor, wire: Wire) -> torch.Tensor:
        """Return it for each token."""
        wide = piece.float() if piece.element_size() < 4 else piece
        largest = wire.largest(wide.amax(dim=-1))
        found = wire.sum((wide - largest.unsqueeze(-1)).exp_().sum(dim=-1)).log() + largest
        ctx.save_for_backward(piece, found)
        return found.to(piece.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Return the softmax, times the gradient of each token."""
        piece, found = ctx.saved_tensors
        weights = (piece - found.unsqueeze(-1)).exp_()
        return weights.mul_(gradients[0].unsqueeze(-1)).to(piece.dtype), None


class _CutCrossEntropy(torch.autograd.Function):
    """Loss of each token; zero where the target does not count."""

    @staticmethod
    def forward(
        ctx: Any,
        piece: torch.Tensor,
        target: torch.Tensor,
        counts: torch.Tensor,
        terms: tuple[Wire, int, float],
    ) -> torch.Tensor:
        """Return the losses ``[token]``; terms are the ranks, the number of classes and the smoothing."""
        wire, size, smoothing = terms
        start, stop = split_evenly(size, wire.group.size)[wire.group.index]
        largest = wire.largest(piece.amax(dim=-1))
        shifted = piece - largest.unsqueeze(-1)
        is_here = counts & (target >= start) & (target < stop)
        column = (target - start).masked_fill(~is_here, 0).unsqueeze(-1)
        chosen = shifted.gather(-1, column).squeeze(-1).masked_fill(~is_here, 0.0)
        summed = shifted.sum(dim=-1) if smoothing else None
        weights = shifted.exp_()
        told = [weights.sum(dim=-1), chosen] + ([] if summed is None else [summed])
        normaliser, chosen, *others = wire.sum(torch.stack(told)).unbind()
        losses = normaliser.log() - chosen
        if others:
            spread = normaliser.log() - others[0] / size
            losses = (1 - smoothing) * losses + smoothing * spread
        weights /= normaliser.unsqueeze(-1)
        ctx.save_for_backward(weights, column, is_here, counts)
        ctx.size, ctx.smoothing = size, smoothing
        return losses.masked_fill(~counts, 0.0)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Return softmax minus target, times the gradient of each token's loss."""
        weights, column, is_here, counts = ctx.saved_tensors
        scale = gradients[0].masked_fill(~counts, 0.0).unsqueeze(-1)
        found = weights * scale
        found.scatter_add_(-1, column, -(1 - ctx.smoothing) * scale.masked_fill(~is_here.unsqueeze(-1), 0.0))
        if ctx.smoothing:
            found -= scale * (ctx.smoothing / ctx.size)
        return found, None, None, None
