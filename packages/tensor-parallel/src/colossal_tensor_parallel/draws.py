"""Random numbers between cut layers: other ones on each rank, and everywhere else the same ones.

The one idea: dropout of heads or features that a rank has alone shall not repeat the masks of the other
ranks, while dropout of common values has to. Between the column layers and the row layer of a group the
generators therefore stand at a state of the rank's own, made of a number that all ranks draw alike. So a
recomputed block, whose generators are put back, draws the same again, and checkpoints need nothing more.

It is done only where the proof has seen that everything random between the layers acts on cut values: dropout
of common values in between, of an adapter say, would make ranks drift apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from colossal_core.runtime.draws import mix_seed

__all__ = ["Dice", "WatchDraws"]

_DROPOUTS = {
    F.dropout,
    F.alpha_dropout,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.feature_alpha_dropout,
    torch.dropout,
}
_OTHERS = {
    torch.rand,
    torch.randn,
    torch.rand_like,
    torch.randn_like,
    torch.randint,
    torch.randperm,
    torch.bernoulli,
    torch.Tensor.bernoulli_,
    torch.Tensor.uniform_,
    torch.Tensor.normal_,
    torch.Tensor.exponential_,
}


@final
class WatchDraws(TorchFunctionMode):
    """Sees what draws random numbers while it is open, and lets dropout pass values unchanged.

    Attributes:
        is_open: Whether calls are noted.
        shapes: Of the values that are dropped, in order; None for random numbers of another kind.
        num_calls: Number of calls, with those that drop nothing as rates stand.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_open = False
        self.shapes: list[tuple[int, ...] | None] = []
        self.num_calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the call, and make it without dropping anything."""
        keywords = dict(kwargs or {})
        if func in _DROPOUTS:
            rate = args[1] if len(args) > 1 else keywords.get("p", 0.5)
            self._note(tuple(args[0].shape) if args else None, rate)
            return args[0]
        if func is F.scaled_dot_product_attention:
            rate = args[4] if len(args) > 4 else keywords.pop("dropout_p", 0.0)
            self._note(tuple(args[0].shape) if args else None, rate)
            return func(*args[:4], *((0.0, *args[5:]) if len(args) > 4 else ()), **keywords)
        if func in _OTHERS:
            self._note(None, 1.0)
        return func(*args, **keywords)

    def _note(self, shape: tuple[int, ...] | None, rate: float) -> None:
        """Note what is dropped."""
        if self.is_open:
            self.num_calls += 1
            if rate > 0:
                self.shapes.append(shape)


@final
class Dice:
    """Switches the generators of this rank between common random numbers and its own.

    Owns the common state while its own is in use.
    """

    def __init__(self, index: int) -> None:
        """Take the position of this rank among those that share the layers."""
        self._index = index
        self._common: tuple[torch.Tensor, torch.Tensor | None] | None = None

    def open(self) -> None:
        """Go over to random numbers of this rank's own; nothing when they are in use already."""
        if self._common is not None:
            return
        number = int(torch.empty((), dtype=torch.int64).random_())
        has_cuda = torch.cuda.is_initialized()
        self._common = (torch.get_rng_state(), torch.cuda.get_rng_state() if has_cuda else None)
        torch.manual_seed(mix_seed("tensor region", number, self._index))

    def close(self) -> None:
        """Go back to common random numbers; nothing when they are in use."""
        if self._common is None:
            return
        (cpu, cuda), self._common = self._common, None
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Draw this rank's own random numbers in a ``with`` block; nothing when they are in use already."""
        was_open = self._common is not None
        self.open()
        try:
            yield
        finally:
            if not was_open:
                self.close()
