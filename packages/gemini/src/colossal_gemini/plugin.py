"""What this plugin offers. Light by rule: the standard library and ``colossal_core.plugins`` only."""

from __future__ import annotations

from collections.abc import Iterable

from colossal_core.plugins import CommandSpec, MemoryManagerSpec, Target, hookimpl


@hookimpl
def colossal_register_memory_managers() -> Iterable[MemoryManagerSpec]:
    """Offer the memory manager ``gemini``."""
    yield MemoryManagerSpec(
        name="gemini",
        summary="Move parameters, gradients and optimizer state between memories, within a budget.",
        options=Target("colossal_gemini.options:Gemini"),
        target=Target("colossal_gemini.manager:GeminiManager"),
    )


@hookimpl
def colossal_register_commands() -> Iterable[CommandSpec]:
    """Offer ``colossal gemini``."""
    yield CommandSpec(
        name="gemini",
        summary="Draw which chunks are on the device during a step.",
        target=Target("colossal_gemini.commands:gemini"),
    )
