"""The one place where testkit looks inside a Booster."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from colossal_core.runtime.booster import Booster
    from colossal_core.runtime.engine import Engine

__all__ = ["engine_of"]


def engine_of(booster: Booster) -> Engine:
    """Return the engine of a boosted Booster: its context, memory manager and executor.

    Users have no business there, so the Booster does not show it; a contract checks what the engine's parts
    promise to each other.
    """
    engine: Engine | None = vars(booster)["_engine"]
    assert engine is not None, "boost comes first"
    return engine
