"""Let two networks play for images of digits: ``colossal run --nproc 2 examples/gan_digits.py``.

Two models with an optimizer each go into one ``boost``. The critic is trained with a gradient penalty
(Gulrajani et al., *Improved Training of Wasserstein GANs*, 2017), which ``booster.backward`` makes right in
every precision. Shapes: B images, P pixels, Z numbers of noise.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from colossal_core import Booster, launch

NOISE, PIXELS, BATCH = 16, 64, 64
SHADES = " .:-=+*#%@"


def perceptron(first: int, last: int) -> nn.Sequential:
    """Return a network of two hidden layers from ``first`` numbers to ``last``."""
    return nn.Sequential(
        nn.Linear(first, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, last)
    )


def gradient_penalty(critic: nn.Module, real_BP: Tensor, fake_BP: Tensor) -> Tensor:
    """Return how far the critic's slope between real and fake images is from 1."""
    mixed_BP = torch.lerp(real_BP, fake_BP, torch.rand_like(real_BP[:, :1])).requires_grad_()
    slope_BP: Tensor
    (slope_BP,) = torch.autograd.grad(critic(mixed_BP).sum(), mixed_BP, create_graph=True)
    return (slope_BP.norm(dim=1) - 1).square().mean()


def draw(image_P: Tensor) -> str:
    """Return an image as text."""
    shades = ((image_P + 1) / 2 * (len(SHADES) - 1)).clamp(0, len(SHADES) - 1).round().int().view(8, 8)
    return "\n".join("".join(SHADES[shade] * 2 for shade in row) for row in shades.tolist())


def main() -> None:
    """Train both, and draw what the generator has learnt."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=60)
    options = parser.parse_args()

    world = launch()
    generator, critic = nn.Sequential(perceptron(NOISE, PIXELS), nn.Tanh()), perceptron(PIXELS, 1)
    learns = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.0, 0.9))
    judges = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.0, 0.9))
    images = TensorDataset(torch.tensor(load_digits().data).float() / 8 - 1)
    loader = DataLoader(images, batch_size=BATCH, shuffle=True, drop_last=True)
    # What all processes draw alike is drawn before boost; from then on each draws its own noise.
    noise_for_show = torch.randn(1, NOISE).to(world.device)
    booster = Booster()
    generator, critic, learns, judges, loader = booster.boost(generator, critic, learns, judges, loader)

    for epoch in range(1, options.epochs + 1):
        distances = []
        for step, (real_BP,) in enumerate(loader, 1):
            fake_BP = generator(torch.randn(len(real_BP), NOISE, device=world.device))
            distance = critic(real_BP).mean() - critic(fake_BP.detach()).mean()
            distances.append(distance.item())
            judges.zero_grad()  # also what the generator's loss left in the critic
            booster.backward(10 * gradient_penalty(critic, real_BP, fake_BP.detach()) - distance)
            judges.step()
            if step % 2 == 0:
                learns.zero_grad()
                booster.backward(-critic(fake_BP).mean())
                learns.step()
        mean = booster.mean(sum(distances) / len(distances))  # of all processes, so each has to call it
        if epoch % 10 == 0 or epoch == options.epochs:
            booster.print(f"epoch {epoch}: distance {mean:.3f}")
    booster.print(draw(generator(noise_for_show)[0].detach()))


if __name__ == "__main__":
    main()
