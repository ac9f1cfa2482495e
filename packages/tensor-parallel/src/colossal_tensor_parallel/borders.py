"""What happens where data enters and leaves a cut model.

Ranks that share layers have to bring the same batch. They compare a number made of it at the first call, and
at every call where ``COLOSSAL_CHECK=1`` is set. Logits that leave are gathered, unless they go into a loss.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, final

import torch
from attrs import evolve
from torch.utils import _pytree as pytree

from colossal_core.errors import RankMismatchError
from colossal_core.interfaces import AbstractBorder
from colossal_tensor_parallel.logits import whole
from colossal_tensor_parallel.tokens import whole_tokens

if TYPE_CHECKING:
    from colossal_core.runtime.context import Context
    from colossal_tensor_parallel.draws import Dice
    from colossal_tensor_parallel.products import Entrance

__all__ = ["CutBorder", "complete"]

CHECK_VARIABLE = "COLOSSAL_CHECK"
_PRIME = 1_000_003


def complete(outputs: Any) -> Any:
    """Return outputs with whole logits and activations; collective where there are cut ones."""
    return pytree.tree_map(lambda leaf: whole_tokens(whole(leaf)), outputs)


@final
class CutBorder(AbstractBorder):
    """Compares what enters, and gathers logits that leave."""

    def __init__(self, entrance: Entrance, dice: Dice, context: Context) -> None:
        """Remember what is cleared when a call ends, and who says where outputs go."""
        self._entrance = entrance
        self._dice = dice
        self._crossing = context.crossing
        self._wire = evolve(entrance.wire, phase="batch")
        self._is_first = True

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Leave the arguments as they are.

        Raises:
            RankMismatchError: Ranks that share layers bring different batches; on all of them.
        """
        # A call before may have ended between two layers, in an error or where a pipeline stage ends.
        self._dice.close()
        self._entrance.clear()
        if self._is_first or os.environ.get(CHECK_VARIABLE) == "1":
            self._is_first = False
            self._compare((args, kwargs))
        return args, kwargs

    def exit(self, outputs: Any) -> Any:
        """Return outputs with whole activations, and with whole logits unless a loss reads them."""
        self._entrance.clear()
        self._dice.close()
        outputs = pytree.tree_map(whole_tokens, outputs)
        return outputs if self._crossing.goes_to_loss else complete(outputs)

    def _compare(self, batch: Any) -> None:
        """Compare a number made of the batch with those of the other ranks."""
        tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
        number = 0
        for tensor in tensors:
            number = (number * _PRIME + _number_of(tensor)) % 2**61
        device = tensors[0].device if tensors else torch.device("cpu")
        largest, smallest = self._wire.largest(torch.tensor([number, -number], device=device)).tolist()
        if largest != -smallest:
            ranks = ", ".join(map(str, self._wire.group.ranks))
            raise RankMismatchError(
                f"ranks {ranks} share the layers of this model, but were called with different batches",
                hint="let them read the same samples: booster.data_rank says which share to bring",
            )


def _number_of(tensor: torch.Tensor) -> int:
    """Return a number that depends on the shape and on each byte of a tensor and its place."""
    number = len(tensor.shape)
    for size in tensor.shape:
        number = number * _PRIME + size
    if tensor.numel() and not tensor.is_complex():
        plain = tensor.detach().contiguous().view(-1).view(torch.uint8).long()
        places = torch.arange(len(plain), device=plain.device) % 8191 + 1
        number = number * _PRIME + int((plain * places).sum())
    return number % 2**61
