"""What one source says about plugins: a flag, a variable or a file, as a value.

A layer answers one question, whether a plugin may be imported, or leaves it to weaker layers. How the layers
are stacked is told in ``state``; where they come from, in ``sources``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import final

import attrs

from colossal_core.errors import UsageError

__all__ = ["CORE_PLUGIN", "PluginFlags", "SettingsLayer", "Verdict"]

CORE_PLUGIN = "core"
"""Name under which core's own records are registered. It cannot be disabled or taken by a distribution."""


@final
@attrs.frozen(kw_only=True)
class PluginFlags:
    """What the command line says about plugins.

    Attributes:
        only: Names given to ``--plugins``; None when the flag is absent.
        without: Names given to ``--without-plugin``.
        no_plugins: Whether ``--no-plugins`` is there: core's own records only.
        is_strict: Whether ``--strict-plugins`` is there: a failing plugin raises instead of being listed as
            failed.
    """

    only: tuple[str, ...] | None = None
    without: tuple[str, ...] = ()
    no_plugins: bool = False
    is_strict: bool = False


@final
@attrs.frozen
class Verdict:
    """What the settings say about one plugin.

    Attributes:
        is_enabled: Whether it may be imported.
        reason: Why not, in the words of whoever disabled it; empty when enabled.
        source: The layer that decided: a flag, a variable, a file, or ``"default"``.
    """

    is_enabled: bool
    reason: str
    source: str


@final
@attrs.frozen(kw_only=True)
class SettingsLayer:
    """What one source says.

    Attributes:
        only: Allow list, or None.
        only_source: How the allow list is spelled, ``"--plugins"``.
        enabled: Plugins that this source switches on.
        disabled: Plugin to reason.
        disabled_source: How switching off is spelled, or the file.
        nothing: Whether every plugin is switched off.
        nothing_source: How that is spelled.
        local: Single-file plugins, as absolute paths.
        path: The file, for layers that are one.
    """

    only: tuple[str, ...] | None = None
    only_source: str = ""
    enabled: tuple[str, ...] = ()
    disabled: Mapping[str, str] = attrs.field(factory=dict, hash=False)
    disabled_source: str = ""
    nothing: bool = False
    nothing_source: str = ""
    local: tuple[Path, ...] = ()
    path: Path | None = None

    def __attrs_post_init__(self) -> None:
        """Refuse a source that contradicts itself, or that switches core off."""
        named = {*self.enabled, *(self.only or ())}
        for name in sorted(named & self.disabled.keys()):
            source = self.disabled_source or self.only_source
            message = f"plugin {name!r} is switched on and off by one source ({source})"
            raise UsageError(message, hint="keep one of the two")
        if self.nothing and self.only:
            message = (
                f"{self.only_source} {','.join(self.only)} and {self.nothing_source} contradict each other"
            )
            raise UsageError(message, hint="give one of the two")
        if CORE_PLUGIN in self.disabled:
            message = f"the records of {CORE_PLUGIN!r} cannot be disabled, but {self.disabled_source} does so"
            raise UsageError(message, hint="remove the entry; to run without other plugins use --no-plugins")

    def judge(self, name: str) -> Verdict | None:
        """Return what this source says about a plugin, or None when it says nothing."""
        if self.nothing:
            return Verdict(False, f"left out by {self.nothing_source}", self.nothing_source)
        if name in self.disabled:
            return Verdict(False, self.disabled[name], self.disabled_source)
        if self.only is not None:
            if name in self.only:
                return Verdict(True, "", self.only_source)
            return Verdict(False, f"not among {self.only_source} {','.join(self.only)}", self.only_source)
        if name in self.enabled:
            return Verdict(True, "", self.disabled_source)
        return None
