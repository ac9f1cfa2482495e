"""Which plugins are switched on, who said so, and where to write a change.

Four layers speak, strongest first: flags of the command line, the environment, files of the project (a plan
file that was named, then ``colossal.toml`` or ``[tool.colossal]`` of ``pyproject.toml``, searched upwards
from the working directory), and the user's own file. The first layer that says anything about a plugin
decides; without a word, a plugin that is installed is enabled. All of this is known before anything is
imported.

``--plugins a,b`` and ``COLOSSAL_PLUGINS`` are allow lists: what they leave out is disabled. In files,
``enabled = [...]`` overrules weaker layers for the plugins that it names and says nothing about others.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import final

import attrs

from colossal_core.errors import UsageError
from colossal_core.plugins.layers import CORE_PLUGIN, PluginFlags, SettingsLayer, Verdict
from colossal_core.plugins.sources import (
    find_project_file,
    find_user_file,
    read_environment,
    read_file,
    read_flags,
    read_switch,
)
from colossal_core.spelling import join_names, suggest

__all__ = ["EditPlace", "PluginSettings", "find_edit_place", "set_state"]


@final
@attrs.frozen(kw_only=True)
class PluginSettings:
    """All layers together.

    Attributes:
        layers: Strongest first.
        is_strict: Whether a failing plugin raises.
    """

    layers: tuple[SettingsLayer, ...] = ()
    is_strict: bool = False

    @classmethod
    def read(
        cls,
        start_dir: Path | None = None,
        environ: Mapping[str, str] | None = None,
        flags: PluginFlags | None = None,
        *,
        plan_file: Path | None = None,
    ) -> PluginSettings:
        """Read every source there is.

        Args:
            start_dir: Where the search for a project file begins; the working directory by default.
            environ: The environment; that of the process by default.
            flags: What the command line says.
            plan_file: A plan file that the user named. Its ``[plugins]`` count, weaker than the environment
                and stronger than the project file.

        Raises:
            UsageError: A file or a variable cannot be understood, or contradicts itself.
        """
        environ = os.environ if environ is None else environ
        flags = flags or PluginFlags()
        project = find_project_file(start_dir)
        files = [plan_file, project, find_user_file()]
        seen: list[Path] = []
        for file in files:
            if file is not None and file.is_file() and file.resolve() not in seen:
                seen.append(file.resolve())
        layers = (read_flags(flags), read_environment(environ), *map(read_file, seen))
        strict = flags.is_strict or read_switch(environ, "COLOSSAL_STRICT_PLUGINS")
        return cls(layers=layers, is_strict=strict)

    def judge(self, name: str) -> Verdict:
        """Return what the strongest layer with an opinion says; core is always enabled."""
        if name != CORE_PLUGIN:
            for layer in self.layers:
                verdict = layer.judge(name)
                if verdict is not None:
                    return verdict
        return Verdict(True, "", "default")

    @property
    def local(self) -> tuple[Path, ...]:
        """Single-file plugins of all layers, each once."""
        return tuple(dict.fromkeys(path for layer in self.layers for path in layer.local))

    @property
    def files(self) -> tuple[Path, ...]:
        """Files that were read, strongest first."""
        return tuple(layer.path for layer in self.layers if layer.path is not None)

    def is_disabled_below(self, path: Path, name: str) -> bool:
        """Return whether a layer weaker than this file disables the plugin: the file must say ``enabled``."""
        weaker = False
        for layer in self.layers:
            if weaker and (verdict := layer.judge(name)) is not None:
                return not verdict.is_enabled
            weaker = weaker or (layer.path is not None and layer.path == path.resolve())
        return False

    def check_allow_lists(self, known: Iterable[str]) -> None:
        """Refuse an allow list with a plugin that is not there: a typo would silently leave a plugin out.

        Raises:
            UsageError: ``--plugins``, ``--without-plugin`` or ``COLOSSAL_PLUGINS`` names an unknown plugin.
        """
        valid = {*known, CORE_PLUGIN}
        for layer in self.layers:
            named = dict.fromkeys(layer.only or (), layer.only_source)
            if layer.disabled_source == "--without-plugin":
                named.update(dict.fromkeys(layer.disabled, layer.disabled_source))
            for name, source in named.items():
                if name not in valid:
                    message = f"{source} names the plugin {name!r}, but there are only: {join_names(valid)}"
                    hint = suggest(name, valid) or f"install it, or leave it out of {source}"
                    raise UsageError(message, hint=hint)

    def to_environ(self) -> dict[str, str]:
        """Return variables that make a child process see what the flags of this one say.

        A launcher sets them for its workers, on top of its own environment. An empty value means that the
        variable must not count.
        """
        flags, environment = SettingsLayer(), SettingsLayer()
        for layer in self.layers:
            if layer.only_source == "--plugins":
                flags = layer
            elif layer.only_source == "COLOSSAL_PLUGINS":
                environment = layer
        only, nothing = environment.only, environment.nothing
        without: AbstractSet[str] = environment.disabled.keys()
        if flags.only is not None or flags.nothing:
            only, without, nothing = flags.only, flags.disabled.keys(), flags.nothing
        else:
            without = without | flags.disabled.keys()
        if only is not None:
            only = tuple(name for name in only if name not in without)
            nothing = nothing or not only
        return {
            "COLOSSAL_PLUGINS": ",".join(only or ()) if not nothing else "",
            "COLOSSAL_WITHOUT_PLUGINS": ",".join(sorted(without)),
            "COLOSSAL_NO_PLUGINS": "1" if nothing else "",
            "COLOSSAL_STRICT_PLUGINS": "1" if self.is_strict else "",
        }


@final
@attrs.frozen(kw_only=True)
class EditPlace:
    """Where a change of state is written.

    Attributes:
        path: The file, which need not exist yet.
        table: Keys of the table inside it, ``("plugins",)`` or ``("tool", "colossal", "plugins")``.
        is_project: Whether it belongs to the project rather than to the user.
    """

    path: Path
    table: tuple[str, ...]
    is_project: bool


def find_edit_place(start_dir: Path | None = None) -> EditPlace:
    """Return the project's file when inside a project, else the user's."""
    project = find_project_file(start_dir)
    if project is None:
        return EditPlace(path=find_user_file(), table=("plugins",), is_project=False)
    prefix = ("tool", "colossal") if project.name == "pyproject.toml" else ()
    return EditPlace(path=project, table=(*prefix, "plugins"), is_project=True)


def set_state(
    document: MutableMapping[str, object],
    name: str,
    *,
    is_enabled: bool,
    why: str = "",
    table: Sequence[str] = ("plugins",),
    overrules: bool = False,
) -> None:
    """Switch a plugin on or off in a parsed file, in place; an editor that keeps comments works too.

    Args:
        document: The parsed file, a mutable mapping such as a dict or a tomlkit document.
        name: The plugin.
        is_enabled: The state to write.
        why: The reason for switching it off; by default "by hand" and the date.
        table: Keys of the table with the settings of plugins.
        overrules: Also list the plugin under ``enabled``, because a weaker source disables it.

    Raises:
        UsageError: Core is to be switched off, or a table on the way holds something else.
    """
    if name == CORE_PLUGIN and not is_enabled:
        message = f"the records of {CORE_PLUGIN!r} cannot be disabled"
        raise UsageError(message, hint="disable other plugins, or leave all of them out with --no-plugins")
    plugins = document
    for key in table:
        plugins = _open_table(plugins, key)
    enabled = plugins.get("enabled", [])
    named = list(enabled) if isinstance(enabled, Sequence) and not isinstance(enabled, str) else []
    if is_enabled:
        disabled = plugins.get("disabled")
        if isinstance(disabled, MutableMapping):
            disabled.pop(name, None)
        if overrules and name not in named:
            plugins["enabled"] = [*named, name]
        return
    if name in named:
        plugins["enabled"] = [other for other in named if other != name]
    _open_table(plugins, "disabled")[name] = why or _date_reason()


def _open_table(parent: MutableMapping[str, object], key: str) -> MutableMapping[str, object]:
    """Return a sub-table, made when it is absent.

    Raises:
        UsageError: Something else is there.
    """
    if key not in parent:
        parent[key] = {}
    # Read back rather than kept: an editor may store a converted copy of the empty table.
    table = parent[key]
    if not isinstance(table, MutableMapping):
        message = f"{key!r} must be a table, got {table!r}"
        raise UsageError(message, hint=f"write [{key}]")
    return table


def _date_reason() -> str:
    """Return the reason that is written when none is given."""
    import time

    return f"by hand, {time.strftime('%Y-%m-%d')}"
