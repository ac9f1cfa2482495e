"""What this plugin offers. Light by rule: the standard library and ``colossal_core.plugins`` only."""

from __future__ import annotations

from collections.abc import Iterable

from colossal_core.plugins import StrategySpec, Target, hookimpl


@hookimpl
def colossal_register_strategies() -> Iterable[StrategySpec]:
    """Offer the strategy ``softcap``."""
    yield StrategySpec(
        name="softcap",
        summary="Bound the outputs of a model smoothly: cap * tanh(outputs / cap).",
        options=Target("colossal_softcap.options:SoftCap"),
        target=Target("colossal_softcap.strategy:SoftCapStrategy"),
        phase="transform",
    )
