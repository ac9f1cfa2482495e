"""What one call of the program shares between its commands: flags, settings, the registry."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import final

from colossal_core.plugins.layers import PluginFlags
from colossal_core.plugins.registry import Registry
from colossal_core.plugins.state import PluginSettings

__all__ = ["Session"]


@final
class Session:
    """Made by the group from its flags, read by its commands; worked out when it is first asked."""

    def __init__(
        self, flags: PluginFlags | None = None, *, plan_file: Path | None = None, loads_local: bool = False
    ) -> None:
        """Remember what decides about plugins.

        Args:
            flags: What the command line says about plugins.
            plan_file: A plan file that was named, whose ``[plugins]`` count.
            loads_local: Whether single-file plugins are imported, as for a run.
        """
        self.flags = flags or PluginFlags()
        self._plan_file = plan_file
        self._loads_local = loads_local

    def with_plan_file(self, plan_file: Path) -> Session:
        """Return a session that sees what a run with this plan file would see."""
        return Session(self.flags, plan_file=plan_file, loads_local=True)

    @cached_property
    def settings(self) -> PluginSettings:
        """Which plugins are switched on, from all sources.

        Raises:
            UsageError: A source cannot be understood.
        """
        return PluginSettings.read(flags=self.flags, plan_file=self._plan_file)

    @cached_property
    def registry(self) -> Registry:
        """The plugins; their light modules are imported when something is asked of them.

        Raises:
            DuplicateNameError: Two distributions offer one plugin name.
            UsageError: The settings cannot be understood.
        """
        return Registry.discover(self.settings, load_local=self._loads_local)
