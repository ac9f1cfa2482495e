"""What this plugin offers. Light by rule: the standard library and ``colossal_core.plugins`` only."""

from __future__ import annotations

from collections.abc import Iterable

from colossal_core.plugins import AxisSpec, MemoryManagerSpec, Target, hookimpl

_SUMMARIES = {
    1: "Divide optimizer state and fp32 masters among data ranks.",
    2: "Divide optimizer state, masters and gradients among data ranks.",
    3: "Divide optimizer state, masters, gradients and parameters among data ranks.",
}

_TARGETS = {
    1: "colossal_zero.manager:ZeroManager",
    2: "colossal_zero.manager:ZeroManager",
    3: "colossal_zero.parameters:DividedManager",
}


@hookimpl
def colossal_register_memory_managers() -> Iterable[MemoryManagerSpec]:
    """Offer the memory managers ``zero1``, ``zero2`` and ``zero3``."""
    for stage, summary in _SUMMARIES.items():
        yield MemoryManagerSpec(
            name=f"zero{stage}",
            summary=summary,
            options=Target("colossal_zero.options:Zero"),
            target=Target(_TARGETS[stage]),
            presets={"stage": stage},
            axes=(
                AxisSpec(name="replica", divides_batch=True, gradients="average", degree="replica_degree"),
            ),
        )
