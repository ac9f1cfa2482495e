"""What a plugin implements: small abstract classes, one per kind of piece.

They import no torch themselves, so a light ``plugin.py`` may name them; their signatures do.
"""

from __future__ import annotations

from colossal_core.interfaces.border import AbstractBorder
from colossal_core.interfaces.executor import AbstractExecutor
from colossal_core.interfaces.memory import AbstractMemoryManager
from colossal_core.interfaces.schedule import AbstractSchedule
from colossal_core.interfaces.strategy import AbstractStrategy, Proposal

__all__ = [
    "AbstractBorder",
    "AbstractExecutor",
    "AbstractMemoryManager",
    "AbstractSchedule",
    "AbstractStrategy",
    "Proposal",
]
