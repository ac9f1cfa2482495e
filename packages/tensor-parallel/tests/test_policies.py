"""Plugins of others say how models of their classes are cut; users go before them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attrs import evolve
from torch import nn

from colossal_core.errors import PluginError, UsageError
from colossal_core.plugins import Registry, ShardingPolicySpec, hookimpl
from colossal_tensor_parallel import TensorParallel, explain, plugin
from colossal_testkit.models import Workload, build_workload, randomise
from colossal_testkit.parity import Recipe, check_parity


class Tower(nn.Module):
    """Two layers that feed each other, and one that is small."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.calibration = nn.Linear(7, 10), nn.Linear(10, 7), nn.Linear(7, 7)

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        """Map ``[batch, 7]`` to the same shape."""
        added: torch.Tensor = self.calibration(samples + self.down(torch.tanh(self.up(samples))))
        return added


class Ranker(nn.Module):
    """Two towers and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = Tower(), Tower(), nn.Linear(7, 3)

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        """Map ``[batch, 7]`` to ``[batch, 3]``."""
        scores: torch.Tensor = self.head(F.relu(self.second(self.first(samples))))
        return scores


class Finetuned(Ranker):
    """A subclass of somebody else."""


class Acme:
    """A third party's plugin: a policy for towers, wherever they are."""

    def __init__(self, plan: Mapping[str, str], models: tuple[str, ...] = (f"{__name__}:Tower",)) -> None:
        self._plan, self._models = plan, models

    @hookimpl
    def colossal_register_sharding_policies(self) -> Any:
        """Offer it."""
        yield ShardingPolicySpec(name="towers", summary="Cut towers.", models=self._models, plan=self._plan)


WHOLE = {"up": "column", "down": "row", "calibration": "whole"}
GATHERED = {"up": "gathered-column", "down": "gathered-column"}


def make_registry() -> Registry:
    """Return a registry with the policy of the third party."""
    return Registry.isolated({"tensor-parallel": plugin, "acme": Acme(WHOLE)})


def decide(*others: object, plan: Mapping[str, str] | None = None) -> dict[str, tuple[str, str]]:
    """Return decisions and reasons about layers of a ranker."""
    plugins = {"tensor-parallel": plugin, **{f"acme{number}": it for number, it in enumerate(others)}}
    found = explain(Finetuned(), 2, plan=plan, registry=Registry.isolated(plugins))
    return {row.module: (row.decision, row.reason) for row in found.rows}


def test_policies_decide_about_modules_of_their_classes() -> None:
    """What the policy does not speak of, the head, is decided as ever; reasons name the policy."""
    without, found = decide(), decide(Acme(WHOLE))

    assert without["first.calibration"][0] == "gathered-column"
    assert found["second.calibration"] == ("whole", "the policy 'acme0:towers' says so")
    assert found["first.up"][0] == "column"
    assert found["first.up"][1].startswith("the policy 'acme0:towers' says so, proved")
    assert found["head"][0] == "gathered-column"


def test_policies_for_a_class_hold_for_its_subclasses_and_users_go_before() -> None:
    """Patterns begin at the module that the policy is for."""
    acme = Acme({"*.calibration": "whole", "first.up": "gathered-column"}, (f"{__name__}:Ranker",))

    found = decide(acme, plan={"second.calibration": "gathered-column"})

    assert found["first.calibration"][0] == "whole"
    assert found["second.calibration"][0] == found["first.up"][0] == "gathered-column"
    assert found["second.up"][0] == "column"


@pytest.mark.parametrize(
    ("others", "text"),
    [
        (
            (Acme({"qkv": "column:3"}),),
            r"'qkv' of the policy 'acme0:towers' .* no layer of this Tower",
        ),
        ((Acme({"up": "sideways"}),), r"plan\['up'\] of the policy 'acme0:towers' is 'sideways'"),
        ((Acme({"up": "row"}),), r"the policy 'acme0:towers' wants 'first.up' to be 'row', which it cannot"),
        (
            (Acme(WHOLE), Acme(GATHERED)),
            r"acme0:towers' wants 'first.up' .* 'acme1:towers'",
        ),
    ],
)
def test_policies_that_cannot_be_followed_are_named(others: tuple[object, ...], text: str) -> None:
    """Patterns that match nothing, words that are no roles, wishes that change numbers, and disagreements."""
    with pytest.raises(UsageError, match=text):
        decide(*others)


def test_records_that_say_nothing_are_refused() -> None:
    """A path without a class, and a plan without patterns."""
    fields: dict[str, Any] = {
        "name": "mine",
        "summary": "Mine.",
        "models": ("a:C",),
        "plan": {"*": "whole"},
    }

    changes: list[dict[str, Any]] = [{"models": ("a.C",)}, {"models": ()}, {"plan": {}}, {"plan": {"*": 3}}]
    for change in changes:
        with pytest.raises(PluginError, match="ShardingPolicySpec: "):
            ShardingPolicySpec(**{**fields, **change})


def build() -> Workload:
    """Return a run of a ranker."""
    work = build_workload("mlp", num_steps=3)
    model = Ranker().double()
    randomise(model, seed=4)
    return evolve(work, model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.01))


def test_training_by_a_policy_equals_one_process() -> None:
    """The Booster asks its registry."""
    pieces = [TensorParallel(degree=2)]

    check_parity(Recipe(builder=build), nproc=2, pieces=pieces, registry=make_registry)
