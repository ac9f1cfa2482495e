"""The contract that every strategy passes: it decides without side effects, tells the truth, and is exact."""

from __future__ import annotations

from typing import Any

import attrs
import torch

from colossal_softcap import SoftCap
from colossal_testkit.contracts import StrategyContract
from colossal_testkit.models import Workload


def cap_outputs(workload: Workload) -> Workload:
    """Do in one plain process what the strategy adds to a model."""

    def criterion(outputs: torch.Tensor, target: Any) -> torch.Tensor:
        """Cap outputs before the loss sees them."""
        return workload.criterion(2 * torch.tanh(outputs / 2), target)

    return attrs.evolve(workload, criterion=criterion)


class TestSoftCap(StrategyContract):
    """Tests come with the base class; here is only what it cannot know."""

    adapt = staticmethod(cap_outputs)

    def make_piece(self) -> object:
        """Return the options under test."""
        return SoftCap(cap=2.0)
