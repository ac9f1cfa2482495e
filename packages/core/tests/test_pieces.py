"""Options of core's own pieces."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from colossal_core import Recompute, Replicated, UsageError


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


def test_recompute_takes_one_pattern_or_many() -> None:
    """A single pattern may be written without a sequence, as TOML and people do."""
    assert Recompute(blocks="layers.*") == Recompute(blocks=("layers.*",), every=1)
    patterns: Any = ["a", "b"]
    assert Recompute(blocks=patterns).blocks == ("a", "b")


@pytest.mark.parametrize("every", [0, -1, 1.5, True, "2"])
def test_recompute_counts_blocks(every: Any) -> None:
    """What counts no blocks is refused, with what numbers mean."""
    with pytest.raises(UsageError, match="every must be an integer of at least 1"):
        Recompute(every=every)


@pytest.mark.parametrize("blocks", [7, (3,), ("",)])
def test_recompute_names_blocks(blocks: Any) -> None:
    """What is no pattern is refused."""
    with pytest.raises(UsageError, match="blocks must be patterns of module names"):
        Recompute(blocks=blocks)
