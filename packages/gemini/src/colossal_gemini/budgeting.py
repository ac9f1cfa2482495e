"""The tiers that options ask for on this machine, and what of them training may take."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import torch

from colossal_core.runtime.arena import Arena, is_limited, map_large_blocks
from colossal_gemini.contents import Tiers
from colossal_gemini.costs import Budgets, Rates
from colossal_gemini.disk import Disk
from colossal_gemini.rates import measure_compute, measure_rates, measure_update

if TYPE_CHECKING:
    from colossal_gemini.options import Gemini

__all__ = ["NO_LIMIT", "budgets_of", "disk_budget", "make_tiers", "measure"]

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


def budgets_of(options: Gemini, device: torch.device, disk: int | None) -> Budgets:
    """Return what training may take of each tier on this machine.

    Without a budget of an accelerator that is what it has free, with what torch has taken of it: for the
    model, which moves into chunks, or to give out again.

    Args:
        options: Budgets, where the user gave them.
        device: Where models compute.
        disk: Bytes of files: None for no limit, 0 for no files.
    """
    if options.device_budget is not None:
        return Budgets(device=options.device_budget, host=options.host_budget, disk=disk)
    if device.type == "cpu":
        return Budgets(device=options.host_budget or NO_LIMIT, host=0, disk=disk)
    module = torch.get_device_module(device)
    free, _ = module.mem_get_info(device)
    return Budgets(device=free + module.memory_reserved(device), host=options.host_budget, disk=disk)


def disk_budget(options: Gemini) -> int | None:
    """Return the bytes that are free for files: None where the folder is not there, 0 where none is named."""
    folder = None if options.disk is None else Path(options.disk)
    if folder is None:
        return 0
    return shutil.disk_usage(folder).free if folder.is_dir() else None


def measure(options: Gemini, device: torch.device) -> Rates:
    """Return the rates of this machine; between ranks, those of :class:`Rates`.

    Args:
        options: Which tiers there are; their budgets do not matter.
        device: Where models compute.
    """
    tiers = make_tiers(attrs.evolve(options, host_budget=None), device)
    tiers.device.budget = None
    try:
        ways = measure_rates(tiers)
    finally:
        tiers.close()
    found = {
        "device_host": min(
            (ways[way] for way in (("device", "host"), ("host", "device")) if way in ways), default=None
        ),
        "host_disk": min(
            (ways[way] for way in (("host", "disk"), ("disk", "host")) if way in ways), default=None
        ),
        "host_update": measure_update(torch.device("cpu")),
        "device_update": measure_update(device),
        "compute": measure_compute(device),
    }
    return attrs.evolve(Rates(), **{name: rate for name, rate in found.items() if rate is not None})
