"""The modules that stand in the place of cut layers.

Each shares the state of the user's module and computes with what is left of its weight; see
:mod:`colossal_core.runtime.replacement`. What a layer needs besides is its *works*, a value in the
replacement.

Source: Shoeybi et al., *Megatron-LM*, 2019, section 3.
"""

from __future__ import annotations

from typing import Any, final

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import nn

from colossal_core.runtime.replacement import Stand, replacement_of
from colossal_tensor_parallel.draws import Dice
from colossal_tensor_parallel.logits import SplitLogits
from colossal_tensor_parallel.wires import Entrance, Wire, add_up, join_pieces

__all__ = ["CutColumn", "CutHead", "CutRow", "CutTable", "Works"]


@final
@frozen(kw_only=True, eq=False)
class Works:
    """What a cut layer needs besides the user's state.

    Attributes:
        entrance: Where common inputs are entered.
        size: Output features, or rows, of all ranks together.
        first: First row of a table that is here.
        is_transposed: Whether the weight is ``[in, out]``.
        gathers: Whether outputs are gathered.
        is_plain: Whether a table looks up rows and does nothing else.
        dice: What draws for values behind a column layer, where they are dropped.
    """

    entrance: Entrance
    size: int
    first: int = 0
    is_transposed: bool = False
    gathers: bool = False
    is_plain: bool = True
    dice: Dice | None = None

    @property
    def wire(self) -> Wire:
        """The ranks."""
        return self.entrance.wire


def _works(module: nn.Module) -> Works:
    """Return what a cut layer was given."""
    found: Works = replacement_of(module).payload
    return found


def _multiply(
    features: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, is_transposed: bool
) -> torch.Tensor:
    """Return the product with a weight, plus a bias."""
    return F.linear(features, weight.T if is_transposed else weight, bias)


@final
class CutColumn(Stand):
    """A linear layer that computes some of its output features."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Map ``[..., in]`` to ``[..., this rank's out]``, or to all outputs where they are gathered."""
        works = _works(self)
        entered = works.entrance.enter(features)
        outputs = _multiply(entered, self.weight, self.bias, is_transposed=works.is_transposed)
        if works.dice is not None and self.training:
            works.dice.open()
        return join_pieces(outputs, works.wire, works.size, -1) if works.gathers else outputs


@final
class CutRow(Stand):
    """A linear layer that has some of its input features; the ranks' summands are added up."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Map ``[..., this rank's in]`` to ``[..., out]``, the bias added once."""
        works = _works(self)
        if works.dice is not None:
            works.dice.close()
        summand = _multiply(features, self.weight, None, is_transposed=works.is_transposed)
        total = add_up(summand, works.wire)
        return total if self.bias is None else total + self.bias


@final
class CutHead(Stand):
    """A linear layer that computes some of the logits of a vocabulary."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def forward(self, features: torch.Tensor) -> Any:
        """Map ``[..., in]`` to logits of which this rank holds a piece."""
        works = _works(self)
        piece = F.linear(works.entrance.enter(features), self.weight, self.bias)
        return SplitLogits(piece, works.wire, works.size)


@final
class CutTable(Stand):
    """An embedding that has some of its rows; the others are zero here and come from other ranks."""

    weight: torch.Tensor
    padding_idx: int | None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Look up the rows that are here, and add up over the ranks."""
        works = _works(self)
        local = ids - works.first
        outside = (local < 0) | (local >= self.weight.shape[0])
        inside = local.masked_fill(outside, 0)
        if works.is_plain:
            rows = F.embedding(inside, self.weight, self.padding_idx)
        else:
            rows = super().forward(inside)
        return add_up(rows.masked_fill(outside.unsqueeze(-1), 0.0), works.wire)
