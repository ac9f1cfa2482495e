"""What this plugin offers. Light by rule: the standard library and ``colossal_core.plugins`` only."""

from __future__ import annotations

from collections.abc import Iterable

from colossal_core.plugins import AxisSpec, StrategySpec, Target, hookimpl


@hookimpl
def colossal_register_strategies() -> Iterable[StrategySpec]:
    """Offer the strategy ``tensor-parallel``."""
    yield StrategySpec(
        name="tensor-parallel",
        summary="Cut linear layers, embeddings and heads among ranks that work on the same batch.",
        options=Target("colossal_tensor_parallel.options:TensorParallel"),
        target=Target("colossal_tensor_parallel.strategy:TensorParallelStrategy"),
        axes=(AxisSpec(name="tensor"),),
        phase="shard",
    )
