"""Reentrant checkpoints of user code, run as the other kind of torch's checkpoints.

A reentrant checkpoint runs without a graph and makes one in backward, so what another stage sends into it has
no way back. torch's other kind computes the same numbers, in a graph of the usual form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils import checkpoint

__all__ = ["without_reentrant_checkpoints"]


@contextmanager
def without_reentrant_checkpoints() -> Iterator[None]:
    """Let ``torch.utils.checkpoint.checkpoint(..., use_reentrant=True)`` run without re-entering."""
    theirs = checkpoint.CheckpointFunction
    checkpoint.CheckpointFunction = _Checkpoint  # type: ignore[misc,assignment]  # looked up by name
    try:
        yield
    finally:
        checkpoint.CheckpointFunction = theirs  # type: ignore[misc]


class _Checkpoint:
    """Stands in for the autograd function of reentrant checkpoints."""

    @staticmethod
    def apply(function: Callable[..., Any], preserves: bool, *args: Any) -> Any:  # noqa: FBT001 - as theirs
        """Call a function, and again in backward; ``preserves`` the state of random numbers between."""
        return checkpoint.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserves)
