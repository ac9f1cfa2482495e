"""Classify images of handwritten digits: ``colossal run --nproc 2 examples/classify_digits.py``.

The loader is boosted, so ``batch_size`` is that of all processes together; batch statistics are those of the
whole batch, and the accuracy is that of the whole test set.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

from colossal_core import Booster, launch


def make_network() -> nn.Module:
    """Return a network from images ``[n, 1, 8, 8]`` to logits ``[n, 10]``."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 10),
    )


def main() -> None:
    """Train, and count right answers after each epoch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()

    launch()
    digits = load_digits()
    images, labels = torch.tensor(digits.images).float()[:, None] / 16, torch.tensor(digits.target)
    train, test = TensorDataset(images[:1400], labels[:1400]), TensorDataset(images[1400:], labels[1400:])
    loader, test_loader = DataLoader(train, batch_size=64, shuffle=True), DataLoader(test, batch_size=100)
    model = make_network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = OneCycleLR(optimizer, 1e-2, options.epochs * len(loader) + 1)
    booster = Booster()
    model, optimizer, scheduler, loader, test_loader = booster.boost(
        model, optimizer, scheduler, loader, test_loader
    )

    for epoch in range(1, options.epochs + 1):
        for images, labels in loader:
            loss = booster.forward_backward(model, (images, labels), F.cross_entropy)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        num_right, total_loss = 0, 0.0
        for images, labels in test_loader:
            loss, logits = booster.evaluate(model, (images, labels), F.cross_entropy, return_outputs=True)
            guesses, answers = booster.gather((logits.argmax(1), labels))  # of all processes
            num_right += int((guesses == answers).sum())
            total_loss += loss.item() * len(answers)
        mean_loss = total_loss / len(test)
        booster.print(f"epoch {epoch}: {num_right} of {len(test)} right, test loss {mean_loss:.3f}")


if __name__ == "__main__":
    main()
