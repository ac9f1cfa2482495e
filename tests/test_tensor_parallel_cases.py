"""What went wrong where others cut layers: first values, changed vocabularies, convolutions, odd heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from colossal_core import Booster, launch
from colossal_core.errors import UsageError
from colossal_gemini import Gemini
from colossal_tensor_parallel import TensorParallel
from colossal_testkit.models import GPT
from colossal_testkit.ranks import run_ranks, run_ranks_expecting_errors
from colossal_zero import Zero

from .library_models import Outcome, build, train_on_ranks, train_serial
from .test_library_models import check

pytestmark = pytest.mark.timeout(120)  # the first import of the library takes a while on a busy machine

Weights = dict[str, torch.Tensor]


def weights_of(booster: Booster, model: nn.Module) -> Weights:
    """Return copies of all weights, whole."""
    with booster.full_parameters(model) as found:
        return {name: value.detach().clone() for name, value in found.items()}


# --- first values -------------------------------------------------------------------------------------------


class Custom(nn.Module):
    """An embedding that no plan knows, before a GPT's layers."""

    def __init__(self) -> None:
        """Make it."""
        super().__init__()
        self.scale = nn.Parameter(torch.empty(24))
        self.gpt = GPT()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the scale."""
        nn.init.normal_(self.scale, mean=1.0)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return logits, scaled along the first ones."""
        logits: torch.Tensor = self.gpt(ids)
        return torch.cat([logits[..., :24] * self.scale, logits[..., 24:]], -1)


def begin(tensor: int, place: str) -> tuple[Weights, Weights]:
    """Return the first weights of a model, whole, and what this rank holds of them."""
    launch(seed=5)
    with torch.device(place):
        model = Custom()
    booster = Booster(TensorParallel(degree=tensor))
    model = booster.boost(model)
    mine = {name: value.detach().clone() for name, value in model.named_parameters()}
    return weights_of(booster, model), mine


@pytest.mark.parametrize("place", ["cpu", "meta"])
def test_first_weights_are_the_same_on_any_number_of_ranks(place: str) -> None:
    """Cut or not, in one copy or two; and the shards of one weight are no copies of each other."""
    expected, _ = run_ranks(begin, 1, 1, place)[0]

    for num_ranks, tensor in [(2, 1), (3, 3), (4, 2)]:
        ranks = run_ranks(begin, num_ranks, tensor, place)
        for found, _ in ranks:
            assert all(torch.equal(found[name], value) for name, value in expected.items())
        cut = [name for name, value in ranks[0][1].items() if value.shape != expected[name].shape]
        assert bool(cut) == (tensor > 1)
        for name in cut:
            if "weight" in name:
                assert not torch.equal(ranks[0][1][name], ranks[1][1][name]), name


# --- vocabularies that were changed -------------------------------------------------------------------------


def train_resized(pieces: tuple[object, ...]) -> Outcome:
    """Train a GPT-2 whose vocabulary grew by three, on this rank and the others."""
    return train_on_ranks("gpt2", pieces, "forward_backward", vocab_size=64, resized=67)


@pytest.mark.parametrize(
    ("num_ranks", "pieces"),
    [
        (2, (TensorParallel(degree=2),)),
        (2, (Zero(stage=3),)),
        (2, (Gemini(),)),
        (4, (TensorParallel(degree=2), Zero(stage=3))),
    ],
    ids=["tensor", "zero3", "gemini", "both"],
)
def test_a_vocabulary_may_be_resized_before_boost(num_ranks: int, pieces: tuple[object, ...]) -> None:
    """The new rows are the same on all ranks, and train as on one process."""
    expected = run_ranks(
        train_serial, 1, "gpt2", vocab_size=64, resized=67, process_group=False, timeout_seconds=100
    )[0]
    assert expected.weights["transformer.wte.weight"].shape == (67, 12)

    for found in run_ranks(train_resized, num_ranks, pieces, timeout_seconds=100):
        check(expected, found, loss_tolerance=1e-6)


# --- convolutions -------------------------------------------------------------------------------------------


