"""Schedules by the names that users type. No torch here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from colossal_core.errors import PluginError
from colossal_core.interfaces import AbstractSchedule

if TYPE_CHECKING:
    from colossal_core.plugins import Registry

__all__ = ["find_schedule"]


def find_schedule(registry: Registry, name: str) -> AbstractSchedule:
    """Return a schedule.

    Args:
        registry: Where plugins offer them.
        name: What one of them is called.

    Raises:
        UnknownNameError: There is none of that name.
        PluginError: It is something else.
    """
    kind = registry.find("pipeline_schedule", name).load_target()
    if not (isinstance(kind, type) and issubclass(kind, AbstractSchedule)):
        raise PluginError(
            f"schedule {name!r} is no AbstractSchedule, but {kind!r}",
            hint="correct the target in the plugin's record",
        )
    return kind()
