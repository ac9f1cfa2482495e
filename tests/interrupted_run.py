"""A run that saves at every step, now or beside training, and goes on from what it finds: RESULT ROOT STEPS.

Writes its losses to RESULT when it is over. Every batch, dropout mask and rate depends on what came before.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from colossal_core import Booster, launch

PAUSE_SECONDS = 0.02
"""Sleep in each step, so that who interrupts the run finds it training."""


def main() -> None:
    """Train."""
    result, root, steps = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    launch()
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(40, 64), nn.Dropout(0.3), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    dataset = TensorDataset(torch.randn(53, 40), torch.randint(0, 4, (53,)))
    booster = Booster(max_grad_norm=1.0)
    model, optimizer, scheduler, loader = booster.boost(
        model, optimizer, scheduler, DataLoader(dataset, batch_size=8, shuffle=True)
    )
    loaded = booster.load(root, missing_ok=True)
    losses = loaded.extra if loaded is not None else []
    booster.save_on_signal(root, extra=lambda: losses)
    booster.print(f"training from step {booster.step}", flush=True)
    while booster.step < steps:
        for samples, targets in loader:
            loss = booster.forward_backward(model, (samples, targets), F.cross_entropy)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(float(loss))
            booster.save(root, extra=losses, keep=2, asynchronous=booster.step % 3 != 0)
            time.sleep(PAUSE_SECONDS)
            if booster.step == steps:
                break
    booster.wait_for_save()
    if booster.is_first:
        result.write_text(json.dumps(losses), encoding="utf-8")


if __name__ == "__main__":
    main()
