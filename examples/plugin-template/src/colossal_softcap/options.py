"""What a user can choose. A frozen value without torch, so that plans are made and shown without it."""

from __future__ import annotations

from typing import final

import attrs

from colossal_core import UsageError

__all__ = ["SoftCap"]


@final
@attrs.frozen(kw_only=True)
class SoftCap:
    """Bound floating outputs of a model to ``(-cap, cap)`` by ``cap * tanh(outputs / cap)``.

    Attributes:
        cap: The bound, in the unit of the outputs; above 0.

    Source: Gemma 2, 2024, section 2 (logit soft-capping), where it is 30 for the final logits.
    """

    cap: float = attrs.field(default=30.0, converter=float)

    def __attrs_post_init__(self) -> None:
        """Refuse a bound that leaves nothing."""
        if not self.cap > 0:
            message = f"cap must be above 0, got {self.cap!r}"
            raise UsageError(message, hint="write SoftCap(cap=30.0), or leave it out")
