"""Reading TOML files, and finding the line that a key stands on.

Errors about a file name the line, which the standard parser does not keep. It is found again by a scan of the
text, only when an error is to be shown.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from colossal_core.errors import UsageError

__all__ = ["index_lines", "locate", "read_toml", "select_table"]

_HEADER = re.compile(r"\s*\[+\s*([^\]]+?)\s*\]+")
_ASSIGNMENT = re.compile(r"\s*([A-Za-z0-9_\-.\"' ]+?)\s*=")


def read_toml(path: Path) -> dict[str, object]:
    """Parse a TOML file.

    Raises:
        UsageError: The file cannot be read, is not UTF-8, or is not TOML; the parser's message has line and
            column.
    """
    import tomllib

    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as err:
        message = f"cannot read {str(path)!r}: {err.strerror or err}"
        raise UsageError(message, hint="give the path of a TOML file") from err
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as err:
        message = f"{str(path)!r} is not valid TOML: {err}"
        raise UsageError(
            message, hint="mend the file; strings need quotes, tables look like [parallel]"
        ) from err


def select_table(path: Path, document: Mapping[str, object]) -> tuple[Mapping[str, object], tuple[str, ...]]:
    """Return our part of a document and its place: all of it, or ``[tool.colossal]`` of a pyproject.toml."""
    if path.name != "pyproject.toml":
        return document, ()
    tool = document.get("tool")
    ours = tool.get("colossal") if isinstance(tool, Mapping) else None
    return (ours if isinstance(ours, Mapping) else {}), ("tool", "colossal")


def index_lines(path: Path) -> dict[tuple[str, ...], int]:
    """Return the line, counted from 1, of every key and table header; empty when the file cannot be read."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return {}
    found: dict[tuple[str, ...], int] = {}
    table: tuple[str, ...] = ()
    for number, line in enumerate(lines, start=1):
        if header := _HEADER.match(line):
            table = _split(header[1])
            found.setdefault(table, number)
        elif assignment := _ASSIGNMENT.match(line):
            found.setdefault(table + _split(assignment[1]), number)
    return found


def locate(path: Path, keys: Sequence[str], lines: Mapping[tuple[str, ...], int] | None = None) -> str:
    """Return ``"FILE:LINE table.key"`` for messages.

    A key inside an inline table has the line of that table; without any line, the file and the key path are
    given.

    Args:
        path: The file.
        keys: The key with all tables around it, ``("parallel", "tensor", "degree")``.
        lines: What ``index_lines`` returned, if it is at hand.
    """
    known = index_lines(path) if lines is None else lines
    number = next((known[key] for key in _list_prefixes(keys) if key in known), None)
    place = str(path) if number is None else f"{path}:{number}"
    return f"{place} {'.'.join(keys)}"


def _list_prefixes(keys: Sequence[str]) -> list[tuple[str, ...]]:
    """Return a key and all keys around it, the innermost first."""
    return [tuple(keys[:length]) for length in range(len(keys), 0, -1)]


def _split(dotted: str) -> tuple[str, ...]:
    """Split a dotted key and drop quotes. Dots in quotes are not handled: only the line would be missing."""
    return tuple(part.strip().strip("\"'") for part in dotted.split("."))
