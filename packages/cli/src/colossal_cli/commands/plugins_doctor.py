"""``colossal plugins doctor``: try out everything that a plugin promises, for its author and for bug reports.

Unlike all other commands it imports what the records name, and torch with it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, TypeAlias

import click

from colossal_cli.render import print_json, print_table
from colossal_core.errors import ColossalError, PluginError
from colossal_core.plugins.discovery import find_installed, find_local
from colossal_core.plugins.records import (
    CommandSpec,
    DiagnosticSpec,
    MemoryManagerSpec,
    PieceSpec,
    ScheduleSpec,
    ShardingPolicySpec,
)

if TYPE_CHECKING:
    from colossal_cli.session import Session
    from colossal_core.plugins.discovery import PluginInfo
    from colossal_core.plugins.entries import PluginStatus, Registered

__all__ = ["examine"]

Row: TypeAlias = tuple[str, str, str, str]
"""Result, plugin, what was tried, what came of it."""

# Listing plugins is to stay fast with a dozen of them.
_SLOW_SECONDS = 0.05


def examine(session: Session, name: str, *, as_json: bool) -> int:
    """Examine one plugin, or all.

    Args:
        session: Knows the flags; single-file plugins are loaded too.
        name: The plugin; empty for all.
        as_json: Print for programs.

    Returns:
        1 when something is broken, else 0.
    """
    session = type(session)(session.flags, loads_local=True)
    infos = {info.name: info for info in (*find_installed(), *find_local(session.settings.local))}
    rows: list[Row] = []
    for status in session.registry.statuses():
        if name in {"", status.name}:
            rows += _examine(session, status, infos.get(status.name))
    if as_json:
        print_json([dict(zip(("result", "plugin", "subject", "finding"), row, strict=True)) for row in rows])
    else:
        print_table(("result", "plugin", "subject", "finding"), rows)
    return 1 if any(row[0] == "error" for row in rows) else 0


def _examine(session: Session, status: PluginStatus, info: PluginInfo | None) -> list[Row]:
    """Examine one plugin; what is disabled is not imported here either."""
    if status.state in {"disabled", "incompatible"}:
        return [("note", status.name, "state", f"{status.state}: {status.reason}; nothing was imported")]
    rows = [] if info is None else _probe(info)
    if status.state == "failed":
        rows.append(("error", status.name, "registration", status.reason))
    entries = (
        *session.registry.records("piece"),
        *session.registry.commands(),
        *session.registry.diagnostics(),
        *session.registry.records("pipeline_schedule"),
        *session.registry.records("sharding_policy"),
    )
    for entry in entries:
        if entry.plugin == status.name:
            rows.append(_try_record(entry))
    return rows


def _probe(info: PluginInfo) -> list[Row]:
    """Import the light module in a fresh interpreter, with a clock and a look-out for heavy packages."""
    plain = {
        "name": info.name,
        "module": info.module,
        "distribution": info.distribution,
        "version": info.version,
        "origin": info.origin,
        "path": None if info.path is None else str(info.path),
    }
    command = [sys.executable, "-m", "colossal_cli.probe", json.dumps(plain)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - ourselves
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        reason = done.stderr.strip().rpartition("\n")[2] or "no output"
        return [
            ("error", info.name, "import", f"the interpreter ended with code {done.returncode}: {reason}")
        ]
    if answer["error"]:
        click.echo(answer["error"], err=True, nl=False)
        return [("error", info.name, "import", "raises; the traceback stands above")]
    rows: list[Row] = [
        (
            "error",
            info.name,
            "import",
            f"{line} imports {package}, which makes every `colossal plugins list` slow",
        )
        for package, line in answer["heavy"].items()
    ]
    result = "warning" if answer["seconds"] > _SLOW_SECONDS else "ok"
    cost = f"{answer['seconds'] * 1000:.0f} ms, {answer['num_modules']} modules"
    limit = f"; more than {_SLOW_SECONDS * 1000:.0f} ms is slow" if result == "warning" else ""
    packages = ", ".join(answer["packages"])
    return [*rows, (result, info.name, "import", f"{cost} ({packages}){limit}")]


def _try_record(entry: Registered) -> Row:
    """Import what a record names, and hold it against its interface."""
    subject = f"{entry.record.kind.replace('_', ' ')} {entry.record.name}"
    try:
        finding = _describe_target(entry)
    except ColossalError as err:
        return ("error", entry.plugin, subject, err.message)
    return ("ok", entry.plugin, subject, finding)


def _describe_target(entry: Registered) -> str:
    """Return what the record's target is.

    Raises:
        ColossalError: It cannot be imported, or is something else.
    """
    record = entry.record
    if isinstance(record, PieceSpec):
        entry.load_options()
    if isinstance(record, ShardingPolicySpec):
        return f"{len(record.plan)} patterns for {', '.join(record.models)}"
    target = entry.load_target()
    if isinstance(record, CommandSpec):
        fits, expected = isinstance(target, click.Command), "a click command"
    elif isinstance(record, DiagnosticSpec):
        fits, expected = callable(target), "a function that returns findings"
    else:
        from colossal_core.interfaces import AbstractMemoryManager, AbstractSchedule, AbstractStrategy

        interface: type = AbstractMemoryManager if isinstance(record, MemoryManagerSpec) else AbstractStrategy
        if isinstance(record, ScheduleSpec):
            interface = AbstractSchedule
        fits = isinstance(target, type) and issubclass(target, interface)
        expected = f"a subclass of colossal_core.interfaces.{interface.__name__}"
        missing = sorted(vars(target).get("__abstractmethods__", ())) if fits else []
        if missing:
            raise PluginError(f"{target!r} lacks {', '.join(missing)}")
    if not fits:
        raise PluginError(f"{target!r} is not {expected}")
    return f"{record.check if isinstance(record, DiagnosticSpec) else record.target} is {expected}"
