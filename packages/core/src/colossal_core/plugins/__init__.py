"""The registry of pieces and the contract of plugins: hooks, records, targets.

What a plugin's light module needs is here: ``hookimpl``, the records and ``Target``. The registry itself is
loaded on first use, so a plugin does not pay for it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from colossal_core.plugins.hookspec import hookimpl
from colossal_core.plugins.records import (
    AxisSpec,
    CommandSpec,
    DiagnosticSpec,
    Finding,
    MemoryManagerSpec,
    PieceSpec,
    ScheduleSpec,
    ShardingPolicySpec,
    StrategySpec,
)
from colossal_core.plugins.target import Target

if TYPE_CHECKING:
    from colossal_core.plugins.entries import PluginStatus as PluginStatus
    from colossal_core.plugins.entries import Registered as Registered
    from colossal_core.plugins.layers import PluginFlags as PluginFlags
    from colossal_core.plugins.registry import Registry as Registry
    from colossal_core.plugins.state import PluginSettings as PluginSettings

__all__ = [
    "AxisSpec",
    "CommandSpec",
    "DiagnosticSpec",
    "Finding",
    "MemoryManagerSpec",
    "PieceSpec",
    "PluginFlags",
    "PluginSettings",
    "PluginStatus",
    "Registered",
    "Registry",
    "ScheduleSpec",
    "ShardingPolicySpec",
    "StrategySpec",
    "Target",
    "hookimpl",
]

_HOMES = {
    "PluginFlags": "colossal_core.plugins.layers",
    "PluginSettings": "colossal_core.plugins.state",
    "PluginStatus": "colossal_core.plugins.entries",
    "Registered": "colossal_core.plugins.entries",
    "Registry": "colossal_core.plugins.registry",
}


def __getattr__(name: str) -> object:
    """Import the home of a name on first use."""
    home = _HOMES.get(name)
    if home is None:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    value: object = getattr(import_module(home), name)
    globals()[name] = value
    return value
