"""Tier two: import one plugin's light module and take its records, all or nothing.

Whatever goes wrong with a plugin is turned into one ``PluginLoadError`` of one shape: which plugin, which
distribution and version, which hook, what, where, and what to do next. The registry decides whether that
stops anything.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable
from importlib import import_module, util
from typing import TYPE_CHECKING

from colossal_core.errors import PluginError, PluginLoadError
from colossal_core.mesh.axes import BASE_AXES, DATA_AXIS
from colossal_core.plugins import hookspec
from colossal_core.plugins.hookspec import OBSERVERS, REGISTRATIONS
from colossal_core.plugins.records import PieceSpec
from colossal_core.plugins.target import describe_failure
from colossal_core.spelling import join_names, suggest

if TYPE_CHECKING:
    from types import ModuleType

    import pluggy

    from colossal_core.plugins.discovery import PluginInfo
    from colossal_core.plugins.records import Record

__all__ = ["fail", "import_plugin", "list_implementations", "register_plugin"]


def fail(info: PluginInfo, stage: str, error: BaseException, place: str = "") -> PluginLoadError:
    """Return the one shape of error for a plugin that failed.

    Args:
        info: The plugin.
        stage: What it failed at: ``"failed to load"``, ``"failed in colossal_register_strategies"``.
        error: What was raised.
        place: Where to look when the traceback has no frame of the plugin.
    """
    if isinstance(error, PluginLoadError) and error.message.startswith(info.title):
        return error
    message = f"{info.title} {stage}\n{describe_failure(error, place)}"
    disable = f'colossal plugins disable {info.name} --why "..."'
    hint = f"colossal plugins doctor {info.name}, or disable it: {disable}"
    return PluginLoadError(message, hint=hint)


def import_plugin(info: PluginInfo) -> object:
    """Import the light module of a plugin, or the object in it that the entry point names.

    Raises:
        PluginLoadError: Importing raises, exits, or the object is not there.
    """
    try:
        if info.path is not None:
            return _import_file(info)
        module, _, attribute = info.module.partition(":")
        plugin: object = import_module(module)
        for part in filter(None, attribute.split(".")):
            plugin = getattr(plugin, part)
    except (Exception, SystemExit) as err:
        raise fail(info, "failed to load", err, info.module) from err
    return plugin


def _import_file(info: PluginInfo) -> ModuleType:
    """Import a single-file plugin under its stem, which is how its targets name it.

    Raises:
        PluginError: The file is missing, or another module has that name.
    """
    path = info.path
    if path is None or not path.is_file():
        message = f"the local plugin {str(path)!r} is not there"
        raise PluginError(message, hint="mend the entry under [plugins] local")
    known = sys.modules.get(info.module)
    spec = util.find_spec(info.module) if known is None else known.__spec__
    origin = getattr(known, "__file__", None) or (spec.origin if spec is not None else None)
    if origin is not None and not path.samefile(origin):
        message = f"the local plugin {str(path)!r} would hide the module {info.module!r} at {origin!r}"
        raise PluginError(message, hint="rename the file")
    if known is not None:
        return known
    spec = util.spec_from_file_location(info.module, path)
    if spec is None or spec.loader is None:
        message = f"the local plugin {str(path)!r} is no Python file"
        raise PluginError(message, hint="give a file that ends in .py")
    module = util.module_from_spec(spec)
    # Known before it runs, as for any import; taken back when it fails, so that a second attempt starts
    # afresh.
    sys.modules[info.module] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[info.module]
        raise
    return module


def register_plugin(manager: pluggy.PluginManager, info: PluginInfo, plugin: object) -> tuple[Record, ...]:
    """Register a plugin's hooks and return its records; on any error nothing of it stays behind.

    Raises:
        PluginLoadError: A hook is unknown, has wrong arguments or a wrong mark, raises, or offers something
            that is not the record it should be.
    """
    place = str(getattr(plugin, "__file__", None) or info.module)
    try:
        manager.register(plugin, name=info.name)
    except Exception as err:
        raise fail(info, "failed to register", err, place) from err
    try:
        _check_hooks(manager, info, plugin)
        records = [record for hook in REGISTRATIONS for record in _collect(manager, info, plugin, hook)]
        _check_records(info, records, place)
    except PluginLoadError:
        manager.unregister(name=info.name)
        raise
    return tuple(records)


def list_implementations(manager: pluggy.PluginManager, plugin: object) -> list[tuple[str, pluggy.HookImpl]]:
    """Return hook name and implementation of everything that a registered plugin implements."""
    return [
        (caller.name, implementation)
        for caller in manager.get_hookcallers(plugin) or ()
        for implementation in caller.get_hookimpls()
        if implementation.plugin is plugin
    ]


def _check_hooks(manager: pluggy.PluginManager, info: PluginInfo, plugin: object) -> None:
    """Refuse unknown hooks, marks that mean nothing here, and hooks that were not marked at all."""
    implementations = list_implementations(manager, plugin)
    known = {*REGISTRATIONS, *OBSERVERS}
    for hook, implementation in implementations:
        place = _locate(implementation.function)
        if hook not in known and not implementation.optionalhook:
            hint = suggest(hook, known) or f"hooks are {join_names(known)}"
            raise fail(
                info, f"failed in {hook}", PluginError(f"there is no such hook; {hint}", code="C011"), place
            )
        if implementation.wrapper or implementation.hookwrapper:
            error = PluginError("wrappers are refused: they hide who decided", code="C011")
            raise fail(info, f"failed in {hook}", error, place)
        if hook in REGISTRATIONS and (implementation.tryfirst or implementation.trylast):
            error = PluginError(
                "tryfirst and trylast are refused here: pieces are chosen by name", code="C011"
            )
            raise fail(info, f"failed in {hook}", error, place)
    marked = {hook for hook, _ in implementations}
    for hook in sorted(known - marked):
        function = inspect.getattr_static(plugin, hook, None)
        if function is not None and function is not getattr(hookspec, hook):
            error = PluginError(f"{hook} is not marked; write @hookimpl above it", code="C011")
            raise fail(info, f"failed in {hook}", error, _locate(function))
    if not implementations:
        error = PluginError("it implements no hook; mark its functions with @hookimpl", code="C011")
        raise fail(info, "failed to register", error, str(getattr(plugin, "__file__", None) or info.module))


def _collect(manager: pluggy.PluginManager, info: PluginInfo, plugin: object, hook: str) -> Iterable[Record]:
    """Call one registration hook of one plugin and check what it returns."""
    wanted = REGISTRATIONS[hook]
    found: list[Record] = []
    for name, implementation in list_implementations(manager, plugin):
        if name != hook:
            continue
        place = _locate(implementation.function)
        try:
            found.extend(_check_offer(implementation.function(), wanted))
        except (Exception, SystemExit) as err:
            raise fail(info, f"failed in {hook}", err, place) from err
    return found


def _check_offer(offered: object, wanted: type[Record]) -> Iterable[Record]:
    """Yield what a registration hook returned, record by record.

    Raises:
        PluginError: It is no iterable, or holds something else than the records of this hook.
    """
    if not isinstance(offered, Iterable):
        message = f"expected an iterable of {wanted.__name__}, got {offered!r}"
        raise PluginError(message, hint="yield or return the records", code="C011")
    for record in offered:
        if not isinstance(record, wanted):
            raise PluginError(f"expected {wanted.__name__}, got {record!r}", code="C011")
        yield record


def _check_records(info: PluginInfo, records: Iterable[Record], place: str) -> None:
    """Refuse names that the plugin gives twice, and axes that have no place in the mesh."""
    seen: set[tuple[str, str]] = set()
    for record in records:
        # Strategies and memory managers share one name space: Booster("name") does not say which it means.
        key = (PieceSpec.kind if isinstance(record, PieceSpec) else record.kind, record.name)
        problem = f"it offers {key[0].replace('_', ' ')} {key[1]!r} twice" if key in seen else ""
        seen.add(key)
        for axis in record.axes if isinstance(record, PieceSpec) else ():
            if axis.name == DATA_AXIS:
                problem = f"record {record.name!r} brings the axis {DATA_AXIS!r}, which is core's own"
            elif axis.name not in BASE_AXES and axis.inside_of is None and axis.part_of is None:
                problem = (
                    f"axis {axis.name!r} of record {record.name!r} has no place: give inside_of or part_of"
                )
        if problem:
            raise fail(info, "failed to register", PluginError(problem, code="C011"), place)


def _locate(function: object) -> str:
    """Return ``file:line`` of a function."""
    code = getattr(inspect.unwrap(function) if callable(function) else function, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else ""
