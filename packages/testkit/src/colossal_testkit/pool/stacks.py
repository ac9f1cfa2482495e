"""Stacks as a person wants them: the frames of the test and of what it calls, without the harness."""

from __future__ import annotations

__all__ = ["trim_stacks"]

_HARNESS = "colossal_testkit/pool/"
_OWN_THREADS = (" in _watch", " in _bury")
_NOISE = "Extension modules: "


def trim_stacks(text: str) -> str:
    """Return the text without the harness's own threads and frames; other lines stay as they are.

    Args:
        text: Output of a rank, with stacks as `faulthandler` writes them: a heading, and a line for each
            frame, the innermost first.
    """
    kept: list[str] = []
    for block in text.split("\n\n"):
        lines = [line for line in block.splitlines() if not line.startswith(_NOISE)]
        if any(_is_harness(line) and line.endswith(_OWN_THREADS) for line in lines):
            continue
        first = next((index for index, line in enumerate(lines) if _is_harness(line)), None)
        if first is not None:
            # What follows the frames in the same block (the latest collectives) is no frame and stays.
            lines = lines[:first] + [line for line in lines[first:] if not line.startswith("  File ")]
        if lines:
            kept.append("\n".join(lines))
    return "\n\n".join(kept)


def _is_harness(line: str) -> bool:
    """Say whether a line is a frame of the harness."""
    return line.startswith("  File ") and _HARNESS in line.replace("\\", "/")
