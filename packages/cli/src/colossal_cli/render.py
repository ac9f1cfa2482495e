"""Tables for people, JSON for programs.

On a terminal, tables are drawn by rich, which takes 50 ms to import; everywhere else they are aligned text
without colours, which ``grep`` and ``awk`` can read.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence

import click

__all__ = ["print_fields", "print_json", "print_table"]

_STYLES = {
    "enabled": "green",
    "ok": "green",
    "disabled": "dim",
    "note": "cyan",
    "incompatible": "yellow",
    "warning": "yellow",
    "failed": "bold red",
    "error": "bold red",
}


def print_json(value: object) -> None:
    """Print plain values as JSON, keys in the given order."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under a header; columns that are empty in every row are left out.

    Args:
        columns: Headers.
        rows: Cells, one for each column.
    """
    if not rows:
        click.echo("nothing to show")
        return
    kept = [index for index in range(len(columns)) if any(row[index] for row in rows)] or [0]
    columns = [columns[index] for index in kept]
    rows = [[row[index] for index in kept] for row in rows]
    if sys.stdout.isatty():
        _print_rich(columns, rows)
    else:
        _print_plain(columns, rows)


def print_fields(fields: Mapping[str, str]) -> None:
    """Print names and values, one pair a line; empty values are left out."""
    width = max((len(name) for name in fields), default=0)
    for name, value in fields.items():
        if value:
            click.echo(f"{name:<{width}}  {value}")


def _print_rich(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Draw a table that fits the terminal."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
    Console().print(table)


def _print_plain(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Write aligned columns; line breaks inside a cell become spaces, so a row stays one line."""
    cells = [[" ".join(cell.split()) for cell in row] for row in [columns, *rows]]
    widths = [max(len(row[index]) for row in cells) for index in range(len(columns))]
    for row in cells:
        click.echo("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
