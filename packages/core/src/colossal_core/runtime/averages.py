"""Running averages of parameters, kept where the parameters are kept.

The one idea: the memory manager's places say which tensors of this rank hold the values (the masters, where
there are any), so an average is one more tensor beside each of them: sharded exactly like the model, updated
without communication, and shown by exchanging it with the values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, final

import torch
from attrs import evolve

from colossal_core.errors import UsageError

if TYPE_CHECKING:
    from colossal_core.runtime.table import Place

__all__ = ["Average"]


@final
class Average:
    """An exponential moving average of one model's parameters; made by ``Booster.average``.

    ``average = decay * average + (1 - decay) * parameter`` after every real step of the optimizer, starting
    from the values at the time it was made. Kept in fp32, or in fp64 beside fp64 values. Buffers are not
    averaged.

    Attributes:
        decay: Weight of the past, in ``[0, 1)``.
        num_updates: Real steps that it has seen.
        is_shown: Whether the model computes with it at this moment.
    """

    def __init__(self, places: Sequence[Place], decay: float) -> None:
        """Start from the current values.

        Args:
            places: Places of the state ``"value"`` and ``"master"`` of the parameters to average.
            decay: Weight of the past.

        Raises:
            UsageError: ``decay`` is outside ``[0, 1)``.
        """
        if not 0 <= decay < 1:
            raise UsageError(f"decay is {decay}, expected at least 0 and below 1", hint="0.999 is usual")
        self.decay = decay
        self.num_updates = 0
        self.is_shown = False
        masters = {(place.key, place.start): place for place in places if place.state == "master"}
        self._places: list[Place] = []
        self._values: list[torch.Tensor] = []
        self._sources: list[torch.Tensor] = []
        self._averages: list[torch.Tensor] = []
        for place in places:
            if place.state != "value" or not place.tensor.is_floating_point():
                continue
            kept = masters.get((place.key, place.start), place)
            source = kept.tensor
            wide = source if source.dtype.itemsize >= torch.float32.itemsize else source.float()
            self._places.append(kept)
            self._values.append(place.tensor)
            self._sources.append(source)
            self._averages.append(wide.detach().clone())

    @torch.no_grad()
    def update(self) -> None:
        """Take in the current values; the Booster calls it after each real step."""
        sources = [
            source if source.dtype == average.dtype else source.to(average.dtype)
            for source, average in zip(self._sources, self._averages, strict=True)
        ]
        torch._foreach_lerp_(self._averages, sources, 1 - self.decay)
        self.num_updates += 1

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Let the model compute with the averages within this context; the values come back afterwards.

        Raises:
            UsageError: A parameter was changed meanwhile, as an optimizer step does; the changes are lost.
        """
        kept = [value.detach().clone() for value in self._values]
        with torch.no_grad():
            torch._foreach_copy_(self._values, self._averages)
        versions = [value._version for value in self._values]
        self.is_shown = True
        try:
            yield
        finally:
            self.is_shown = False
            changed = [
                place.key[1]
                for place, value, version in zip(self._places, self._values, versions, strict=True)
                if value._version != version
            ]
            with torch.no_grad():
                torch._foreach_copy_(self._values, kept)
        if changed:
            raise UsageError(
                f"parameter {changed[0]!r} was changed while averages were shown; the change is lost",
                hint="only evaluate inside average.applied()",
            )

    def places(self) -> Iterator[Place]:
        """Publish where the averages live on this rank: beside the values, and divided like them."""
        for source, average in zip(self._places, self._averages, strict=True):
            yield evolve(source, state="average", tensor=average)
