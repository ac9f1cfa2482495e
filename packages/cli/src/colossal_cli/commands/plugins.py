"""``colossal plugins``: what is installed, what it brings, and what is switched on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import click

from colossal_cli.render import print_fields, print_json, print_table
from colossal_core.errors import ColossalError, UnknownNameError
from colossal_core.plugins.records import (
    CommandSpec,
    DiagnosticSpec,
    PieceSpec,
    ScheduleSpec,
    ShardingPolicySpec,
)

if TYPE_CHECKING:
    from click import Context

    from colossal_cli.session import Session
    from colossal_core.plugins.entries import PluginStatus, Registered
    from colossal_core.plugins.state import EditPlace, PluginSettings

__all__ = ["plugins"]


@click.group()
def plugins() -> None:
    """List, explain and switch plugins."""


@plugins.command("list")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@click.pass_obj
def list_plugins(session: Session, *, as_json: bool) -> None:
    """Show every installed plugin: what it brings, where it comes from, its state and why."""
    registry = session.registry
    statuses = registry.statuses()
    if as_json:
        print_json([_to_plain(session, status) for status in statuses])
        return
    rows = [
        (
            status.name,
            status.state,
            ", ".join(
                entry.record.name for entry in registry.records("piece") if entry.plugin == status.name
            ),
            ", ".join(entry.record.name for entry in registry.commands() if entry.plugin == status.name),
            _name_version(status),
            _explain(status),
        )
        for status in statuses
    ]
    print_table(("plugin", "state", "pieces", "commands", "distribution", "reason"), rows)


@plugins.command("info")
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@click.pass_obj
def show_plugin(session: Session, name: str, *, as_json: bool) -> None:
    """Show one plugin, with the options of each of its pieces."""
    found = [status for status in session.registry.statuses() if status.name == name]
    if not found:
        raise _explain_unknown(name, [status.name for status in session.registry.describe()])
    if as_json:
        print_json(_to_plain(session, found[0]))
        return
    status = found[0]
    print_fields(
        {
            "plugin": status.name,
            "distribution": _name_version(status),
            "state": status.state,
            "reason": _explain(status),
        }
    )
    for entry in _list_records(session, name):
        click.echo()
        print_fields(_describe_record(entry))


@plugins.command("enable")
@click.argument("name")
@click.pass_context
def enable(ctx: Context, name: str) -> None:
    """Switch a plugin on, in the project's file or else in your own."""
    ctx.exit(_switch(ctx.obj, name, is_enabled=True, why=""))


@plugins.command("disable")
@click.argument("name")
@click.option("--why", default="", metavar="TEXT", help="The reason, for whoever meets it later.")
@click.pass_context
def disable(ctx: Context, name: str, why: str) -> None:
    """Switch a plugin off; it is then never imported."""
    ctx.exit(_switch(ctx.obj, name, is_enabled=False, why=why))


@plugins.command("doctor")
@click.argument("name", required=False, default="")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@click.pass_context
def examine_plugin(ctx: Context, name: str, *, as_json: bool) -> None:
    """Import everything that a plugin names, check it, and time its light module.

    Without NAME: every plugin. Exit code 1 when something is broken.
    """
    from colossal_cli.commands.plugins_doctor import examine

    known = [status.name for status in ctx.obj.registry.describe()]
    if name and name not in known:
        raise _explain_unknown(name, known)
    ctx.exit(examine(ctx.obj, name, as_json=as_json))


# ------------------------------------------------------------------------------------------------ showing


def _list_records(session: Session, plugin: str) -> list[Registered]:
    """Return what a plugin brings: pieces, then commands, then diagnostics."""
    registry = session.registry
    entries = (*registry.records("piece"), *registry.commands(), *registry.diagnostics())
    return [entry for entry in entries if entry.plugin == plugin]


def _name_version(status: PluginStatus) -> str:
    """Return distribution and version."""
    text = f"{status.distribution} {status.version}".strip()
    return f"{text} (editable)" if status.editable and status.version else text


def _explain(status: PluginStatus) -> str:
    """Return why a plugin is in its state, and who said so."""
    if status.state == "disabled":
        return f"{status.reason} [{status.source}]"
    return status.reason


def _to_plain(session: Session, status: PluginStatus) -> dict[str, object]:
    """Return a status and its records as plain values."""
    entries = _list_records(session, status.name)
    brought = [
        (entry.record, {"kind": entry.record.kind, "name": entry.record.name, "summary": _summarise(entry)})
        for entry in entries
    ]
    return {
        "name": status.name,
        "state": status.state,
        "reason": status.reason,
        "source": status.source,
        "distribution": status.distribution,
        "version": status.version,
        "editable": status.editable,
        "pieces": [plain for record, plain in brought if isinstance(record, PieceSpec)],
        "commands": [plain for record, plain in brought if isinstance(record, CommandSpec)],
        "diagnostics": [plain for record, plain in brought if isinstance(record, DiagnosticSpec)],
        "schedules": [plain for record, plain in brought if isinstance(record, ScheduleSpec)],
        "policies": [plain for record, plain in brought if isinstance(record, ShardingPolicySpec)],
    }


