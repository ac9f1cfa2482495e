"""Running averages of parameters, kept where the parameters are kept.

The one idea: the memory manager says where the most that is known of each parameter lives on this rank:
masters, where there are any, in the range that it updates. An average is one more tensor beside each of
these: divided like them, updated without communication, and shown by exchanging it with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
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

    def __init__(
        self,
        find_places: Callable[[], Sequence[Place]],
        decay: float,
        publish: Callable[[], None],
        parameters: Iterable[tuple[str, torch.Tensor]] = (),
    ) -> None:
        """Start from the current values.

        Args:
            find_places: Returns where the most that is known of each parameter lives on this rank. Called
                again where places have homes, since their memory may be another one later.
            decay: Weight of the past.
            publish: Lets the model compute with what these places hold; collective.
            parameters: Names and parameters of the model, the same on all ranks: an edit of any is an error
                on every rank, whoever keeps it.

        Raises:
            UsageError: ``decay`` is outside ``[0, 1)``.
        """
        if not 0 <= decay < 1:
            raise UsageError(f"decay is {decay}, expected at least 0 and below 1", hint="0.999 is usual")
        self.decay = decay
        self.num_updates = 0
        self.is_shown = False
        self._publish = publish
        self._find_places = find_places
        self._places = [place for place in find_places() if place.tensor.is_floating_point()]
        self._sources = [place.tensor for place in self._places]
        self._watched = [*parameters, *((place.key[1], place.tensor) for place in self._places)]
        self._averages = [_wide_copy(place) for place in self._places]
        self._are_here = all(place.home is None for place in self._places)

    @torch.no_grad()
    def update(self) -> None:
        """Take in the current values; the Booster calls it after each real step."""
        self.num_updates += 1
        if not self._are_here:
            for place, average in zip(self._present_places(), self._averages, strict=True):
                with place.present():
                    average.lerp_(place.tensor.to(average.dtype), 1 - self.decay)
            return
        sources = [
            source if source.dtype == average.dtype else source.to(average.dtype)
            for source, average in zip(self._sources, self._averages, strict=True)
        ]
        torch._foreach_lerp_(self._averages, sources, 1 - self.decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Let the model compute with the averages within this context; the values come back afterwards.

        Collective where ranks hold parts of parameters.

        Raises:
            UsageError: A parameter was changed meanwhile, as an optimizer step does; the changes are lost.
        """
        kept = [_copy(place) for place in self._present_places()]
        self._exchange(self._averages)
        versions = [tensor._version for _, tensor in self._watched]
        self.is_shown = True
        try:
            yield
        finally:
            self.is_shown = False
            changed = [
                name
                for (name, tensor), version in zip(self._watched, versions, strict=True)
                if tensor._version != version
            ]
            self._exchange(kept)
        if changed:
            raise UsageError(
                f"parameter {changed[0]!r} was changed while averages were shown; the change is lost",
                hint="only evaluate inside average.applied()",
            )

    @torch.no_grad()
    def _exchange(self, values: list[torch.Tensor]) -> None:
        """Put values where those of the parameters are kept, and let the model compute with them."""
        if values and self._are_here:
            torch._foreach_copy_(self._sources, values)
        for place, value in () if self._are_here else zip(self._present_places(), values, strict=True):
            with place.present():
                place.tensor.copy_(value)
        self._publish()

    def _present_places(self) -> list[Place]:
        """Return where the values live now, in the order in which averages are kept."""
        if self._are_here:
            return self._places
        found = {(place.key, place.start): place for place in self._find_places()}
        return [found[place.key, place.start] for place in self._places]

    def places(self) -> Iterator[Place]:
        """Publish where the averages live on this rank: beside the values, and divided like them."""
        for source, average in zip(self._places, self._averages, strict=True):
            yield evolve(source, state="average", tensor=average, home=None)


def _copy(place: Place) -> torch.Tensor:
    """Return a copy of what lies in a place."""
    with place.present():
        return place.tensor.detach().clone()


def _wide_copy(place: Place) -> torch.Tensor:
    """Return a copy of what lies in a place, in fp32 at least."""
    with place.present():
        wide = torch.promote_types(place.tensor.dtype, torch.float32)
        return place.tensor.detach().to(wide, copy=True)
