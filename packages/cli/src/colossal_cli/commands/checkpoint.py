"""``colossal checkpoint``: look at checkpoints, check, compare and export them, without torch or ranks."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from colossal_cli.render import print_json, print_table
from colossal_core.errors import UsageError

if TYPE_CHECKING:
    from click import Context

    from colossal_core.checkpoint.comparing import Difference

__all__ = ["checkpoint"]

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) *([KMG]I?B|)", re.IGNORECASE)


def _read_size(_ctx: Context, _parameter: click.Parameter, value: str) -> int:
    """Return a number of bytes: ``5GB``, ``512MiB``, ``1000``."""
    found = _SIZE.fullmatch(value.strip())
    size = int(float(found[1]) * _UNITS[found[2].upper()]) if found else 0
    if size < 1:
        raise click.BadParameter(f"{value!r} is no size; write 5GB, 512MiB or a number of bytes")
    return size


_directory = click.Path(path_type=Path)
_json = click.option("--json", "as_json", is_flag=True, help="For programs.")


@click.group()
def checkpoint() -> None:
    """Look at checkpoints, check, compare and export them.

    DIR is a step-N directory, or one that holds such directories: then the newest complete checkpoint is
    meant.
    """


@checkpoint.command("inspect")
@click.argument("directory", metavar="DIR", type=_directory)
@click.option("--tensors", is_flag=True, help="Also list the tensors.")
@click.option("--match", metavar="PATTERN", default="", help="List the tensors of this name: '*norm*'.")
@_json
def inspect(directory: Path, *, tensors: bool, match: str, as_json: bool) -> None:
    """Show what a checkpoint holds: counters, plan, objects, files, tensors."""
    from colossal_cli.checkpoint_report import describe, list_tensors, print_description
    from colossal_core.checkpoint.directory import read_manifest

    path = _find(directory)
    manifest = read_manifest(path)
    listed = list_tensors(manifest, match or "*") if tensors or match else None
    if as_json:
        print_json({**describe(path, manifest), **({} if listed is None else {"tensors": listed})})
        return
    print_description(path, manifest)
    if listed is not None:
        click.echo()
        columns = ("object", "tensor", "type", "shape", "bytes", "pieces", "aliases")
        print_table(columns, [_show_row(row) for row in listed])


@checkpoint.command("verify")
@click.argument("directory", metavar="DIR", type=_directory)
@_json
@click.pass_context
def verify(ctx: Context, directory: Path, *, as_json: bool) -> None:
    """Read every byte of a checkpoint and name what is damaged, missing or foreign.

    Exit code 1 when a load would fail or give other values; files that do not belong there are only noted.
    """
    from colossal_core.checkpoint.verifying import verify as find_problems

    path = _find(directory)
    problems = find_problems(path)
    is_sound = all(problem.severity != "error" for problem in problems)
    if as_json:
        plain = [
            {
                "severity": problem.severity,
                "file": problem.file,
                "tensor": problem.tensor,
                "message": problem.message,
            }
            for problem in problems
        ]
        print_json({"directory": str(path), "sound": is_sound, "problems": plain})
    else:
        if problems:
            rows = [(found.severity, found.file, found.tensor, found.message) for found in problems]
            print_table(("severity", "file", "tensor", "problem"), rows)
        if is_sound:
            click.echo(f"{path} is sound: every file, header and checksum was read")
    ctx.exit(0 if is_sound else 1)


@checkpoint.command("diff")
@click.argument("first", metavar="A", type=_directory)
@click.argument("second", metavar="B", type=_directory)
@_json
@click.pass_context
def compare(ctx: Context, first: Path, second: Path, *, as_json: bool) -> None:
    """Compare two checkpoints bit by bit, whatever plans wrote them.

    Exit code 0 when both hold the same state, 1 when not. The plan and the versions that wrote them are
    shown, but do not count.
    """
    from colossal_core.checkpoint.comparing import diff

    path_a, path_b = _find(first), _find(second)
    found = diff(path_a, path_b)
    if as_json:
        import attrs

        plain = attrs.asdict(found)
        for item in plain["values"]:
            # JSON has no NaN and no infinity.
            item["largest"] = _finite_or_text(item["largest"])
        print_json({"a": str(path_a), "b": str(path_b), "same": found.is_same_state, **plain})
    else:
        _print_difference(found)
    ctx.exit(0 if found.is_same_state else 1)


@checkpoint.command("export")
@click.argument("directory", metavar="DIR", type=_directory)
@click.argument("target", metavar="OUT", type=_directory)
@click.option("--object", "name", metavar="NAME", default="", help="Which model or average; the only model.")
@click.option(
    "--max-file-size",
    "max_bytes",
    metavar="SIZE",
    callback=_read_size,
    default="5GB",
    show_default=True,
    help="Tensors above this are divided among several files.",
)
@_json
def export(directory: Path, target: Path, name: str, max_bytes: int, *, as_json: bool) -> None:
    """Write a model of a checkpoint as safetensors files that from_pretrained reads.

    An earlier export in OUT is replaced; a folder with other files is refused.
    """
    from colossal_core.checkpoint.exporting import export_object

    path = _find(directory)
    done = export_object(path, target, name=name, max_bytes=max_bytes)
    if as_json:
        print_json(
            {
                "directory": str(path),
                "target": str(target),
                "object": done.name,
                "files": list(done.files),
                "tensors": done.num_tensors,
                "bytes": done.num_bytes,
            }
        )
        return
    click.echo(f"wrote {done.num_tensors} tensors of {done.name!r}, {done.num_bytes:,} bytes, to {target}:")
    for file in done.files:
        click.echo(f"  {file}")


def _find(path: Path) -> Path:
    """Return the directory of one checkpoint, and say which it is when the path does not.

    Raises:
        CheckpointError: There is none.
        UsageError: The path cannot be read.
    """
    from colossal_core.checkpoint.directory import missing_checkpoint, resolve_checkpoint

    try:
        found = resolve_checkpoint(path)
        if found is None:
            raise missing_checkpoint(path)
    except OSError as err:
        raise UsageError(f"cannot look into {path}: {err.strerror or err}") from err
    if found != path:
        click.echo(f"{found} is the newest complete checkpoint in {path}", err=True)
    return found


def _finite_or_text(value: float | None) -> float | str | None:
    """Return a number as JSON knows it, ``"nan"`` and ``"inf"`` as texts."""
    return value if value is None or math.isfinite(value) else str(value)


def _show_row(row: dict[str, object]) -> tuple[str, ...]:
    """Return the cells of one tensor."""
    shape, aliases = row["shape"], row["aliases"]
    assert isinstance(shape, list)
    assert isinstance(aliases, list)
    return (
        str(row["object"]),
        str(row["name"]),
        str(row["dtype"]),
        " x ".join(map(str, shape)) or "scalar",
        f"{row['bytes']:,}",
        str(row["pieces"]),
        ", ".join(aliases),
    )


def _print_difference(found: Difference) -> None:
    """Print what differs, one table for each kind of difference."""
    tables: list[tuple[tuple[str, ...], list[tuple[str, ...]]]] = [
        (("value", "a", "b"), [(item.path, item.a, item.b) for item in found.fields]),
        (
            ("tensor", "only in"),
            [*((name, "a") for name in found.only_in_a), *((name, "b") for name in found.only_in_b)],
        ),
        (("tensor", "a", "b"), [(item.tensor, item.a, item.b) for item in found.forms]),
        (
            ("tensor", "different", "of", "first at", "largest |a-b|"),
            [
                (
                    item.tensor,
                    f"{item.num_different:,}",
                    f"{item.num_elements:,}",
                    str([*item.first]),
                    "" if item.largest is None else f"{item.largest:.3g}",
                )
                for item in found.values
            ],
        ),
        (("written by", "a", "b"), [(item.path, item.a, item.b) for item in found.circumstances]),
    ]
    for columns, rows in tables:
        if rows:
            print_table(columns, rows)
            click.echo()
    same = found.num_compared - len(found.values)
    verdict = "the same state" if found.is_same_state else "different states"
    click.echo(f"{verdict}: {same:,} of {found.num_compared:,} tensors in both are the same bit for bit")
