"""Options of the memory manager ``gemini``. No torch here."""

from __future__ import annotations

from typing import Literal, final

import attrs

from colossal_core.errors import UsageError
from colossal_gemini.budgets import parse_bytes

__all__ = ["Gemini"]


def _check_placement(_piece: object, _field: attrs.Attribute[str], value: object) -> None:
    """Refuse what is not a choice."""
    if value not in {"auto", "static"}:
        raise UsageError(
            f"Gemini: placement must be 'auto' or 'static', got {value!r}",
            hint="'auto' lets what is used most live nearest; 'static' keeps everything in the last tier",
        )


@final
@attrs.frozen(kw_only=True)
class Gemini:
    """Train what does not fit: values, gradients and optimizer state live in tiers, each within its budget.

    Tiers are the device that computes, host memory, and files. Values come to the device module unit by
    module unit while they are needed, and stay for as long as the budget allows; optimizer state is updated
    where it lives, or one tier above files. On a machine without accelerator host memory computes; with
    ``device_budget`` a part of it stands in for one, so that everything can be tried.

    The numbers are those of ``zero3`` and of one process, whatever the budgets are.

    Attributes:
        device_budget: Bytes of the accelerator that training may use, everything included: ``"8GiB"``. None
            for all that is free, or, without accelerator, for none apart from host memory.
        host_budget: Bytes of host memory that chunks of this rank may use; None for no limit.
        disk: A folder on a fast local disk, for what exceeds host memory; None for no files.
        placement: ``"auto"`` lets state live as near as the budgets allow, by what a step is seen to need;
            ``"static"`` keeps everything in the last tier while it is not needed.
        chunk_bytes: Most bytes of the values of one chunk; None to choose it from the model.
        prefetch: Whether to fetch chunks before they are needed, where the budget has room.

    Raises:
        UsageError: An option is something else.
    """

    device_budget: int | None = attrs.field(default=None, converter=parse_bytes)
    host_budget: int | None = attrs.field(default=None, converter=parse_bytes)
    disk: str | None = attrs.field(default=None)
    placement: Literal["auto", "static"] = attrs.field(default="auto", validator=_check_placement)
    chunk_bytes: int | None = attrs.field(default=None, converter=parse_bytes)
    prefetch: bool = attrs.field(default=True, validator=attrs.validators.instance_of(bool))
