"""Dropout under tensor parallelism: common where values are common, each rank's own where they are cut."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from colossal_core import Booster, Recompute
from colossal_tensor_parallel import TensorParallel
from colossal_testkit.ranks import run_ranks

from .registries import make_registry


class Dropping(nn.Module):
    """Heads whose values are dropped, and a residual that is dropped too; masks are kept to be looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.up = nn.Linear(6, 16)
        self.inside = nn.Dropout(0.5)
        self.down = nn.Linear(16, 6)
        self.outside = nn.Dropout(0.5)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map ``[..., 6]`` to the same shape."""
        features = self.up(hidden)
        features = features * self.inside(torch.ones_like(features))
        outputs: torch.Tensor = hidden + self.outside(self.down(features))
        return outputs


class Adapted(Dropping):
    """A dropout of common values between the cut layers, as adapters have."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map ``[..., 6]`` to the same shape."""
        features = F.gelu(self.up(hidden))
        common = self.outside(hidden)
        outputs: torch.Tensor = common + self.down(self.inside(features))
        return outputs


def watch_masks(kind: type[Dropping], num_calls: int) -> list[dict[str, torch.Tensor]]:
    """Return the masks of some calls on this rank, and the outputs."""
    torch.manual_seed(5)
    model = nn.Sequential(kind(), kind()).double()
    booster = Booster(TensorParallel(degree=2), precision="fp64", registry=make_registry())
    model, _ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    masks: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(
                lambda _, args, out, name=name: masks.__setitem__(name, (out != 0) | (args[0] == 0))
            )
    found = []
    for call in range(num_calls):
        torch.manual_seed(100 + call)
        outputs = model(torch.ones(40, 6, dtype=torch.float64))
        found.append({**masks, "outputs": outputs.detach(), "state": torch.get_rng_state()})
    return found


def test_cut_values_are_dropped_by_each_rank_for_itself() -> None:
    """Masks of cut features differ between ranks; other masks and later draws do not; a seed repeats all."""
    first, second = run_ranks(watch_masks, 4, Dropping, 2)[:2]
    again = run_ranks(watch_masks, 4, Dropping, 2)[0]

    for mine, other, repeated in zip(first, second, again, strict=True):
        for layer in ("0", "1"):
            assert not torch.equal(mine[f"{layer}.inside"], other[f"{layer}.inside"])
            assert torch.equal(mine[f"{layer}.outside"], other[f"{layer}.outside"])
        assert not torch.equal(mine["0.inside"], mine["1.inside"])
        assert torch.equal(mine["outputs"], other["outputs"])
        assert torch.equal(mine["state"], other["state"])
        assert all(torch.equal(mine[key], repeated[key]) for key in mine)
    assert not torch.equal(first[0]["0.inside"], first[1]["0.inside"])


def test_common_values_between_cut_layers_are_dropped_alike() -> None:
    """Where both kinds of dropout lie between the layers, ranks draw alike: none of them may drift away."""
    first, second = run_ranks(watch_masks, 2, Adapted, 1)

    assert torch.equal(first[0]["outputs"], second[0]["outputs"])
    assert torch.equal(first[0]["0.outside"], second[0]["0.outside"])


def train_recomputed(recomputes: bool) -> list[torch.Tensor]:  # noqa: FBT001 - a message to ranks
    """Return the gradients of one step with dropout, on this rank."""
    torch.manual_seed(5)
    model = nn.Sequential(Dropping(), Dropping()).double()
    pieces = [TensorParallel(degree=2), *([Recompute()] if recomputes else [])]
    booster = Booster(*pieces, precision="fp64", registry=make_registry())
    model, _ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    torch.manual_seed(7)
    model(torch.ones(3, 6, dtype=torch.float64)).square().sum().backward()
    with booster.full_gradients(model) as shown:
        return [gradient.clone() for gradient in shown.values()]


def test_recomputed_blocks_draw_the_same_masks_again() -> None:
    """Gradients are the same bits with and without recomputation."""
    plain, recomputed = (run_ranks(train_recomputed, 2, kind)[1] for kind in (False, True))

    assert all(torch.equal(mine, other) for mine, other in zip(plain, recomputed, strict=True))
