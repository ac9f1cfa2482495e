"""The tiers that options ask for on this machine, and what of them training may take."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from colossal_core.runtime.arena import Arena, is_limited, map_large_blocks
from colossal_gemini.contents import Tiers
from colossal_gemini.costs import Budgets
from colossal_gemini.disk import Disk

if TYPE_CHECKING:
    from colossal_gemini.options import Gemini

__all__ = ["make_tiers", "tier_budgets"]

NO_LIMIT = 1 << 62
"""Bytes of a device whose budget is unknown: nothing on a machine without accelerator enforces one."""


def make_tiers(options: Gemini, device: torch.device) -> Tiers:
    """Return arenas and files for the options.

    Args:
        options: Budgets, and where files go.
        device: Where models compute. On the CPU, a device budget makes a second arena stand in for a device.
    """
    if is_limited():
        map_large_blocks()
    is_remote = device.type != "cpu"
    host = Arena("host", budget=options.host_budget, is_pinned=device.type == "cuda")
    disk = None if options.disk is None else Disk(options.disk)
    if not is_remote and options.device_budget is None:
        return Tiers(host, disk=disk)
    return Tiers(Arena("device", budget=options.device_budget, device=device), host, disk)


def tier_budgets(tiers: Tiers, options: Gemini) -> Budgets:
    """Return what training may take of each tier."""
    disk = 0 if tiers.disk is None else tiers.disk.budget
    if tiers.device is tiers.host:
        return Budgets(device=options.host_budget or NO_LIMIT, host=0, disk=disk)
    budget = options.device_budget
    if budget is None:
        free, _ = torch.cuda.mem_get_info(tiers.device.device)
        budget = free + torch.cuda.memory_allocated(tiers.device.device)
    return Budgets(device=budget, host=options.host_budget, disk=disk)
