"""Errors carry message, hint and code, survive a process border, and join."""

from __future__ import annotations

import copy

import pytest

from colossal_core.errors import (
    CapabilityError,
    CheckpointError,
    ColossalError,
    DuplicateNameError,
    PlanError,
    PluginError,
    PluginLoadError,
    RankMismatchError,
    UnknownNameError,
    UsageError,
    join_errors,
)

TREE = [
    (ColossalError, "C000", 1),
    (UsageError, "C001", 2),
    (PlanError, "C002", 2),
    (UnknownNameError, "C003", 2),
    (PluginError, "C010", 1),
    (PluginLoadError, "C012", 1),
    (DuplicateNameError, "C013", 1),
    (CapabilityError, "C020", 1),
    (RankMismatchError, "C030", 1),
    (CheckpointError, "C040", 1),
]


@pytest.mark.parametrize(("kind", "code", "exit_code"), TREE)
def test_codes_and_exit_codes_are_stable(kind: type[ColossalError], code: str, exit_code: int) -> None:
    """Scripts compare codes, so a change of this table is a breaking change."""
    error = kind("7 is odd")

    assert (error.code, error.exit_code) == (code, exit_code)
    assert issubclass(kind, ColossalError)


def test_text_ends_with_the_next_step() -> None:
    """The message comes first, the hint on a line of its own."""
    error = UsageError("7 is odd", hint="give 8")

    assert str(error) == "7 is odd\n  next: give 8"
    assert error.render() == "error[C001] 7 is odd\n  next: give 8"
    assert str(UsageError("7 is odd")) == "7 is odd"


def test_an_error_survives_pickling() -> None:
    """Ranks send their errors to the process that started them."""
    error = PluginError("7 is odd", hint="give 8", code="C011")

    # The same protocol as pickling, without its loading of foreign bytes.
    twin = copy.deepcopy(error)

    assert type(twin) is PluginError
    assert (twin.message, twin.hint, twin.code, str(twin)) == (error.message, "give 8", "C011", str(error))


def test_one_error_is_joined_to_itself() -> None:
    """A single problem keeps its own class, code and text."""
    error = UnknownNameError("no such thing")

    assert join_errors([error], "the plan") is error


def test_several_errors_are_listed_with_their_next_steps() -> None:
    """A user mends all of it at once, also what had been joined before."""
    first = join_errors([PlanError("a", hint="do a"), CapabilityError("b")], "the plan")

    joined = join_errors([first, PlanError("c")], "the plan")

    assert type(joined) is PlanError
    assert str(joined) == "the plan has 3 problems\n  1. a\n     next: do a\n  2. b\n  3. c"
    assert [part.message for part in joined.parts] == ["a", "b", "c"]


def test_missing_capabilities_alone_stay_a_capability_error() -> None:
    """Nothing is wrong with the plan itself then."""
    joined = join_errors([CapabilityError("a"), CapabilityError("b")], "the plan")

    assert type(joined) is CapabilityError
