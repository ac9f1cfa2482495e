"""Options of core's own pieces. No torch here: a plan is made and printed without it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, final

import attrs

from colossal_core.errors import UsageError

__all__ = ["Recompute", "Replicated"]


def _check_reduce(_piece: object, _field: attrs.Attribute[str], value: str) -> None:
    """Refuse what is not a choice."""
    if value not in {"window", "backward"}:
        raise UsageError(
            f"Replicated: reduce must be 'window' or 'backward', got {value!r}",
            hint="leave it out, or write reduce='window'",
        )


@final
@attrs.frozen(kw_only=True)
class Replicated:
    """Keep everything whole on every rank, as DDP does; the memory manager of a plan that names none.

    Each rank holds all parameters, gradients, and optimizer state of its part of the model. Per step every
    data rank sends and receives 2(D-1)/D words for each parameter, D being the number of data ranks.

    Attributes:
        reduce: When gradients are averaged over data ranks. ``"window"``: once, when ``optimizer.step()``
            closes the gradient window, buffers leaving during the last backward. ``"backward"``: at the end
            of every backward, as DDP does, so that ``p.grad`` shows the average right after it; all ranks
            then call backward equally often. For fp32 and fp64.

    Raises:
        UsageError: ``reduce`` is something else.
    """

    reduce: Literal["window", "backward"] = attrs.field(default="window", validator=_check_reduce)


def _check_every(_piece: object, _field: attrs.Attribute[int], value: object) -> None:
    """Refuse what counts no blocks."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(
            f"Recompute: every must be an integer of at least 1, got {value!r}",
            hint="1 recomputes each block, 2 every second one",
        )


def _as_patterns(value: object) -> tuple[str, ...]:
    """Freeze patterns; a single one may be written without a sequence."""
    patterns = (
        (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else (value,)
    )
    if not all(isinstance(pattern, str) and pattern for pattern in patterns):
        raise UsageError(
            f"Recompute: blocks must be patterns of module names, got {value!r}",
            hint="write blocks=('encoder.layers.*',)",
        )
    return tuple(str(pattern) for pattern in patterns)


@final
@attrs.frozen(kw_only=True)
class Recompute:
    """Keep only the inputs of blocks, and run their forward again when backward needs the rest.

    Costs one more forward of these blocks, and saves what they would keep for backward. Gradients are the
    same bits: dropout draws the same masks, and running statistics are not touched again.

    Attributes:
        every: Recompute the first of every this many blocks: 1 each, 2 every second one.
        blocks: Patterns of names of the modules to recompute (``"encoder.layers.*"``); of nested matches the
            outermost. By default the repeated blocks that the model shows: children of one class in a
            ``ModuleList`` or ``Sequential``.

    Raises:
        UsageError: ``every`` is below 1, or ``blocks`` holds something else than names.
    """

    every: int = attrs.field(default=1, validator=_check_every)
    blocks: tuple[str, ...] = attrs.field(default=(), converter=_as_patterns)
