"""What core itself offers, in one visible list, through the same hooks as every plugin.

Light by rule: nothing here, and nothing that it imports, reaches torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from colossal_core.plugins.hookspec import hookimpl
from colossal_core.plugins.records import MemoryManagerSpec
from colossal_core.plugins.target import Target

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["REPLICATED", "colossal_register_memory_managers"]

REPLICATED = MemoryManagerSpec(
    name="replicated",
    summary="Keep everything whole on every rank, and average gradients over the data ranks.",
    options=Target("colossal_core.pieces:Replicated"),
    target=Target("colossal_core.runtime.replicated:ReplicatedManager"),
)
"""The manager of a plan that names none."""


@hookimpl
def colossal_register_memory_managers() -> Iterable[MemoryManagerSpec]:
    """Offer the memory managers of core."""
    yield REPLICATED
