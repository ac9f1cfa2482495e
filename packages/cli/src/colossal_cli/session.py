"""What one call of the program shares between its commands: flags, settings, the registry."""

from __future__ import annotations

from functools import cached_property
from typing import final

from colossal_core.plugins.layers import PluginFlags
from colossal_core.plugins.registry import Registry
from colossal_core.plugins.state import PluginSettings

__all__ = ["Session"]


@final
class Session:
    """Made by the group from its flags, read by its commands; worked out when it is first asked."""

    def __init__(self, flags: PluginFlags | None = None) -> None:
        """Remember the flags.

        Args:
            flags: What the command line says about plugins.
        """
        self.flags = flags or PluginFlags()

    @cached_property
    def settings(self) -> PluginSettings:
        """Which plugins are switched on, from all sources.

        Raises:
            UsageError: A source cannot be understood.
        """
        return PluginSettings.read(flags=self.flags)

    @cached_property
    def registry(self) -> Registry:
        """The plugins; their light modules are imported when something is asked of them.

        Raises:
            DuplicateNameError: Two distributions offer one plugin name.
            UsageError: The settings cannot be understood.
        """
        return Registry.discover(self.settings)