class Pictures(nn.Module):
    """Convolutions with batch statistics, then layers that are cut."""

    def __init__(self) -> None:
        """Make them."""
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.up, self.down = nn.Linear(128, 12), nn.Linear(12, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map ``[batch, 3, 8, 8]`` to ``[batch, 5]``."""
        hidden = self.second(F.relu(self.norm(self.first(images))))
        outputs: torch.Tensor = self.down(F.gelu(self.up(F.max_pool2d(hidden, 2).flatten(1))))
        return outputs


def build_pictures() -> tuple[nn.Module, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Return a model and three batches."""
    torch.manual_seed(3)
    model = Pictures().double()
    shapes = [((6, 3, 8, 8), (6, 5))] * 3
    return model, [(torch.randn(x).double(), torch.randn(y).double()) for x, y in shapes]


def train_pictures(plan: dict[str, str] | None) -> tuple[Weights, Weights, int]:
    """Train on this rank; returns weights, buffers, and how many elements it holds."""
    model, batches = build_pictures()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.02)
    booster = Booster(TensorParallel(degree=2, plan=plan), precision="fp64")
    model, optimizer = booster.boost(model, optimizer)
    for batch in batches:
        booster.forward_backward(model, batch, nn.MSELoss())
        optimizer.step()
        optimizer.zero_grad()
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    return weights_of(booster, model), buffers, sum(value.numel() for value in model.parameters())


def test_convolutions_stay_whole_among_layers_that_are_cut() -> None:
    """Weights and running statistics are those of one process."""
    model, batches = build_pictures()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for images, target in batches:
        F.mse_loss(model(images), target).backward()
        optimizer.step()
        optimizer.zero_grad()

    for weights, buffers, num_held in run_ranks(train_pictures, 2, None):
        assert num_held < sum(value.numel() for value in model.parameters())
        for name, value in model.state_dict().items():
            found = weights[name] if name in weights else buffers[name]
            assert torch.allclose(found.double(), value.double(), rtol=0, atol=1e-10), name


def test_a_plan_that_would_cut_a_convolution_is_refused_by_name() -> None:
    """Before anything is cut, on every rank."""
    plan = {"first": "column"}
    for error in run_ranks_expecting_errors(train_pictures, 2, plan, error=UsageError):
        assert "but 'first', a Conv2d, which cannot be cut" in str(error)


# --- heads that do not divide -------------------------------------------------------------------------------


def train_with_heads(pieces: tuple[object, ...]) -> Outcome:
    """Train a vision transformer of three heads."""
    return train_on_ranks("vit", pieces, "forward_backward", num_attention_heads=3)


@pytest.mark.parametrize("pieces", [(Zero(stage=1),), (Gemini(),)], ids=["zero1", "gemini"])
def test_three_heads_on_two_ranks_are_exact_where_layers_are_whole(pieces: tuple[object, ...]) -> None:
    """Nothing of them is divided by heads."""
    expected = run_ranks(
        train_serial, 1, "vit", num_attention_heads=3, process_group=False, timeout_seconds=100
    )[0]

    for found in run_ranks(train_with_heads, 2, pieces, timeout_seconds=100):
        check(expected, found, loss_tolerance=1e-6)


def test_three_heads_cannot_be_cut_among_two_ranks() -> None:
    """The attribute, its value and the degrees that are legal are named, on every rank."""
    pieces = (TensorParallel(degree=2),)
    for error in run_ranks_expecting_errors(train_with_heads, 2, pieces, error=UsageError):
        assert "3 heads (vit.layers.0.attention.num_attention_heads)" in str(error)
        assert "legal degrees are 1, 3" in str(error)


# --- weights of files ---------------------------------------------------------------------------------------


def read_own_boxes(name: str, folder: str) -> tuple[int, int, Weights]:
    """Build without memory, cut, and read; returns bytes read, bytes held, and all weights."""
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            model = build(name, is_random=False)
    finally:
        torch.set_default_dtype(torch.float32)
    booster = Booster(TensorParallel(degree=2), precision="fp64")
    model = booster.boost(model)
    report = booster.import_weights(model, folder)
    held = sum(value.numel() * value.element_size() for value in model.parameters())
    return report.bytes_read, held, weights_of(booster, model)


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_ranks_read_their_boxes_of_the_librarys_files(name: str, tmp_path: Path) -> None:
    """Also those of experts, which files hold one by one and the model stacked."""
    model: Any = build(name)
    model.save_pretrained(tmp_path)

    for num_read, num_held, weights in run_ranks(read_own_boxes, 2, name, str(tmp_path), timeout_seconds=100):
        assert num_read <= 1.05 * num_held
        assert num_held < 0.75 * sum(value.numel() * 8 for value in model.parameters())
        for key, value in model.named_parameters():
            assert torch.equal(weights[key], value.detach()), key
