"""How fast bytes move between tiers, measured on this machine."""

from __future__ import annotations

import contextlib
import statistics
import time

import torch

from colossal_core.errors import MemoryBudgetError
from colossal_core.runtime.arena import Arena
from colossal_gemini.contents import Content, Tier, Tiers

__all__ = ["measure_rates"]

_SAMPLES = 5
_NUM_BYTES = 8 << 20
"""Two blocks of the disk tier, and more than the caches of one core: rates are those of chunks."""


def measure_rates(tiers: Tiers, *, num_bytes: int = _NUM_BYTES) -> dict[tuple[str, str], float]:
    """Move a few MiB between each two tiers, and return the rates.

    Nothing else should be in transfer. What is counted in ``tiers.moved`` is left as it was.

    Args:
        tiers: The tiers, with room for ``num_bytes`` each; pairs that have none are left out.
        num_bytes: What is moved at a time.

    Returns:
        Bytes per second by the names of the tiers from and to which they are moved, medians of five.
        Ways through host memory are included, and as slow as that is.
    """
    before = dict(tiers.moved)
    rates = {}
    for source in tiers.ordered:
        for target in tiers.ordered:
            if source is not target:
                with contextlib.suppress(MemoryBudgetError):
                    seconds = _measure(tiers, source, target, num_bytes)
                    rates[source.name, target.name] = num_bytes / seconds
    tiers.moved = before
    return rates


def _measure(tiers: Tiers, source: Tier, target: Tier, num_bytes: int) -> float:
    """Return the median of the seconds that one way takes."""
    content = Content(tiers, num_bytes, torch.uint8, home=source, name="measurement")
    try:
        first = source if isinstance(source, Arena) else tiers.host
        content.touch(first)
        content.tensor_in(first).fill_(1)
        content.wrote(first)
        content.settle()
        samples = []
        for _ in range(_SAMPLES):
            start = time.perf_counter()
            content.bring(target)
            _wait_for(target)
            samples.append(time.perf_counter() - start)
            content.settle()
        return statistics.median(samples)
    finally:
        content.close()


def _wait_for(tier: Tier) -> None:
    """Wait until a device has done what it was told."""
    if isinstance(tier, Arena) and tier.device.type != "cpu":
        torch.get_device_module(tier.device).synchronize()
