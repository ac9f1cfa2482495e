"""The heart of Colossal: plugin registry, plan, parameter table, collectives, flat buffers and the Booster.

Importing this package is free: public names are loaded on first use (PEP 562), because a plugin's light
module imports it too and must never pull in torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from colossal_core.building import build_plan as build_plan
    from colossal_core.errors import CapabilityError as CapabilityError
    from colossal_core.errors import CheckpointError as CheckpointError
    from colossal_core.errors import ColossalError as ColossalError
    from colossal_core.errors import DiskTierError as DiskTierError
    from colossal_core.errors import DuplicateNameError as DuplicateNameError
    from colossal_core.errors import MemoryBudgetError as MemoryBudgetError
    from colossal_core.errors import NonFiniteError as NonFiniteError
    from colossal_core.errors import PlanError as PlanError
    from colossal_core.errors import PluginError as PluginError
    from colossal_core.errors import PluginLoadError as PluginLoadError
    from colossal_core.errors import RankMismatchError as RankMismatchError
    from colossal_core.errors import UnknownNameError as UnknownNameError
    from colossal_core.errors import UsageError as UsageError
    from colossal_core.pieces import Recompute as Recompute
    from colossal_core.pieces import Replicated as Replicated
    from colossal_core.plan import Plan as Plan
    from colossal_core.runtime.booster import Booster as Booster
    from colossal_core.runtime.launch import World as World
    from colossal_core.runtime.launch import launch as launch
    from colossal_core.runtime.launch import spawn as spawn

_HOMES = {
    "Booster": "colossal_core.runtime.booster",
    "CapabilityError": "colossal_core.errors",
    "CheckpointError": "colossal_core.errors",
    "ColossalError": "colossal_core.errors",
    "DiskTierError": "colossal_core.errors",
    "DuplicateNameError": "colossal_core.errors",
    "MemoryBudgetError": "colossal_core.errors",
    "NonFiniteError": "colossal_core.errors",
    "Plan": "colossal_core.plan",
    "PlanError": "colossal_core.errors",
    "PluginError": "colossal_core.errors",
    "PluginLoadError": "colossal_core.errors",
    "RankMismatchError": "colossal_core.errors",
    "Recompute": "colossal_core.pieces",
    "Replicated": "colossal_core.pieces",
    "UnknownNameError": "colossal_core.errors",
    "UsageError": "colossal_core.errors",
    "World": "colossal_core.runtime.launch",
    "build_plan": "colossal_core.building",
    "launch": "colossal_core.runtime.launch",
    "spawn": "colossal_core.runtime.launch",
}

__all__ = [
    "Booster",
    "CapabilityError",
    "CheckpointError",
    "ColossalError",
    "DiskTierError",
    "DuplicateNameError",
    "MemoryBudgetError",
    "NonFiniteError",
    "Plan",
    "PlanError",
    "PluginError",
    "PluginLoadError",
    "RankMismatchError",
    "Recompute",
    "Replicated",
    "UnknownNameError",
    "UsageError",
    "World",
    "build_plan",
    "launch",
    "spawn",
]


def __getattr__(name: str) -> object:
    """Import the home of a public name on first use and keep the name, so that this runs once for each."""
    home = _HOMES.get(name)
    if home is None:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    value: object = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names, loaded or not."""
    return sorted({*globals(), *__all__})
