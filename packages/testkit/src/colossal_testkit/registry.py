"""A registry with nothing in it but core and what a test puts there.

::

    registry = isolated_registry(
        MemoryManagerSpec(name="mine", summary="...", options=target_of(Mine), target=target_of(MineManager))
    )
    booster = Booster(Mine(), registry=registry)

Nothing that is installed or configured on the machine takes part, so a test means the same everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable

from colossal_core.plugins import (
    CommandSpec,
    DiagnosticSpec,
    MemoryManagerSpec,
    Registry,
    ScheduleSpec,
    ShardingPolicySpec,
    StrategySpec,
    Target,
    hookimpl,
)

__all__ = ["RecordedPlugin", "isolated_registry", "target_of"]

Record = StrategySpec | MemoryManagerSpec | CommandSpec | DiagnosticSpec | ScheduleSpec | ShardingPolicySpec


class RecordedPlugin:
    """A plugin, as an object: it registers the records that it was made with."""

    def __init__(self, *records: Record) -> None:
        """Hold the records."""
        self._records = records

    @hookimpl
    def colossal_register_strategies(self) -> Iterable[StrategySpec]:
        """Offer the strategies among the records."""
        return [record for record in self._records if isinstance(record, StrategySpec)]

    @hookimpl
    def colossal_register_memory_managers(self) -> Iterable[MemoryManagerSpec]:
        """Offer the memory managers among the records."""
        return [record for record in self._records if isinstance(record, MemoryManagerSpec)]

    @hookimpl
    def colossal_register_commands(self) -> Iterable[CommandSpec]:
        """Offer the commands among the records."""
        return [record for record in self._records if isinstance(record, CommandSpec)]

    @hookimpl
    def colossal_register_diagnostics(self) -> Iterable[DiagnosticSpec]:
        """Offer the diagnostics among the records."""
        return [record for record in self._records if isinstance(record, DiagnosticSpec)]

    @hookimpl
    def colossal_register_pipeline_schedules(self) -> Iterable[ScheduleSpec]:
        """Offer the schedules among the records."""
        return [record for record in self._records if isinstance(record, ScheduleSpec)]

    @hookimpl
    def colossal_register_sharding_policies(self) -> Iterable[ShardingPolicySpec]:
        """Offer the sharding policies among the records."""
        return [record for record in self._records if isinstance(record, ShardingPolicySpec)]


def isolated_registry(*records: Record, plugin: str = "under-test") -> Registry:
    """Return a registry of core's pieces and these records.

    Args:
        records: What the plugin offers; their targets may name objects of a test file, see `target_of`.
        plugin: Name of the plugin that offers them.
    """
    return Registry.isolated({plugin: RecordedPlugin(*records)})


def target_of(thing: type) -> Target:
    """Return the target of a class, also of one that lives in a test file which no import finds.

    Such a class resolves in every process that has loaded the file: in pytest's own, and in the ranks that
    run a function of the file or got one of its functions or classes as an argument.
    """
    return Target(f"{thing.__module__}:{thing.__qualname__}")
