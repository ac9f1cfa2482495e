"""Options: names, presets, refusals, and what `estimate` says without allocating anything."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import nn

from colossal_core import Booster, PlanError, UsageError
from colossal_testkit.models import GPT
from colossal_zero import Zero

Stage = Literal[1, 2, 3]


@pytest.mark.parametrize(
    "options", [{"stage": 4}, {"stage": True}, {"stage": 1, "replicas": 0}, {"stage": 1, "gather": "never"}]
)
def test_wrong_options_are_refused_with_the_value(options: dict[str, Any]) -> None:
    """A stage is 1, 2 or 3; copies are counted from 1."""
    with pytest.raises(UsageError, match="got"):
        Zero(**options)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_name_presets_its_stage(stage: Stage) -> None:
    """``"zero2"`` and ``Zero(stage=2)`` are the same piece."""
    by_name, by_object = Booster(f"zero{stage}"), Booster(Zero(stage=stage))

    assert by_name.plan.digest() == by_object.plan.digest()


def test_a_preset_stage_cannot_be_given() -> None:
    """A plan that says zero2 and stage 3 contradicts itself."""
    with pytest.raises(PlanError, match="stage"):
        Booster(plan={"memory": {"manager": "zero2", "stage": 3}})


@pytest.mark.parametrize(
    ("stage", "bytes_per_element"),
    [(1, lambda ranks: 4 + 12 / ranks), (2, lambda ranks: 2 + 14 / ranks), (3, lambda ranks: 16 / ranks)],
)
def test_estimate_is_the_formula_of_the_paper(stage: Stage, bytes_per_element: object) -> None:
    """In bf16 with Adam, to a hundredth, on 8 ranks and without any memory."""
    assert callable(bytes_per_element)
    with torch.device("meta"):
        model = GPT(width=192, vocabulary=512)
    numel = sum(parameter.numel() for parameter in model.parameters())

    found = Zero(stage=stage).estimate(model, ranks=8, precision="bf16")

    assert sum(found.values()) == pytest.approx(bytes_per_element(8) * numel, rel=0.01)


def test_estimate_divides_by_the_ranks_of_one_copy() -> None:
    """Two copies on 8 ranks hold what one copy does on 4."""
    model = nn.Linear(64, 64)

    copied = Zero(stage=2, replicas=2).estimate(model, ranks=8)
    single = Zero(stage=2).estimate(model, ranks=4)

    assert copied == single


def test_gathering_in_forward_means_nothing_in_stage_3() -> None:
    """A setting that has no effect is refused."""
    with pytest.raises(UsageError, match="no effect"):
        Zero(stage=3, gather="forward")


def test_copies_have_to_divide_the_ranks() -> None:
    """Six ranks are not four copies."""
    with pytest.raises(UsageError, match="6 data ranks"):
        Zero(stage=1, replicas=4).estimate(nn.Linear(2, 2), ranks=6)
