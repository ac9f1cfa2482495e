"""Every error that a user of Colossal can cause, in one tree.

::

    ColossalError               C000  exit 1
    |-- UsageError              C001  exit 2   a call, a plan, a file or a name is wrong
    |   |-- PlanError           C002           the plan contradicts itself or the world; all findings at once
    |   `-- UnknownNameError    C003           no such piece, key or plugin
    |-- PluginError             C010  exit 1   a plugin breaks the contract
    |   |-- PluginLoadError     C012           importing or registering it failed
    |   `-- DuplicateNameError  C013           two providers of one name
    |-- CapabilityError         C020  exit 1   this device, build or version cannot do it
    |-- RankMismatchError       C030  exit 1   ranks disagree about what they run
    |-- CheckpointError         C040  exit 1   a checkpoint is missing, damaged or foreign
    |-- NonFiniteError          C050  exit 1   a gradient is infinite or NaN
    |-- MemoryBudgetError       C060  exit 1   a budget of memory, or the memory of the system, is used up
    `-- DiskTierError           C061  exit 1   training state cannot be kept in a file, or not be read back

A message states the facts with their numbers and what was expected; the *hint* is the next step. The *code*
is stable: scripts may compare it and documentation is filed under it. A class has a default code, and a
raiser may give a narrower one. Errors survive pickling, since they travel between processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

__all__ = [
    "CapabilityError",
    "CheckpointError",
    "ColossalError",
    "DiskTierError",
    "DuplicateNameError",
    "MemoryBudgetError",
    "NonFiniteError",
    "PlanError",
    "PluginError",
    "PluginLoadError",
    "RankMismatchError",
    "UnknownNameError",
    "UsageError",
    "join_errors",
]


class ColossalError(Exception):
    """Say what went wrong, with numbers, and what to do next.

    Attributes:
        message: The facts and what was expected, lower-case start, no trailing hint.
        hint: The next step, or an empty string when the message already implies it.
        code: Stable identifier such as ``"C012"``.
        parts: The errors that this one joins; empty for an error of its own.
    """

    default_code: ClassVar[str] = "C000"
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str = "", code: str = "") -> None:
        """Build the error.

        Args:
            message: The facts and what was expected.
            hint: The next step, often a command to run.
            code: A code narrower than the default of the class.
        """
        # Only the message goes into ``args``: unpickling calls ``cls(*args)`` and then restores ``__dict__``.
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.code = code or self.default_code
        self.parts: tuple[ColossalError, ...] = ()

    def __str__(self) -> str:
        """Return the message and, on a line of its own, the next step."""
        return f"{self.message}\n  next: {self.hint}" if self.hint else self.message

    def render(self) -> str:
        """Return the form for terminals: ``error[CODE] message`` followed by the next step."""
        return f"error[{self.code}] {self}"


class UsageError(ColossalError):
    """A call, a plan, a configuration file or a name is wrong; nothing was started. Exit code 2."""

    default_code = "C001"
    exit_code = 2


class PlanError(UsageError):
    """A plan contradicts itself, or does not fit the world. Lists every finding, not just the first one."""

    default_code = "C002"


class UnknownNameError(UsageError):
    """A name of a piece, a key or a plugin means nothing here. Lists the valid ones and the closest match."""

    default_code = "C003"


class PluginError(ColossalError):
    """A plugin breaks the contract of the registry."""

    default_code = "C010"


class PluginLoadError(PluginError):
    """A plugin, or an object that one of its records names, cannot be imported or registered."""

    default_code = "C012"


class DuplicateNameError(PluginError):
    """Two providers offer one name, and nothing says which is meant. Names both as "distribution version"."""

    default_code = "C013"


class CapabilityError(ColossalError):
    """This device, build or version cannot do what was asked."""

    default_code = "C020"


class RankMismatchError(ColossalError):
    """Ranks disagree about plugins, versions, plan, model or input. Raised on all, before any hangs."""

    default_code = "C030"


class NonFiniteError(ColossalError):
    """A gradient is infinite or NaN. Raised on all ranks before anything is updated; names the parameters."""

    default_code = "C050"


class CheckpointError(ColossalError):
    """A checkpoint is missing, incomplete, damaged or does not belong to this model."""

    default_code = "C040"


class MemoryBudgetError(ColossalError):
    """A budget of memory, or what the system gives, is used up. Says by what, and what was asked for."""

    default_code = "C060"


class DiskTierError(ColossalError):
    """A file that holds training state meanwhile cannot be written, or not be read back as it was written."""

    default_code = "C061"


def join_errors(errors: Sequence[ColossalError], subject: str) -> ColossalError:
    """Return one error for all that was found, so that a user mends everything at once.

    One error is returned as it is. Several become a numbered list with the next step of each: a
    ``CapabilityError`` when all of them are, else a ``PlanError``.

    Args:
        errors: What was found, at least one.
        subject: What has the problems, ``"the plan"``.
    """
    if len(errors) == 1:
        return errors[0]
    parts = tuple(part for error in errors for part in error.parts or (error,))
    lines = [f"{subject} has {len(parts)} problems"]
    for number, part in enumerate(parts, start=1):
        indented = str(part).replace("\n", "\n   ")
        lines.append(f"  {number}. {indented}")
    kind = CapabilityError if all(isinstance(part, CapabilityError) for part in parts) else PlanError
    joined = kind("\n".join(lines))
    joined.parts = parts
    return joined
