"""Rates between tiers are measured without leaving a trace."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from colossal_core.runtime.arena import Arena
from colossal_gemini import Gemini
from colossal_gemini.contents import Tiers
from colossal_gemini.costs import Rates
from colossal_gemini.disk import Disk
from colossal_gemini.rates import measure_rates


def test_every_way_is_measured_and_nothing_stays(tmp_path: Path) -> None:
    """Six ways between three tiers; counters and room are as they were."""
    tiers = Tiers(Arena("device"), Arena("host"), Disk(tmp_path))
    tiers.moved["host", "disk"] = 7

    rates = measure_rates(tiers, num_bytes=1 << 20)

    names = ("device", "host", "disk")
    assert set(rates) == {(one, other) for one in names for other in names if one != other}
    assert all(rate > 1e6 for rate in rates.values())
    assert tiers.moved == {("host", "disk"): 7}
    assert [tier.used for tier in tiers.ordered] == [0, 0, 0]
    tiers.close()


def test_tiers_without_room_are_left_out(tmp_path: Path) -> None:
    """A device that is too small to measure has no rate."""
    tiers = Tiers(Arena("device", budget=100), Arena("host"), Disk(tmp_path))

    rates = measure_rates(tiers, num_bytes=1 << 16)

    assert set(rates) == {("host", "disk"), ("disk", "host")}
    tiers.close()


def test_a_report_can_be_estimated_with_the_rates_of_this_machine(tmp_path: Path) -> None:
    """Whatever the budgets are; what lies between ranks is as by default."""
    batch, defaults = (torch.ones(2, 8), torch.ones(2, 8)), Rates()
    options = Gemini(device_budget="1KiB", host_budget="1KiB", disk=str(tmp_path))

    rates = options.fit(nn.Linear(8, 8), batch, criterion=nn.MSELoss(), rates="measured").rates

    assert rates.gather == defaults.gather
    for name in ("device_host", "host_disk", "host_update", "device_update", "compute"):
        assert getattr(rates, name) not in {0, getattr(defaults, name)}
    assert not list(tmp_path.iterdir())
