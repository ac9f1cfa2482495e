"""The memory manager ``zero3``: parameters are divided, too, and gathered by units while they are needed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, final

from colossal_core.runtime.unit_manager import AbstractUnitManager
from colossal_zero.sizes import estimate_table

if TYPE_CHECKING:
    from colossal_core.runtime.precision import Precision
    from colossal_core.runtime.table import ParameterTable
    from colossal_zero.options import Zero

__all__ = ["DividedManager"]


@final
class DividedManager(AbstractUnitManager):
    """Divides values, gradients and optimizer state; holds whole values only of the units that run."""

    _uncompiled = ("Zero(stage=3)", "use Zero(stage=2)")

    def __init__(self, options: Zero) -> None:
        """Remember the options; see :class:`colossal_zero.Zero`."""
        self.options = options

    @property
    def _updates_on_host(self) -> bool:
        """When optimizer state is offloaded."""
        return self.options.offload is not None

    def estimate(
        self, table: ParameterTable, precision: Precision, optimizer_states: int = 2
    ) -> Mapping[str, int]:
        """Return bytes per rank by category, padding included."""
        return estimate_table(self.options, table, precision, optimizer_states)
