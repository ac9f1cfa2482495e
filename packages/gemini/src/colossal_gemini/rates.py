"""How fast bytes move between tiers, and how fast what uses them is, measured on this machine."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable

import torch

from colossal_core.errors import MemoryBudgetError
from colossal_core.runtime.arena import Arena
from colossal_gemini.contents import Content, Tier, Tiers

__all__ = ["measure_compute", "measure_rates", "measure_update"]

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
            _wait(target.device if isinstance(target, Arena) else torch.device("cpu"))
            samples.append(time.perf_counter() - start)
            content.settle()
        return statistics.median(samples)
    finally:
        content.close()


def measure_update(device: torch.device, *, numel: int = 1 << 21) -> float:
    """Return the bytes per second that an update in fp32 reads and writes: values, gradient, two moments."""
    weight = torch.nn.Parameter(torch.zeros(numel, device=device))
    weight.grad = torch.zeros_like(weight)
    optimizer = torch.optim.AdamW([weight], fused=True)
    optimizer.step()
    return 7 * weight.nbytes / _median(optimizer.step, device)  # three are read and written, one is read


def measure_compute(device: torch.device, *, width: int = 768) -> float:
    """Return the floating point operations per second of a product of matrices: in bf16 on accelerators."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    matrix = torch.zeros(width, width, dtype=dtype, device=device)
    return 2 * width**3 / _median(lambda: torch.mm(matrix, matrix), device)


def _median(call: Callable[[], object], device: torch.device) -> float:
    """Return the median of the seconds that a call takes, after a first one."""
    call()
    samples = []
    for _ in range(_SAMPLES):
        _wait(device)
        start = time.perf_counter()
        call()
        _wait(device)
        samples.append(time.perf_counter() - start)
    return statistics.median(samples)


def _wait(device: torch.device) -> None:
    """Wait until a device has done what it was told."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
