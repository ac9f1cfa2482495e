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
from torch.utils import _pytree as pytree

from colossal_core.errors import CapabilityError
from colossal_core.runtime.replacement import Stand, replacement_of
from colossal_tensor_parallel.draws import Dice
from colossal_tensor_parallel.logits import SplitLogits
from colossal_tensor_parallel.products import Entrance, multiply, multiply_entered
from colossal_tensor_parallel.tokens import (
    TOKENS,
    Lot,
    SplitTokens,
    divide_tokens,
    is_known,
    plain,
    whole_tokens,
)
from colossal_tensor_parallel.wires import Wire, add_up, enter, join_pieces, on_first, sum_pieces

__all__ = ["CutColumn", "CutExperts", "CutHead", "CutRow", "CutTable", "OfTokens", "Works", "works_in"]

LEAST_DIMS = 3
"""Dims from which outputs are divided: rows of ``[tokens, features]`` are often sorted anew."""


@final
@frozen(kw_only=True, eq=False)
class Works:
    """What a cut layer needs besides the user's state.

    Attributes:
        entrance: Where common inputs are entered.
        size: Output features, or rows, of all ranks together; of attention, features of this rank.
        first: First row of a table that is here; of attention, first head.
        is_transposed: Whether the weight is ``[in, out]``.
        gathers: Whether outputs are gathered.
        is_plain: Whether a table looks up rows and does nothing else.
        dice: What draws for values behind a column layer, where they are dropped.
        divides: Whether outputs are left divided along the tokens.
        name: Of the layer in the model.
    """

    entrance: Entrance
    size: int
    first: int = 0
    is_transposed: bool = False
    gathers: bool = False
    is_plain: bool = True
    dice: Dice | None = None
    divides: bool = False
    name: str = ""

    @property
    def lot(self) -> Lot:
        """How activations are divided along the tokens."""
        assert self.entrance.lot is not None
        return self.entrance.lot

    @property
    def wire(self) -> Wire:
        """The ranks."""
        return self.entrance.wire


def works_in(module: Stand) -> Works:
    """Return what a cut layer was given."""
    found: Works = replacement_of(module).payload
    return found


@final
class CutColumn(Stand):
    """A linear layer that computes some of its output features."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Map ``[..., in]`` to ``[..., this rank's out]``, or to all outputs where they are gathered."""
        works = works_in(self)
        entered = works.entrance.enter(features)
        outputs = multiply_entered(entered, self.weight, self.bias, is_transposed=works.is_transposed)
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
        works = works_in(self)
        if works.dice is not None:
            works.dice.close()
        summand = multiply(features, self.weight, None, is_transposed=works.is_transposed)
        if works.divides:
            return _divided_sum(summand, works, self.bias)
        total = add_up(summand, works.wire)
        return total if self.bias is None else total + self.bias


@final
class CutHead(Stand):
    """A linear layer that computes some of the logits of a vocabulary."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def forward(self, features: torch.Tensor) -> Any:
        """Map ``[..., in]`` to logits of which this rank holds a piece."""
        works = works_in(self)
        entered = works.entrance.enter(features)
        piece = multiply_entered(entered, self.weight, self.bias, is_transposed=False)
        return SplitLogits(piece, works.wire, works.size)


@final
class CutTable(Stand):
    """An embedding that has some of its rows; the others are zero here and come from other ranks."""

    weight: torch.Tensor
    padding_idx: int | None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Look up the rows that are here, and add up over the ranks."""
        works = works_in(self)
        local = ids - works.first
        outside = (local < 0) | (local >= self.weight.shape[0])
        inside = local.masked_fill(outside, 0)
        if works.is_plain:
            rows = F.embedding(inside, self.weight, self.padding_idx)
        else:
            rows = super().forward(inside)
        summand = rows.masked_fill(outside.unsqueeze(-1), 0.0)
        return _divided_sum(summand, works, None) if works.divides else add_up(summand, works.wire)


@final
class CutExperts(Stand):
    """Stacked experts with some of their hidden features; the ranks' summands are added up."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Map common activations and routing weights to common outputs."""
        wire = works_in(self).wire
        entered = pytree.tree_map(lambda leaf: _entered(leaf, wire), (args, kwargs))
        summand: torch.Tensor = super().forward(*entered[0], **entered[1])
        return add_up(summand, wire)


def _entered(leaf: Any, wire: Wire) -> Any:
    """Return an argument of experts, of which each rank computes something else."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    whole = whole_tokens(leaf)
    return enter(whole, wire) if whole.requires_grad and torch.is_grad_enabled() else whole


@final
class OfTokens(Stand):
    """A module that treats each token by itself, and computes those that this rank has."""

    def forward(self, features: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Map ``[..., tokens, features]``, divided or common, to a divided tensor.

        Raises:
            CapabilityError: It gets tensors besides, which it did not when it was tried.
        """
        lot = works_in(self).lot
        # Without weights nothing is gained by dividing, and features may be cut: activations and dropout are
        # used between column and row layers, too.
        stays = not is_known(features) or not any(True for _ in self.parameters())
        if stays and not isinstance(features, SplitTokens):
            found: torch.Tensor = super().forward(features, *args, **kwargs)
            return found
        if any(isinstance(leaf, torch.Tensor) for leaf in (*args, *kwargs.values())):
            raise CapabilityError(
                f"a {type(replacement_of(self).old).__name__} that computes its share of the tokens gets "
                "several tensors, but was seen with one",
                hint="leave sequence=True out",
            )
        is_vector = features.dim() < 2
        common = features.unsqueeze(0) if is_vector else features
        mine = common if isinstance(common, SplitTokens) else divide_tokens(common, lot)
        made = mine.like(super().forward(plain(mine), *args, **kwargs))
        return made.join(type(self).__name__).squeeze(0) if is_vector else made


def _divided_sum(summand: torch.Tensor, works: Works, bias: torch.Tensor | None) -> torch.Tensor:
    """Return the sum of the ranks' summands plus a bias, divided along the tokens where there are any.

    The gradient of the bias is a share in either case, as the parameter table says.
    """
    lot = works.lot
    if summand.dim() < LEAST_DIMS:
        total = add_up(summand, lot.wire)
        return total if bias is None else total + on_first(bias, lot.wire)
    piece = sum_pieces(summand, lot.wire, TOKENS)
    piece = piece if bias is None else piece + bias
    return SplitTokens.of(piece, lot, int(summand.shape[TOKENS]), works.name)
