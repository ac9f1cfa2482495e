"""What ranks compare before the first collective, as lines of text.

Equal lines on all ranks mean equal plugins and versions. A version says nothing about a source tree that is
being edited, so editable, local and unregistered plugins add a hash of their source files.
"""

from __future__ import annotations

import functools
import hashlib
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from colossal_core.plugins.discovery import PluginInfo

__all__ = ["describe_plugin", "describe_versions", "explain_disagreement", "find_sources", "hash_sources"]


def describe_versions() -> tuple[str, ...]:
    """Return the versions of python and torch that this process runs, torch's from metadata alone."""
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = "not installed"
    python = ".".join(map(str, sys.version_info[:3]))
    return (f"python {python}", f"torch {torch}")


def describe_plugin(info: PluginInfo, sources: Iterable[Path]) -> str:
    """Return one line for an active plugin.

    Args:
        info: The plugin.
        sources: Its source files, which are hashed when its version does not tell its contents.
    """
    title = "core" if info.origin == "core" else f"plugin {info.name}"
    line = f"{title} {info.version}".rstrip()
    if info.origin in {"local", "object"} or info.is_editable:
        how = info.origin if info.origin in {"local", "object"} else "editable"
        line += f" ({how}, source sha256:{hash_sources(sources)[:16]})"
    return line


def find_sources(info: PluginInfo, functions: Iterable[object]) -> tuple[Path, ...]:
    """Return the source files that a plugin consists of, as far as they can be known.

    For an installed package these are all Python files of its top-level package; for a single file or an
    object, the files in which its hooks are written.
    """
    module = sys.modules.get(info.package) if info.origin in {"core", "installed"} else None
    folders = [Path(folder) for folder in getattr(module, "__path__", ())]
    if folders:
        return tuple(sorted(path for folder in folders for path in folder.rglob("*.py")))
    codes = [getattr(function, "__code__", None) for function in functions]
    files = {Path(code.co_filename) for code in codes if code is not None}
    return tuple(sorted(path for path in files if path.is_file()))


def hash_sources(sources: Iterable[Path]) -> str:
    """Return the SHA-256 of names and contents of source files, independent of where they lie.

    A process reads files again only when one has another size or time than before: every boost asks.
    """
    stamped = []
    for path in sorted(sources):
        status = path.stat()
        stamped.append((path, status.st_size, status.st_mtime_ns))
    return _hash_stamped(tuple(stamped))


@functools.lru_cache(maxsize=64)
def _hash_stamped(stamped: tuple[tuple[Path, int, int], ...]) -> str:
    """Return the hash of files, each with its size in bytes and its time of change in nanoseconds."""
    files = [path for path, _, _ in stamped]
    root = files[0].parent if files else Path()
    for path in files:
        while root not in path.parents:
            root = root.parent
    digest = hashlib.sha256()
    for path in files:
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def explain_disagreement(
    lines_by_rank: Mapping[int, Sequence[str]], host_by_rank: Mapping[int, str]
) -> str | None:
    """Compare what ranks run, and say who differs in what.

    Args:
        lines_by_rank: Rank to its lines, from ``Registry.agreement_lines`` and whatever else must agree.
        host_by_rank: Rank to the name of its host.

    Returns:
        None when all ranks agree; otherwise one block for each set of ranks that agree among themselves, with
        the lines that not all ranks have, and a note where a rank has none of them.
    """
    groups: dict[tuple[str, ...], list[int]] = {}
    for rank in sorted(lines_by_rank):
        groups.setdefault(tuple(sorted(lines_by_rank[rank])), []).append(rank)
    if len(groups) <= 1:
        return None
    shared = set.intersection(*(set(lines) for lines in groups))
    text = [f"ranks disagree about what they run; {len(shared)} lines agree, these do not:"]
    for lines, ranks in groups.items():
        hosts = sorted({host_by_rank.get(rank, "unknown host") for rank in ranks})
        text.append(f"  {_print_ranks(ranks)} on {', '.join(hosts)}:")
        text.extend(f"    {line}" for line in lines if line not in shared)
        if shared.issuperset(lines):
            text.append("    (nothing else)")
    return "\n".join(text)


def _print_ranks(ranks: Sequence[int]) -> str:
    """Print ascending ranks with their runs joined: ``"ranks 0-3, 6"``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    printed = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank {printed}" if len(ranks) == 1 else f"ranks {printed}"
