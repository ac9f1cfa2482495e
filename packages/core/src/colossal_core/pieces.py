"""Options of core's own pieces. No torch here: a plan is made and printed without it."""

from __future__ import annotations

from typing import Literal, final

import attrs

from colossal_core.errors import CapabilityError, UsageError

__all__ = ["Replicated"]


def _check_reduce(_piece: object, _field: attrs.Attribute[str], value: str) -> None:
    """Refuse what is not a choice, and the choice that does not exist yet."""
    if value == "backward":
        raise CapabilityError(
            "Replicated(reduce='backward') is not available yet: gradients are reduced in optimizer.step()",
            hint="leave it out, or write reduce='window'",
        )
    if value != "window":
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
            closes the gradient window, buckets leaving during the last backward. ``"backward"``, at the end
            of every backward, is not available yet.

    Raises:
        CapabilityError: ``reduce`` is ``"backward"``.
        UsageError: ``reduce`` is something else.
    """

    reduce: Literal["window", "backward"] = attrs.field(default="window", validator=_check_reduce)
