"""Options are refused with what was given and what is expected, before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from colossal_core.building import build_plan
from colossal_core.errors import CapabilityError, ColossalError, UsageError
from colossal_tensor_parallel import TensorParallel

from .registries import make_registry


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ({"degree": 0}, UsageError, "at least 1, got 0"),
        ({"degree": True}, UsageError, "got True"),
        ({"degree": 2, "mode": "4d"}, UsageError, "'1d', '2d', '2.5d', '3d'"),
        ({"degree": 4, "mode": "2d"}, CapabilityError, "not there yet"),
        ({"degree": 2, "depth": 2}, UsageError, "no effect in mode '1d'"),
        ({"degree": 2, "sequence": 1}, UsageError, "true or false"),
        ({"degree": 2, "plan": {"up": "columns"}}, UsageError, "'column', 'gathered-column', 'row'"),
        ({"degree": 2, "plan": {"up": "row:3"}}, UsageError, "only 'column' has fused parts"),
        ({"degree": 2, "plan": ["up"]}, UsageError, "must map patterns"),
    ],
)
def test_wrong_options_are_refused(given: dict[str, Any], kind: type[ColossalError], text: str) -> None:
    """The message names the option, the value and what is expected."""
    with pytest.raises(kind, match=text):
        TensorParallel(**given)


@pytest.mark.parametrize(
    "spelling",
    [
        {"parallel": {"tensor": 2}},
        {"parallel": {"tensor": {"degree": 2, "mode": "1d"}}},
        {"tensor_parallel_size": 2},
        {"pieces": {"tensor-parallel": {"degree": 2}}},
    ],
)
def test_files_spell_the_piece_in_all_ways(spelling: dict[str, Any]) -> None:
    """The axis, the field's own key and the piece's name mean the same options."""
    plan = build_plan(make_registry(), plan=spelling)

    assert [piece.options for piece in plan.strategies] == [TensorParallel(degree=2)]


def test_a_plan_of_roles_survives_being_written_down() -> None:
    """A checkpoint's manifest brings the same piece back."""
    piece = TensorParallel(degree=2, plan={"*.up": "column", "*.down": "row"})
    plan = build_plan(make_registry(), [piece])

    again = build_plan(make_registry(), plan=plan.to_dict())

    assert again.strategies[0].options == piece
    assert again.digest() == plan.digest()
