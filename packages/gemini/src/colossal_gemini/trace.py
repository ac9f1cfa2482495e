"""What one training step uses, moment by moment. No torch here.

The one idea: everything that Gemini decides (what to evict, what to fetch ahead, where optimizer state
lives, whether a model fits) is decided from one small value: for each moment of a step, which chunks it needs
and how many bytes everything else takes meanwhile. A trace comes from a run on fake tensors before training,
or from the first real step; nothing that reads it can tell which.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, Literal, final

import attrs

__all__ = ["Chunk", "Moment", "Trace"]


@final
@attrs.frozen(kw_only=True)
class Chunk:
    """A flat buffer: some parameters of one module unit that come and go together.

    Attributes:
        index: Position among the chunks of a run; equal on every rank.
        name: Of the unit it belongs to, and which part of it, for people: ``"transformer.h.3"``.
        numel: Elements, padding included, of the whole chunk; a rank keeps ``numel / ranks`` of them.
        used: Elements that belong to parameters.
        value_bytes: Bytes of one element of the values that models compute with.
        is_trainable: Whether it has gradients and optimizer state.
        is_pinned: Whether it stays on the compute device for as long as a forward runs.
    """

    index: int
    name: str
    numel: int
    used: int
    value_bytes: int
    is_trainable: bool = True
    is_pinned: bool = False

    @property
    def whole_bytes(self) -> int:
        """Bytes of its values when they are gathered; its unreduced gradient takes as many."""
        return self.numel * self.value_bytes


@final
@attrs.frozen(kw_only=True)
class Moment:
    """From one need to the next.

    Attributes:
        name: What runs: the path of a module, ``"update"``.
        phase: Pass of the step that it belongs to; a backward that a forward waits for is part of that.
        needs: Chunks whose values have to be on the compute device; see also :meth:`Trace.needs_at`.
        gradients: Chunks whose unreduced gradients take memory in the moment, until it ends at least.
        other: Most bytes of everything that is no chunk until the next moment: activations, work space,
            the batch.
        flop: Floating point operations, where they were counted; for estimates of time only.
    """

    name: str
    phase: Literal["forward", "backward", "update"]
    needs: tuple[int, ...]
    gradients: tuple[int, ...] = ()
    other: int = 0
    flop: int = 0


@final
@attrs.frozen(kw_only=True)
class Trace:
    """One training step.

    Attributes:
        key: What the trace holds for: shapes and dtypes of the batch, whether gradients are computed.
        chunks: All chunks, by index.
        moments: In the order in which they come; the update last. Without an update it is an evaluation.
        extents: How large the batches of its passes are, for those who take later steps to be like it.
    """

    key: str
    chunks: tuple[Chunk, ...]
    moments: tuple[Moment, ...]
    extents: tuple[tuple[int, ...], ...] = ()

    def needs_at(self, index: int) -> frozenset[int]:
        """Return the chunks that have to be there in a moment: pinned ones always while a forward runs."""
        moment = self.moments[index]
        if moment.phase != "forward":
            return frozenset(moment.needs)
        return frozenset((*moment.needs, *(chunk.index for chunk in self.chunks if chunk.is_pinned)))

    @property
    def adds_up(self) -> bool:
        """Whether gradients of several backward passes, or of late parts of one, are added up.

        So it is where backward begins twice, or where a chunk's unreduced gradient comes back.
        """
        phases = [moment.phase for moment in self.moments]
        if sum(pair == ("forward", "backward") for pair in itertools.pairwise(phases)) > 1:
            return True
        held, left = set[int](), set[int]()
        for moment in self.moments:
            left |= held.difference(moment.gradients)
            held = set(moment.gradients)
            if held & left:
                return True
        return False

    def repeated(self, times: int) -> Trace:
        """Return the step with so many passes before its update."""
        passes = [moment for moment in self.moments if moment.phase != "update"]
        update = self.moments[len(passes) :]
        return attrs.evolve(self, moments=(*passes * times, *update), extents=self.extents * times)

    def to_dict(self) -> dict[str, Any]:
        """Return what :meth:`from_dict` reads, as JSON can hold it."""
        return attrs.asdict(self)

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Trace:
        """Return a trace that was written with :meth:`to_dict`."""
        moments = (
            Moment(**{**row, "needs": tuple(row["needs"]), "gradients": tuple(row["gradients"])})
            for row in found["moments"]
        )
        chunks = tuple(Chunk(**row) for row in found["chunks"])
        extents = tuple(tuple(extent) for extent in found.get("extents", ()))
        return cls(key=found["key"], chunks=chunks, moments=tuple(moments), extents=extents)
