"""The registry: which plugins there are, what state they are in, and what they offer.

Three tiers of cost. ``Registry.discover`` *describes*: it reads metadata and settings and imports nothing of
a plugin. ``activate`` imports the light modules of enabled plugins and takes their records; every query for
records does so when needed. *Resolving* a record imports the object that it names, and with it torch; that is
left to whoever uses it.

A plugin that fails is listed as failed with its reason, and stops nothing until somebody asks for what it may
have brought. The registry is a value that is passed around: there is no global one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, final

import attrs
import pluggy

from colossal_core.errors import ColossalError, DuplicateNameError, PluginError, PluginLoadError
from colossal_core.plugins import builtin, hookspec
from colossal_core.plugins.activation import fail, import_plugin, list_implementations, register_plugin
from colossal_core.plugins.answers import explain_axis, explain_missing, explain_piece
from colossal_core.plugins.discovery import (
    PluginInfo,
    describe_core,
    find_incompatibility,
    find_installed,
    find_local,
)
from colossal_core.plugins.entries import Kind, PluginState, PluginStatus, Registered
from colossal_core.plugins.hookspec import OBSERVERS, PROJECT
from colossal_core.plugins.layers import CORE_PLUGIN
from colossal_core.plugins.observers import Observers
from colossal_core.plugins.records import PieceSpec, Record
from colossal_core.plugins.state import PluginSettings

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Kind", "PluginState", "PluginStatus", "Registered", "Registry"]


@final
class Registry:
    """Plugins of this process and what they offer.

    Made by ``discover`` from what is installed, or by ``isolated`` from objects, for tests. It is described
    at first and activated by the first query that needs records; both are done once.
    """

    def __init__(
        self,
        infos: Iterable[PluginInfo],
        *,
        settings: PluginSettings,
        objects: Mapping[str, object] | None = None,
        loads_local: bool = False,
    ) -> None:
        """Describe plugins; use ``discover`` or ``isolated`` instead.

        Args:
            infos: All plugins but core, in any order.
            settings: What is switched on and off.
            objects: Plugin name to object, for plugins that need no import.
            loads_local: Whether single-file plugins are imported.

        Raises:
            DuplicateNameError: Two providers offer an enabled plugin of one name.
            UsageError: An allow list names a plugin that is not there.
        """
        ordered = [
            describe_core(builtin.__name__),
            *sorted(infos, key=lambda info: (info.name, info.distribution)),
        ]
        settings.check_allow_lists(info.name for info in ordered)
        _check_names(ordered, settings)
        self._infos = {info.name: info for info in reversed(ordered)}
        self._infos = dict(sorted(self._infos.items(), key=lambda item: (item[0] != CORE_PLUGIN, item[0])))
        self._settings = settings
        self._objects = dict(objects or {})
        self._loads_local = loads_local
        self._manager = pluggy.PluginManager(PROJECT)
        self._manager.add_hookspecs(hookspec)
        self._failures: dict[str, PluginLoadError] = {}
        self._active: dict[str, object] = {}
        self._records: tuple[Registered, ...] = ()
        self._observers = Observers({})
        self._is_activated = False
        core_version = self._infos[CORE_PLUGIN].version
        self._statuses = {name: self._describe(info, core_version) for name, info in self._infos.items()}

    @classmethod
    def discover(cls, settings: PluginSettings | None = None, *, load_local: bool = False) -> Registry:
        """Describe everything that is installed, without importing any of it.

        Args:
            settings: What is switched on and off; read from environment and files by default.
            load_local: Whether single-file plugins will be imported, as ``colossal run``, the Booster and
                ``colossal plugins doctor`` do.

        Raises:
            DuplicateNameError: Two distributions offer an enabled plugin of one name.
            UsageError: The settings cannot be understood.
        """
        settings = PluginSettings.read() if settings is None else settings
        infos = (*find_installed(), *find_local(settings.local))
        return cls(infos, settings=settings, loads_local=load_local)

    @classmethod
    def isolated(cls, plugins: Mapping[str, object], settings: PluginSettings | None = None) -> Registry:
        """Make a registry of core and these objects, whatever is installed or configured; for tests.

        Args:
            plugins: Plugin name to a module, or any object whose methods are marked with ``hookimpl``.
            settings: What is switched off; nothing by default.
        """
        infos = [
            PluginInfo(name=name, module=_name_module(plugin), origin="object")
            for name, plugin in plugins.items()
        ]
        return cls(infos, settings=settings or PluginSettings(), objects=plugins)

    @property
    def settings(self) -> PluginSettings:
        """What decided about the plugins."""
        return self._settings

    def describe(self) -> tuple[PluginStatus, ...]:
        """Return all plugins with what is known so far, core first and then by name; imports nothing."""
        return tuple(self._statuses.values())

    def statuses(self) -> tuple[PluginStatus, ...]:
        """Activate, and return all plugins with their states, core first and then by name."""
        self.activate()
        return self.describe()

    def activate(self) -> None:
        """Import the light modules of enabled plugins and take their records. Does nothing the second time.

        Raises:
            PluginLoadError: A plugin fails and the settings are strict. Otherwise it becomes ``failed``, and
                the first rank logs one warning.
        """
        if self._is_activated:
            return
        found: dict[str, tuple[Record, ...]] = {}
        # The plugin that is registered last is called first, so this order makes core's observers run first.
        for name, info in reversed(self._infos.items()):
            status = self._statuses[name]
            if status.state == "failed" and self._settings.is_strict:
                raise fail(info, "failed to register", PluginError(status.reason, code="C011"))
            if status.state != "enabled" or (info.origin == "local" and not self._loads_local):
                continue
            try:
                plugin = self._objects[name] if name in self._objects else import_plugin(info)
                found[name] = register_plugin(self._manager, info, plugin)
            except PluginLoadError as err:
                if self._settings.is_strict or name == CORE_PLUGIN:
                    raise
                self._failures[name] = err
            else:
                self._active[name] = plugin
        self._records = tuple(
            Registered(record=record, plugin=name, provider=info.provider)
            for name, info in self._infos.items()
            for record in found.get(name, ())
        )
        self._observers = Observers(self._list_observers(), is_strict=self._settings.is_strict)
        self._is_activated = True
        self._report_failures()

    def records(self, kind: Kind) -> tuple[Registered, ...]:
        """Return the records of one kind, core's first, then by plugin; ``"piece"`` means either kind."""
        self.activate()
        return tuple(entry for entry in self._records if _is_kind(entry.record, kind))

    def commands(self) -> tuple[Registered, ...]:
        """Return the records of commands."""
        return self.records("command")

    def diagnostics(self) -> tuple[Registered, ...]:
        """Return the records of diagnostics."""
        return self.records("diagnostic")

    @property
    def observers(self) -> Observers:
        """The observers of active plugins."""
        self.activate()
        return self._observers

    def find(self, kind: Kind, name: str) -> Registered:
        """Return the record of a name.

        Args:
            kind: What is looked for.
            name: A name, or a qualified name such as ``"zero:zero1"``.

        Raises:
            UnknownNameError: There is none. Says which are valid, which is closest, which disabled or failed
                plugin may bring it, and which distribution of ours would.
            DuplicateNameError: Several plugins offer it; names them and the qualified names.
        """
        entries = self.records(kind)
        found = [entry for entry in entries if name in (entry.record.name, entry.qualified_name)]
        if len(found) == 1:
            return found[0]
        if found:
            raise _refuse_duplicates(name, found)
        error = explain_missing(kind, name, entries, self.records("piece"), self._list_inactive())
        raise error from self._failures.get(name.partition(":")[0])

    def find_axis_owners(self, axis: str) -> tuple[Registered, ...]:
        """Return the pieces that bring a mesh axis; if none does, those that bring parts of it."""
        pieces = self.records("piece")
        owners = [entry for entry in pieces if any(spec.name == axis for spec in entry.piece.axes)]
        parts = [entry for entry in pieces if any(spec.part_of == axis for spec in entry.piece.axes)]
        return tuple(owners or parts)

    def explain_axis(self, axis: str, place: str) -> ColossalError:
        """Return the error for an axis that no active piece brings, which says who may.

        Args:
            axis: The axis.
            place: Where it was written, the start of the message.
        """
        return explain_axis(axis, place, self.records("piece"), self._list_inactive())

    def record_for(self, options: object) -> Registered:
        """Return the record that an object of options stands for.

        The class of the object and the presets of the records decide: ``Zero(stage=2)`` is the piece whose
        record names ``Zero`` and presets ``stage=2``.

        Raises:
            UsageError: The object is a class, or of no registered piece; also when its plugin is disabled,
                incompatible or failed, which is said with the reason. Nothing of such a plugin is imported.
            DuplicateNameError: Several records fit equally well.
        """
        self.activate()
        found = [entry for entry in self.records("piece") if _fits(entry, options)]
        most = max((len(entry.piece.presets) for entry in found), default=0)
        found = [entry for entry in found if len(entry.piece.presets) == most]
        if len(found) == 1:
            return found[0]
        if found:
            raise _refuse_duplicates(repr(options), found)
        package = type(options).__module__.partition(".")[0]
        blamed = [status for status in self._list_inactive() if self._infos[status.name].package == package]
        same_class = [entry for entry in self.records("piece") if _has_options(entry, type(options))]
        error = explain_piece(options, self.records("piece"), same_class, blamed)
        raise error from (self._failures.get(blamed[0].name) if blamed else None)

    def agreement_lines(self) -> tuple[str, ...]:
        """Return what ranks must have in common: active plugins, core, python, torch, with versions, sorted.

        Editable, local and unregistered plugins add a hash of their source files.
        """
        # Hashing is for runs; listing plugins does not pay for its import.
        from colossal_core.plugins import agreement

        self.activate()
        lines = list(agreement.describe_versions())
        for name, plugin in self._active.items():
            info = self._infos[name]
            functions = [found.function for _, found in list_implementations(self._manager, plugin)]
            lines.append(agreement.describe_plugin(info, agreement.find_sources(info, functions)))
        return tuple(sorted(lines))

    def _describe(self, info: PluginInfo, core_version: str) -> PluginStatus:
        """Return the status of a plugin before activation."""
        verdict = self._settings.judge(info.name)
        state: PluginState = "enabled"
        reason, source = "", verdict.source
        if not verdict.is_enabled:
            state, reason = "disabled", verdict.reason
        elif fault := info.find_fault():
            state, reason, source = "failed", fault, "metadata"
        elif fault := find_incompatibility(info, core_version):
            state, reason, source = "incompatible", fault, "metadata"
        elif info.origin == "local" and not self._loads_local:
            reason = "a single file: loaded by colossal run, the Booster and colossal plugins doctor only"
        return PluginStatus(
            name=info.name,
            distribution=info.distribution or str(info.path or ""),
            version=info.version,
            editable=info.is_editable,
            state=state,
            reason=reason,
            source=source,
        )

    def _list_inactive(self) -> list[PluginStatus]:
        """Return plugins that are disabled, incompatible or failed."""
        return [status for status in self._statuses.values() if status.state != "enabled"]

    def _list_observers(self) -> dict[str, list[tuple[PluginInfo, pluggy.HookImpl]]]:
        """Return hook name to plugin and implementation in pluggy's call order: last registered first."""
        return {
            hook: [
                (self._infos[implementation.plugin_name], implementation)
                for implementation in reversed(getattr(self._manager.hook, hook).get_hookimpls())
            ]
            for hook in OBSERVERS
        }

    def _report_failures(self) -> None:
        """Turn failures into states, and warn once, on the first rank."""
        for name in sorted(self._failures):
            reason = " ".join(line.strip() for line in self._failures[name].message.splitlines()[1:])
            self._statuses[name] = attrs.evolve(
                self._statuses[name], state="failed", reason=reason, source="import"
            )
            if os.environ.get("RANK", "0") == "0":
                import logging

                logging.getLogger("colossal_core.plugins").warning("%s", self._failures[name].render())


