"""The budget of the device holds for chunks and everything else together, as a dispatch mode counts them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from colossal_core import Booster, Recompute
from colossal_core.runtime.arena import Arena
from colossal_gemini import Gemini
from colossal_testkit import run_ranks
from colossal_testkit.engine import engine_of

from .test_manager import batch, build, loss_of

NUM_ROWS = 40


class Total(TorchDispatchMode):
    """Most bytes that the chunks on a device, and all tensors that are no chunks, had together."""

    def __init__(self, device: Arena) -> None:
        """Count from now on."""
        super().__init__()  # type: ignore[no-untyped-call]  # theirs has no types
        self.peak = self.peak_of_others = 0
        self._device = device
        self._others: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation, and look at what is alive after it."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_iter((args, kwargs, result)):
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta":
                storage = leaf.untyped_storage()
                if not hasattr(storage, "colossal_held_bytes"):  # is no block of an arena
                    self._others.add(storage)
        others = sum(storage.nbytes() for storage in self._others)
        self.peak_of_others = max(self.peak_of_others, others)
        self.peak = max(self.peak, self._device.used + others)
        return result


def count(folder: Path, pieces: tuple[Any, ...], *, num_steps: int = 3) -> list[tuple[int, int, int]]:
    """Train within the least budget; return it with the most that was alive in a step, and of no chunks."""
    inputs, targets = batch(0, 0, NUM_ROWS)
    report = Gemini(device_budget="64MiB").fit(
        build(), (inputs, targets), criterion=loss_of, precision="fp64", recompute=bool(pieces)
    )
    assert report.least_budget is not None
    report.save(folder / "fit.json")
    piece = Gemini(device_budget=report.least_budget, trace=str(folder / "fit.json"))
    booster = Booster(piece, *pieces, precision="fp64")
    model = build()
    model, optimizer = booster.boost(model, torch.optim.AdamW(model.parameters(), 1e-2))
    manager: Any = engine_of(booster).manager
    found = []
    for _ in range(num_steps):
        with Total(manager.tiers.device) as total:
            loss_of(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append((report.least_budget, total.peak, total.peak_of_others))
    return found


@pytest.mark.parametrize("pieces", [(), (Recompute(),)])
def test_chunks_and_everything_else_stay_within_the_least_budget(
    pieces: tuple[Any, ...], tmp_path: Path
) -> None:
    """Activations are most of it; what is left of the budget is work space inside of operations."""
    for rank in run_ranks(count, 1, tmp_path, pieces):
        for budget, peak, others in rank:
            assert 0.95 * budget < peak <= budget
            assert others > budget // 2
