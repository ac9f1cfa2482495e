"""A cut model that is released is whole on every rank, and so are the states of the user's own optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from colossal_testkit.parity import boost_workload, share_of, train_serial
from colossal_testkit.ranks import run_ranks

from .strategy_cases import CASES, Case, make_registry

NAMES = ("qkv-4-shared-kv", "stages-2-x-data-2", "vocabulary-3-x-data-2", "features-3")


def train_and_release(case: Case) -> dict[str, dict[str, torch.Tensor]]:
    """Train, release, and return values and moments by name, as the user's own objects have them."""
    booster, work = boost_workload(case.recipe(), (), case.settings, make_registry)
    model, boosted = work.model, work.optimizer
    for batch in work.batches:
        inputs, target = share_of(batch, booster.data_rank, booster.data_degree, equal=True)
        work.criterion(model(inputs), target).backward()
        boosted.step()
        boosted.zero_grad()
    user: Any = getattr(boosted, "user")  # noqa: B009 - of the Booster's own class
    booster.release(model)
    found: dict[str, dict[str, torch.Tensor]] = {"value": {}, "exp_avg": {}}
    for name, parameter in model.named_parameters():
        found["value"][name] = parameter.detach()
        if "exp_avg" in user.state.get(parameter, {}):
            found["exp_avg"][name] = user.state[parameter]["exp_avg"]
    return found


@pytest.mark.parametrize("name", NAMES)
def test_released_parameters_and_moments_are_whole(name: str) -> None:
    """Shapes and values are those of one process, the same bits everywhere, also where a rank had nothing."""
    (case,) = (case for case in CASES if case.name == name)
    expected = dict(train_serial(case.recipe()).slabs)

    ranks = run_ranks(train_and_release, case.nproc, case)

    for found in ranks:
        assert found["value"].keys() == expected.keys()
        for key, (slab,) in expected.items():
            assert torch.allclose(found["value"][key], slab.values, atol=1e-9), key
        for key, moment in found["exp_avg"].items():
            assert moment.shape == found["value"][key].shape
            assert torch.equal(moment, ranks[0]["exp_avg"][key])
