"""Options of core's own pieces."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from colossal_core import Replicated, UsageError


def test_replicated_is_a_frozen_value() -> None:
    """It can be compared, and nobody changes it after a plan was checked."""
    assert Replicated() == Replicated(reduce="window")
    assert hash(Replicated()) == hash(Replicated(reduce="window"))
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        vars_of_frozen(Replicated())


def vars_of_frozen(piece: Any) -> None:
    """Try to change an option."""
    piece.reduce = "backward"


def test_reduction_in_backward_is_a_choice() -> None:
    """It is part of the value."""
    assert Replicated(reduce="backward") != Replicated()


def test_an_unknown_choice_is_refused() -> None:
    """The message has the choices."""
    choice: Any = "never"

    with pytest.raises(UsageError, match="reduce must be 'window' or 'backward', got 'never'"):
        Replicated(reduce=choice)
