"""Reading TOML files, and finding the line that a key stands on.

Errors about a file name the line, which the standard parser does not keep. It is found again by a scan of the text,
only when an error is to be shown.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from colossal_core.errors import UsageError

__all__ = ["find_line", "read_toml", "select_table"]

_HEADER = re.compile(r"\s*\[+\s*([^\]]+?)\s*\]+")
_ASSIGNMENT = re.compile(r"\s*([A-Za-z0-9_\-.\"' ]+?)\s*=")


def read_toml(path: Path) -> dict[str, object]:
    """Parse a TOML file.

    Raises:
        UsageError: The file cannot be read, is not UTF-8, or is not TOML; the parser's message has line and column.
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
        raise UsageError(message, hint="mend the file; strings need quotes, tables look like [parallel]") from err




def select_table(path: Path, document: Mapping[str, object]) -> tuple[Mapping[str, object], tuple[str, ...]]:
    """Return our part of a document and where it is: all of it, or ``[tool.colossal]`` of a pyproject.toml."""
    if path.name != "pyproject.toml":
        return document, ()
    tool = document.get("tool")
    ours = tool.get("colossal") if isinstance(tool, Mapping) else None
    return (ours if isinstance(ours, Mapping) else {}), ("tool", "colossal")


def find_line(path: Path, keys: Sequence[str]) -> int | None:
    """Return the line, counted from 1, on which a key is written; the closest enclosing key if it stands in a line.

    Args:
        path: The file.
        keys: The key with all tables around it, ``("parallel", "tensor", "degree")``.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    wanted = tuple(keys)
    found: dict[tuple[str, ...], int] = {}
    table: tuple[str, ...] = ()
    for number, line in enumerate(lines, start=1):
        if header := _HEADER.match(line):
            table = _split(header[1])
            found.setdefault(table, number)
        elif assignment := _ASSIGNMENT.match(line):
            found.setdefault(table + _split(assignment[1]), number)
    for length in range(len(wanted), 0, -1):
        if wanted[:length] in found:
            return found[wanted[:length]]
    return None


def _split(dotted: str) -> tuple[str, ...]:
    """Split a dotted key and drop quotes. Quoted dots are not handled: the line is a help, the key path is exact."""
    return tuple(part.strip().strip("\"'") for part in dotted.split("."))
