"""The end of a backward pass, as far as torch tells it."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

__all__ = ["at_end_of_backward", "is_in_backward", "is_in_inner_backward"]

_RUNS_BACKWARD = "_engine_run_backward"
"""Name of the function through which torch runs every backward that Python starts."""


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call back when the backward pass that runs now has ended; only from inside one.

    A hint at most: two losses end twice, and a reentrant checkpoint inside a backward ends early, so the
    callback may come several times for what the user calls one backward.
    """
    engine = torch.autograd.Variable._execution_engine  # noqa: SLF001 - torch has no public name for it
    engine.queue_callback(callback)


def is_in_inner_backward() -> bool:
    """Whether the backward that runs, or has just ended, was started by another one, as checkpoints do.

    Told by the calls that led here; a thread of torch's own, which accelerators have, begins inside the outer
    one.
    """
    count = 0
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - documented, and in every CPython
    while frame is not None:
        count += frame.f_code.co_name == _RUNS_BACKWARD
        frame = frame.f_back
    is_of_torch = isinstance(threading.current_thread(), threading._DummyThread)  # noqa: SLF001 - no public test
    return count > (0 if is_of_torch else 1)


def is_in_backward() -> bool:
    """Whether autograd runs on this thread."""
    return bool(torch._C._current_graph_task_id() != -1)  # noqa: SLF001 - no public name
