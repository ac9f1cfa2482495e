"""``colossal plan``: look at plans without running them, and without torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from colossal_cli.render import print_json, print_table
from colossal_core.errors import UsageError

if TYPE_CHECKING:
    from colossal_cli.session import Session
    from colossal_core.plan import Plan

__all__ = ["plan"]


@click.group()
def plan() -> None:
    """Look at plans without running them."""


@plan.command("show")
@click.argument("file", required=False, type=click.Path(path_type=Path))
@click.option(
    "--nproc", type=click.IntRange(min=1), metavar="N", help="Also show the mesh of this many ranks."
)
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@click.pass_obj
def show(session: Session, file: Path | None, nproc: int | None, *, as_json: bool) -> None:
    """Show the effective plan of FILE, with the origin of each value.

    Without FILE: that of the project's colossal.toml or pyproject.toml.
    """
    from colossal_core.building import build_plan

    path = _choose_file(file)
    effective = build_plan(session.with_plan_file(path).registry, plan=path)
    mesh = {} if nproc is None else _describe_mesh(effective, nproc)
    if as_json:
        plain = {
            "plan": effective.to_dict(),
            "origins": dict(effective.origins),
            "digest": effective.digest(),
        }
        print_json({**plain, **({"mesh": mesh} if mesh else {})})
        return
    print_table(
        ("key", "value", "origin"),
        [(row.key, _print_value(row.value), row.origin) for row in effective.rows()],
    )
    if mesh:
        click.echo()
        print_table(("axis", "degree"), [(axis, str(degree)) for axis, degree in mesh.items()])


def _choose_file(file: Path | None) -> Path:
    """Return the file that was named, or the project's."""
    from colossal_core.plugins.sources import find_project_file

    chosen = find_project_file() if file is None else file
    if chosen is None:
        raise UsageError(
            f"no project file was found from {str(Path.cwd())!r} upwards",
            hint="name a file: colossal plan show FILE",
        )
    if not chosen.is_file():
        raise UsageError(f"there is no plan file {str(chosen)!r}")
    return chosen


def _describe_mesh(effective: Plan, nproc: int) -> dict[str, int]:
    """Return the degree of each axis for a number of ranks, outermost first."""
    return {axis.name: axis.degree for axis in effective.layout(nproc).axes}


def _print_value(value: object) -> str:
    """Return a plain value as TOML would write it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "none"
    if isinstance(value, list):
        return f"[{', '.join(map(_print_value, value))}]"
    return str(value)
