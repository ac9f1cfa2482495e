"""The plugin is found, can be chosen in every way, and computes what it says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from colossal_core import Booster, UsageError
from colossal_core.plugins import Registry
from colossal_softcap import SoftCap


def test_it_is_listed() -> None:
    """An installed plugin is enabled without further ado."""
    states = {status.name: status.state for status in Registry.discover().statuses()}

    assert states["softcap"] == "enabled"


def test_outputs_are_capped() -> None:
    """The border computes cap * tanh(outputs / cap)."""
    model, inputs = nn.Linear(3, 5), 100 * torch.ones(2, 3)
    expected = 2 * torch.tanh(model(inputs).detach() / 2)

    boosted = Booster(SoftCap(cap=2.0)).boost(model)

    torch.testing.assert_close(boosted(inputs), expected)


def test_a_plan_file_chooses_it(tmp_path: Path) -> None:
    """Options have the same names in Python and in TOML."""
    file = tmp_path / "plan.toml"
    file.write_text("[pieces.softcap]\ncap = 2.0\n", encoding="utf-8")

    outputs = Booster(plan=file).boost(nn.Linear(3, 5))(100 * torch.ones(2, 3))

    assert outputs.abs().max() <= 2


@pytest.mark.parametrize("cap", [0.0, -1.0])
def test_a_cap_that_leaves_nothing_is_refused(cap: float) -> None:
    """Wrong options end at once, with the number."""
    with pytest.raises(UsageError, match=f"cap must be above 0, got {cap!r}"):
        SoftCap(cap=cap)
