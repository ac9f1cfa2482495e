"""The end of a backward pass, as far as torch tells it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["at_end_of_backward"]


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call back when the backward pass that runs now has ended; only from inside one.

    A hint at most: two losses end twice, and a reentrant checkpoint inside a backward ends early, so the
        callback may
    come several times for what the user calls one backward.
    """
    engine = torch.autograd.Variable._execution_engine  # noqa: SLF001 - torch has no public name for it
    engine.queue_callback(callback)
