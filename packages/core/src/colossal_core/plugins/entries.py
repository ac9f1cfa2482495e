"""What a registry hands out: statuses of plugins, and records together with who offered them."""

from __future__ import annotations

from typing import Literal, TypeAlias, final

import attrs

from colossal_core.errors import PluginError
from colossal_core.plugins.records import DiagnosticSpec, PieceSpec, Record, ShardingPolicySpec

__all__ = ["Kind", "PluginState", "PluginStatus", "Registered"]

Kind: TypeAlias = Literal[
    "strategy", "memory_manager", "piece", "command", "diagnostic", "pipeline_schedule", "sharding_policy"
]
PluginState: TypeAlias = Literal["enabled", "disabled", "incompatible", "failed"]


@final
@attrs.frozen(kw_only=True)
class PluginStatus:
    """What users see of one plugin.

    Attributes:
        name: The plugin's name.
        distribution: Where it comes from; a path for local files, empty for objects.
        version: Version of the distribution, or empty.
        editable: Whether it runs from a source tree.
        state: Its state.
        reason: Why it is in that state; empty for a plugin that is simply enabled.
        source: Who decided: a flag, a variable, a file, ``"metadata"``, ``"import"`` or ``"default"``.
    """

    name: str
    distribution: str
    version: str
    editable: bool
    state: PluginState
    reason: str
    source: str


@final
@attrs.frozen(kw_only=True)
class Registered:
    """A record, and who offered it.

    Attributes:
        record: What was offered.
        plugin: Name of the plugin.
        provider: Distribution and version, for messages.
    """

    record: Record
    plugin: str
    provider: str

    @property
    def qualified_name(self) -> str:
        """The name that is never ambiguous: ``"zero:zero1"``."""
        return f"{self.plugin}:{self.record.name}"

    @property
    def title(self) -> str:
        """How errors call the provider: ``"plugin 'zero' (colossal-zero 0.1.0)"``."""
        return f"plugin {self.plugin!r} ({self.provider})"

    @property
    def piece(self) -> PieceSpec:
        """The record as that of a piece.

        Raises:
            PluginError: It is a command or a diagnostic.
        """
        if not isinstance(self.record, PieceSpec):
            message = f"{self.record.kind} {self.qualified_name!r} is no piece of a plan"
            raise PluginError(message)
        return self.record

    def load_options(self) -> type[attrs.AttrsInstance]:
        """Import and return the class of options; this reaches no torch.

        Raises:
            PluginLoadError: It cannot be imported.
            PluginError: It is not an attrs class, or lacks a field that the record presets.
        """
        options = self.piece.options.load(self.title)
        if not isinstance(options, type) or not attrs.has(options):
            message = f"{self.title}: options of {self.record.name!r} must be an attrs class, got {options!r}"
            raise PluginError(message, hint="decorate it with @attrs.frozen", code="C011")
        unknown = self.piece.presets.keys() - {field.alias for field in attrs.fields(options)}
        if unknown:
            message = f"{self.title}: {self.record.name!r} presets {min(unknown)!r}"
            raise PluginError(f"{message}, which {options.__name__} does not have", code="C011")
        return options

    def load_target(self) -> object:
        """Import and return the implementation; for pieces this reaches torch.

        Raises:
            PluginError: The record names none.
            PluginLoadError: It cannot be imported.
        """
        if isinstance(self.record, ShardingPolicySpec):
            message = f"{self.record.kind} {self.qualified_name!r} names no object"
            raise PluginError(message)
        target = self.record.check if isinstance(self.record, DiagnosticSpec) else self.record.target
        return target.load(self.title)
