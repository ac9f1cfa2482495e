"""What loading found: the report of tensors, and where a run goes on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

from colossal_core.errors import CheckpointError

__all__ = ["LoadReport", "Loaded"]

SHOWN_NAMES = 5
"""Names listed in an error before the rest is counted."""


@frozen(kw_only=True)
class LoadReport:
    """How stored tensors met those of the run; equal on all ranks but for ``bytes_read``.

    Attributes:
        loaded: Number of tensors that were loaded.
        missing: Tensors of the run that are not stored; they stay as they are.
        unexpected: Stored tensors that the run does not have.
        reshaped: Tensors that are stored in another shape, with both shapes; they stay as they are.
        cast: Tensors that are stored in another dtype, with both.
        different: What else does not fit, in words: another optimizer, other groups, schedulers or loaders;
            their state stays as it is.
        aliased: Tensors that were found under another name of theirs (tied weights).
        bytes_read: Bytes of tensors that this rank has read.
    """

    loaded: int = 0
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    reshaped: tuple[str, ...] = ()
    different: tuple[str, ...] = ()
    cast: tuple[str, ...] = ()
    aliased: tuple[str, ...] = ()
    bytes_read: int = 0

    @property
    def problems(self) -> tuple[str, ...]:
        """What strict loading refuses, a line for each kind."""
        kinds = (("missing", self.missing), ("unexpected", self.unexpected), ("reshaped", self.reshaped))
        lines = [f"{len(names)} {kind}: {_shorten(names)}" for kind, names in kinds if names]
        return (*lines, *self.different)

    def check(self, where: Path) -> None:
        """Refuse what does not fit exactly.

        Args:
            where: What is loaded.

        Raises:
            CheckpointError: Something is missing, unexpected or reshaped; lists it.
        """
        if self.problems:
            lines = "".join(f"\n  {problem}" for problem in self.problems)
            raise CheckpointError(
                f"{where} does not fit what was boosted:{lines}",
                hint="boost the objects that were saved, or pass strict=False to load what fits",
            )

    def __str__(self) -> str:
        """Return it for people."""
        notes = [f"{self.loaded} tensors loaded, {self.bytes_read} bytes read on this rank", *self.problems]
        notes += [
            f"{len(names)} {kind}: {_shorten(names)}"
            for kind, names in (("cast", self.cast), ("found by another name", self.aliased))
            if names
        ]
        return "\n".join(notes)


@frozen(kw_only=True)
class Loaded:
    """Where a run goes on.

    Attributes:
        path: The checkpoint.
        step: Real steps that were taken.
        epoch: Epoch that goes on, or begins.
        samples: Samples that the run has seen.
        extra: What was given to ``save``; tuples, sets and tensors as they were.
        report: What loading found.
    """

    path: Path
    step: int
    epoch: int
    samples: int
    extra: Any
    report: LoadReport


def _shorten(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return ", ".join(names[:SHOWN_NAMES]) + more