def _summarise(entry: Registered) -> str:
    """Return the one line that says what a record is."""
    record = entry.record
    return record.title if isinstance(record, DiagnosticSpec) else record.summary


def _describe_record(entry: Registered) -> dict[str, str]:
    """Return the fields of a record, in words; imports the class of options, which reaches no torch."""
    record = entry.record
    fields = {record.kind.replace("_", " "): record.name, "  summary": _summarise(entry)}
    if isinstance(record, PieceSpec):
        fields["  options"] = _describe_options(entry)
        fields["  presets"] = ", ".join(f"{name} = {value!r}" for name, value in record.presets.items())
        fields["  axes"] = ", ".join(axis.name for axis in record.axes)
        fields["  excludes"] = ", ".join(record.excludes)
        fields["  target"] = str(record.target)
    elif isinstance(record, CommandSpec | ScheduleSpec):
        fields["  target"] = str(record.target)
    elif isinstance(record, ShardingPolicySpec):
        fields["  models"] = ", ".join(record.models)
        fields["  plan"] = ", ".join(f"{pattern!r}: {role!r}" for pattern, role in record.plan.items())
    else:
        fields["  remedy"] = record.fix
    return fields


def _describe_options(entry: Registered) -> str:
    """Return the options of a piece with their defaults, or why they cannot be shown."""
    try:
        options = entry.load_options()
    except ColossalError as err:
        return f"cannot be read: {err.message}"
    shown = [
        _show_option(field)
        for field in attrs.fields(options)
        if field.init and field.alias not in entry.piece.presets
    ]
    return ", ".join(shown) or "none"


def _show_option(field: attrs.Attribute[object]) -> str:
    """Return ``name`` or ``name = default`` of a field of an options class."""
    name = field.alias or field.name
    if field.default is attrs.NOTHING:
        return name
    # attrs.Factory is a class that its type stubs declare as a function.
    default = "..." if type(field.default).__name__ == "Factory" else repr(field.default)
    return f"{name} = {default}"


def _explain_unknown(name: str, valid: list[str]) -> UnknownNameError:
    """Return the error for a plugin that is not installed."""
    from colossal_core.plugins.catalogue import DISTRIBUTION_BY_NAME
    from colossal_core.spelling import join_names, suggest

    distribution = DISTRIBUTION_BY_NAME.get(name, "")
    return UnknownNameError(
        f"there is no plugin {name!r}; installed are: {join_names(valid)}",
        hint=suggest(name, valid)
        or (f"pip install {distribution}" if distribution else "colossal plugins list"),
    )


# ---------------------------------------------------------------------------------------------- switching


def _switch(session: Session, name: str, *, is_enabled: bool, why: str) -> int:
    """Write the state of a plugin into the nearest file, and tell whether it took effect.

    Nothing of any plugin is imported, so a broken one can be switched off.

    Returns:
        0, or 1 when a stronger source still says the opposite.
    """
    from colossal_core.plugins.state import find_edit_place

    place = find_edit_place()
    _check_known(session, name, is_enabled=is_enabled)
    word = "enabled" if is_enabled else "disabled"
    if _edit(place, session.settings, name, is_enabled=is_enabled, why=why):
        click.echo(f"{name} is {word} in {_shorten(place.path)}")
    else:
        click.echo(f"{name} is {word}; nothing to change in {_shorten(place.path)}")
    verdict = type(session)(session.flags).settings.judge(name)
    if verdict.is_enabled == is_enabled:
        return 0
    click.echo(
        f"but {verdict.source} is stronger and says {'enabled' if verdict.is_enabled else 'disabled'}"
        f"{f': {verdict.reason}' if verdict.reason else ''}\n  next: change {verdict.source}",
        err=True,
    )
    return 1


def _check_known(session: Session, name: str, *, is_enabled: bool) -> None:
    """Refuse a name that is neither installed nor, when it is to be switched on, mentioned by a file."""
    known = [status.name for status in session.registry.describe()]
    mentioned = {other for layer in session.settings.layers for other in layer.disabled}
    if name not in known and not (is_enabled and name in mentioned):
        raise _explain_unknown(name, known)


def _edit(place: EditPlace, settings: PluginSettings, name: str, *, is_enabled: bool, why: str) -> bool:
    """Change the file, keeping its comments and its layout; return whether anything changed."""
    import tomlkit

    from colossal_core.plugins.sources import read_file
    from colossal_core.plugins.state import set_state

    path = place.path
    verdict = read_file(path).judge(name) if path.is_file() else None
    overrules = is_enabled and settings.is_disabled_below(path, name)
    if is_enabled and not overrules and (verdict is None or verdict.is_enabled):
        return False
    before = path.read_text(encoding="utf-8") if path.is_file() else ""
    document = tomlkit.parse(before)
    set_state(document, name, is_enabled=is_enabled, why=why, table=place.table, overrules=overrules)
    after = tomlkit.dumps(document)
    if after == before:
        return False
    _replace(path, after)
    return True


def _replace(path: Path, text: str) -> None:
    """Write a file so that a crash leaves the old one or the new one; a link stays a link."""
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8")
        if path.exists():
            draft.chmod(path.stat().st_mode)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _shorten(path: Path) -> str:
    """Return a path as seen from the working directory, where that is shorter."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
