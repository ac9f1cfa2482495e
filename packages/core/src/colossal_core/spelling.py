"""The one way to answer an unknown name: the closest match, and the list of valid ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["find_closest", "join_names", "suggest"]


def find_closest(name: str, valid: Iterable[str]) -> str:
    """Return the valid name that is closest to ``name``, or an empty string when none is close."""
    # Imported here: names are right nearly always, and every start of the command would pay for it.
    from difflib import get_close_matches

    return next(iter(get_close_matches(name, sorted(valid), n=1, cutoff=0.6)), "")


def suggest(name: str, valid: Iterable[str]) -> str:
    """Return ``"did you mean 'x'?"`` for the closest valid name, or an empty string when none is close."""
    closest = find_closest(name, valid)
    return f"did you mean {closest!r}?" if closest not in ("", name) else ""


def join_names(names: Iterable[str]) -> str:
    """Return names in sorted order, separated by commas, or ``"none"``."""
    return ", ".join(sorted(names)) or "none"
