"""``colossal doctor``: run the diagnostics that core and plugins registered, each with its remedy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import click

from colossal_cli.render import print_json, print_table
from colossal_core.errors import PluginError
from colossal_core.plugins.records import DiagnosticSpec, Finding

if TYPE_CHECKING:
    from click import Context

    from colossal_cli.session import Session
    from colossal_core.plugins.entries import Registered

__all__ = ["doctor"]


@click.command()
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@click.pass_context
def doctor(ctx: Context, *, as_json: bool) -> None:
    """Look for what is missing or broken on this machine.

    Exit code 1 when something is broken; warnings and notes do not count.
    """
    session: Session = ctx.obj
    findings = _check_plugins(session)
    for entry in session.registry.diagnostics():
        findings += _run_check(entry)
    if as_json:
        import attrs

        print_json([{"check": check, **attrs.asdict(finding)} for check, finding in findings])
    else:
        rows = [(finding.severity, check, finding.message, finding.hint) for check, finding in findings]
        print_table(("result", "check", "finding", "remedy"), rows)
    ctx.exit(1 if any(finding.severity == "error" for _, finding in findings) else 0)


def _check_plugins(session: Session) -> list[tuple[str, Finding]]:
    """Return a finding for each plugin that does not work."""
    return [
        (
            "plugins",
            Finding(
                severity="error",
                code="plugins",
                message=f"plugin {status.name!r} is {status.state}: {status.reason}",
                hint=f'colossal plugins disable {status.name} --why "..."',
            ),
        )
        for status in session.registry.statuses()
        if status.state in {"failed", "incompatible"}
    ]


def _run_check(entry: Registered) -> list[tuple[str, Finding]]:
    """Run one check; a check that raises is itself a finding, since the others are still worth having."""
    record = entry.record
    assert isinstance(record, DiagnosticSpec)
    try:
        findings = _call(entry, record)
    except Exception as err:  # noqa: BLE001 - a border: one broken check must not hide the others
        problem = Finding(
            severity="error",
            code=record.code,
            message=f"the check itself failed: {type(err).__name__}: {err}",
            hint=f"tell the authors of {entry.provider}, or leave it out: --without-plugin {entry.plugin}",
        )
        return [(record.code, problem)]
    return [(record.code, _add_remedy(finding, record)) for finding in findings]


def _call(entry: Registered, record: DiagnosticSpec) -> list[Finding]:
    """Import and call a check.

    Raises:
        PluginError: It is no check.
    """
    check = entry.load_target()
    found = check() if callable(check) else None
    if not isinstance(found, Iterable):
        raise PluginError(
            f"{record.check} must be a function that returns findings, got {found!r} of {check!r}"
        )
    return list(found)


def _add_remedy(finding: Finding, record: DiagnosticSpec) -> Finding:
    """Return the finding with the remedy of its record where it brings none of its own."""
    import attrs

    if finding.hint or finding.severity == "note":
        return finding
    return attrs.evolve(finding, hint=record.fix)