def _check_names(infos: Sequence[PluginInfo], settings: PluginSettings) -> None:
    """Refuse two providers of one enabled plugin name."""
    first: dict[str, PluginInfo] = {}
    for info in infos:
        known = first.setdefault(info.name, info)
        if known is info or not settings.judge(info.name).is_enabled:
            continue
        message = (
            f"the plugin name {info.name!r} is offered twice, by {known.provider} and by {info.provider}"
        )
        hint = f"uninstall one of them, or leave both out: --without-plugin {info.name}"
        if info.name == CORE_PLUGIN:
            hint = f"uninstall {info.distribution or info.provider}: that name is taken"
        raise DuplicateNameError(message, hint=hint)


def _name_module(plugin: object) -> str:
    """Return the module that an object comes from: itself, or where its class is written."""
    name = getattr(plugin, "__name__", None)
    return name if isinstance(name, str) else type(plugin).__module__


def _is_kind(record: Record, kind: Kind) -> bool:
    """Return whether a record is of a kind."""
    return record.kind == kind or (kind == "piece" and isinstance(record, PieceSpec))


def _has_options(entry: Registered, options: type) -> bool:
    """Return whether a record names this class of options.

    Paths are compared first, so nothing is imported for pieces that have nothing to do with the class; a
    record may also name a re-export of it inside the same package.
    """
    target = entry.piece.options
    if (target.module, target.attribute) == (options.__module__, options.__qualname__):
        return True
    if target.package != options.__module__.partition(".")[0]:
        return False
    return target.load(entry.title) is options


def _fits(entry: Registered, options: object) -> bool:
    """Return whether an object is of a record's class and holds all values that the record presets."""
    if not _has_options(entry, type(options)):
        return False
    return all(getattr(options, name) == value for name, value in entry.piece.presets.items())


def _refuse_duplicates(name: str, found: Sequence[Registered]) -> DuplicateNameError:
    """Return the error for a name with several providers."""
    providers = " and ".join(f"{entry.provider} as {entry.qualified_name!r}" for entry in found)
    message = f"{name} is ambiguous: offered by {providers}"
    return DuplicateNameError(message, hint="use the qualified name")
