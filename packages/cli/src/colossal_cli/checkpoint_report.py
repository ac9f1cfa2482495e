"""What a manifest says, as tables and as plain values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from colossal_cli.render import print_fields, print_table

if TYPE_CHECKING:
    from colossal_core.checkpoint.manifest import Manifest, ObjectRecord

__all__ = ["describe", "list_tensors", "print_description"]

_MOST_FILES = 32
"""Files that are shown to people: a run of a thousand ranks has a few thousand."""


def describe(path: Path, manifest: Manifest) -> dict[str, object]:
    """Return what a checkpoint holds as plain values.

    Args:
        path: Its directory.
        manifest: Its manifest.
    """
    return {
        "directory": str(path),
        "step": manifest.step,
        "epoch": manifest.epoch,
        "samples": manifest.samples,
        "created": manifest.created,
        "plan": dict(manifest.plan),
        "versions": dict(manifest.versions),
        "objects": {name: _describe_object(record) for name, record in manifest.objects.items()},
        "files": {name: file.num_bytes for name, file in manifest.files.items()},
        "configurations": {name: sorted(texts) for name, texts in manifest.configurations.items()},
        "has_extra": manifest.extra is not None,
    }


def list_tensors(manifest: Manifest, pattern: str) -> list[dict[str, object]]:
    """Return the tensors whose name, with or without that of their object, fits a pattern.

    Args:
        manifest: The manifest.
        pattern: As of the shell: ``*`` stands for any text.
    """
    return [
        {
            "object": owner,
            "name": name,
            "dtype": tensor.dtype,
            "shape": [*tensor.shape],
            "bytes": tensor.num_bytes,
            "pieces": len(tensor.pieces),
            "aliases": [*tensor.aliases],
            "files": sorted({piece.file for piece in tensor.pieces}),
        }
        for owner, record in manifest.objects.items()
        for name, tensor in record.tensors.items()
        if any(fnmatchcase(text, pattern) for text in (name, *tensor.aliases, f"{owner}: {name}"))
    ]


def print_description(path: Path, manifest: Manifest) -> None:
    """Print what a checkpoint holds."""
    versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    print_fields(
        {
            "checkpoint": str(path),
            "step": f"{manifest.step:,}",
            "epoch": f"{manifest.epoch:,}",
            "samples": f"{manifest.samples:,}",
            "written": manifest.created,
            "by": versions,
            "plan": _tell_plan(manifest.plan),
            "travels along": ", ".join(
                f"{name}/{file}" for name, texts in manifest.configurations.items() for file in texts
            ),
            "extra": "" if manifest.extra is None else "yes",
        }
    )
    click.echo()
    rows = []
    for name, record in manifest.objects.items():
        found = _describe_object(record)
        counts = (f"{found[key]:,}" for key in ("tensors", "elements", "bytes"))
        rows.append((name, str(found["kind"]), *counts, ", ".join(found["dtypes"])))
    print_table(("object", "kind", "tensors", "elements", "bytes", "types"), rows)
    click.echo()
    files = [(name, f"{file.num_bytes:,}") for name, file in sorted(manifest.files.items())]
    print_table(("file", "bytes"), files[:_MOST_FILES])
    if len(files) > _MOST_FILES:
        click.echo(f"and {len(files) - _MOST_FILES:,} more files; --json lists all")


def _describe_object(record: ObjectRecord) -> dict[str, Any]:
    """Count what one object holds; tied tensors once."""
    tensors = record.tensors.values()
    return {
        "kind": record.kind,
        "tensors": len(tensors),
        "elements": sum(math.prod(tensor.shape) for tensor in tensors),
        "bytes": sum(tensor.num_bytes for tensor in tensors),
        "dtypes": sorted({tensor.dtype for tensor in tensors}),
    }


def _tell_plan(stored: Mapping[str, Any]) -> str:
    """Return the plan that wrote a checkpoint in one line: ranks, pieces with their options, precision."""
    plan = stored.get("plan", {})
    words = [f"world size {stored['world_size']}"] if "world_size" in stored else []
    for name, options in plan.get("pieces", {}).items():
        given = ", ".join(f"{key}={value}" for key, value in options.items())
        words.append(f"{name}({given})")
    words.extend(
        f"{key} {plan[key]}" for key in ("precision", "max_grad_norm", "accumulate") if plan.get(key)
    )
    return ", ".join(words)
