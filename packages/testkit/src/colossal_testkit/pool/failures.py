"""Exceptions of a rank, as text and values that reach the parent.

pytest rewrites assertions only in its own process, so a failing ``assert a == b`` in a rank says nothing
about ``a``. The locals of the innermost frame that lies in the test's file make up for that.
"""

from __future__ import annotations

import pickle
import reprlib
import traceback
from types import FrameType, TracebackType

import pytest

from colossal_testkit.pool.messages import Failure
from colossal_testkit.pool.values import dumps, loads

__all__ = ["describe_failure"]

_MAX_LOCALS = 20
_MAX_LOCAL_CHARACTERS = 160


def describe_failure(error: BaseException, *, file: str) -> Failure:
    """Describe an exception that is being handled.

    Args:
        error: The exception.
        file: The test's file; frames above its first one belong to the harness and are left out.
    """
    kind = type(error)
    lines = traceback.format_exception(kind, error, _own_part(error.__traceback__, file))
    return Failure(
        kind=f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins."),
        message=str(error),
        traceback="".join(lines).rstrip() + _describe_locals(error.__traceback__, file),
        pickled=_pickle_if_possible(error),
        is_skip=isinstance(error, pytest.skip.Exception),
    )


def _own_part(trace: TracebackType | None, file: str) -> TracebackType | None:
    """Return the traceback from the first frame of the file on, or all of it when there is none."""
    part = trace
    while part is not None and part.tb_frame.f_code.co_filename != file:
        part = part.tb_next
    return part or trace


def _describe_locals(trace: TracebackType | None, file: str) -> str:
    """Return the locals of the innermost frame that lies in the file, shortened, as lines."""
    frame: FrameType | None = None
    line = 0
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == file:
            frame, line = trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next
    if frame is None or not frame.f_locals:
        return ""
    shorten = reprlib.Repr()
    shorten.maxother = shorten.maxstring = _MAX_LOCAL_CHARACTERS
    names = list(frame.f_locals)[:_MAX_LOCALS]
    lines = [f"    {name} = {' '.join(shorten.repr(frame.f_locals[name]).split())}" for name in names]
    return f"\n  locals of {frame.f_code.co_qualname} at line {line}:\n" + "\n".join(lines)


def _pickle_if_possible(error: BaseException) -> bytes | None:
    """Return the exception pickled, when it comes back as the same class."""
    try:
        data = dumps(error)
        back = loads(data)
    except (pickle.PickleError, TypeError, AttributeError, ImportError, ValueError):
        return None
    return data if type(back) is type(error) else None
