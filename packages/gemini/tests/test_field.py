"""What users of chunked memory met elsewhere: odd sizes, frozen layers, old weights, ties, placements."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from colossal_core import Booster, Recompute
from colossal_core.runtime.precision import Precision
from colossal_gemini import Gemini
from colossal_gemini.layout import lay_out
from colossal_gemini.manager import GeminiManager
from colossal_gemini.trace import Chunk
from colossal_testkit import run_ranks, run_ranks_expecting_errors
from colossal_testkit.engine import engine_of
from colossal_testkit.models import GPT, TokenLoss
from colossal_testkit.stories import assert_close, batch_of

STEPS = 3

Found = tuple[list[float], dict[str, torch.Tensor]]
"""Gradient norms and weights."""


def make_mlp(trainable: str = "all") -> nn.Module:
    """Return blocks of prime widths; all of them trainable, one in the middle, the last layer, or none."""
    torch.manual_seed(3)
    blocks = (nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 7)) for _ in range(3))
    model = nn.Sequential(nn.Linear(5, 7), nn.Sequential(*blocks), nn.Linear(7, 3)).double()
    if trainable != "all":
        model.requires_grad_(requires_grad=False)
        if trainable != "none":
            model.get_submodule(trainable).requires_grad_()
    return model


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW over what requires gradients."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Return the loss of one rank's share."""
    outputs: torch.Tensor = model(batch_of(rank, step))
    return outputs.square().mean()


def train(trainable: str, pieces: tuple[object, ...]) -> Found:
    """Train on this rank, with an evaluation in between."""
    model: Any = make_mlp(trainable)
    booster = Booster(*pieces, precision="fp64", max_grad_norm=0.5)
    model, optimizer = booster.boost(model, make_optimizer(model))
    norms = []
    for step in range(STEPS):
        with torch.no_grad():
            loss_of(model, dist.get_rank(), step)
        loss_of(model, dist.get_rank(), step).backward()
        optimizer.step()
        norms.append(float(optimizer.grad_norm))
        optimizer.zero_grad()
    with booster.full_parameters(model) as full:
        return norms, {name: value.clone() for name, value in full.items()}


def train_alone(trainable: str, num_ranks: int) -> Found:
    """Train in one process on the batches of all ranks."""
    model = make_mlp(trainable)
    optimizer = make_optimizer(model)
    chosen = [parameter for parameter in model.parameters() if parameter.requires_grad]
    norms = []
    for step in range(STEPS):
        losses = [loss_of(model, rank, step) for rank in range(num_ranks)]
        (torch.stack(losses).sum() / num_ranks).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(chosen, 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return norms, {name: value.detach().clone() for name, value in model.named_parameters()}


def compare(found: list[Found], wanted: Found) -> None:
    """Compare norms and weights of all ranks with those of one process."""
    for norms, weights in found:
        assert norms == pytest.approx(wanted[0], rel=1e-10)
        for name, value in weights.items():
            assert_close(value, wanted[1][name], name)


@pytest.mark.parametrize(
    ("num_ranks", "chunk_bytes"), [(1, 8), (1, 97), (2, None), (2, 8), (3, 97), (3, None), (5, 97)]
)
def test_sizes_that_do_not_divide_are_exact(num_ranks: int, chunk_bytes: int | None) -> None:
    """Prime widths, chunks of any length, ranks that are no power of two."""
    found = run_ranks(train, num_ranks, "all", (Gemini(device_budget="1MiB", chunk_bytes=chunk_bytes),))

    compare(found, train_alone("all", num_ranks))


@pytest.mark.parametrize("more", [(), (Recompute(),)], ids=["kept", "recomputed"])
@pytest.mark.parametrize("trainable", ["1.1", "2"])
def test_frozen_layers_stay_as_they_are(trainable: str, more: tuple[object, ...]) -> None:
    """Only a block in the middle trains, or only the last layer; inputs then need no gradient."""
    found = run_ranks(train, 2, trainable, (Gemini(device_budget="1MiB"), *more))

    compare(found, train_alone(trainable, 2))
    before = make_mlp(trainable).state_dict()
    for _, weights in found:
        for name, value in weights.items():
            assert name.startswith(trainable) or torch.equal(value, before[name])


def evaluate_frozen() -> float:
    """Return the loss of a model of which nothing trains."""
    booster = Booster(Gemini(device_budget="1MiB"), precision="fp64")
    model: Any = booster.boost(make_mlp("none"))
    model = model[0] if isinstance(model, tuple) else model
    with torch.no_grad():
        return float(loss_of(model, 0, 0))


def test_a_model_that_is_all_frozen_is_evaluated() -> None:
    """Without any optimizer."""
    assert run_ranks(evaluate_frozen, 2) == [pytest.approx(float(loss_of(make_mlp("none"), 0, 0)))] * 2


def save_trained(folder: str) -> float:
    """Train without Gemini, save a checkpoint and plain weights; return the loss of what was saved."""
    model: Any = make_mlp()
    booster = Booster(precision="fp64")
    model, optimizer = booster.boost(model, make_optimizer(model))
    loss_of(model, dist.get_rank(), 0).backward()
    optimizer.step()
    booster.save(f"{folder}/run")
    booster.export(model, f"{folder}/weights")
    with torch.no_grad():
        return float(loss_of(model, 0, 0))


def first_loss(folder: str, way: str, device: str) -> float:
    """Return the loss, before any step, of a model whose weights come from another plan."""
    with torch.device(device):
        model: Any = make_mlp()
    booster = Booster(Gemini(device_budget="1MiB"), precision="fp64")
    model, _ = booster.boost(model, make_optimizer(model))
    if way == "run":
        booster.load(f"{folder}/run")
    else:
        booster.import_weights(model, f"{folder}/weights")
    with torch.no_grad():
        return float(loss_of(model, 0, 0))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("way", ["run", "weights"])
def test_weights_from_before_are_those_that_train(way: str, device: str, tmp_path: Path) -> None:
    """A checkpoint and plain weights, into a model with memory of its own and into one without."""
    wanted = run_ranks(save_trained, 2, str(tmp_path))

    found = run_ranks(first_loss, 2, str(tmp_path), way, device)

    assert found == [pytest.approx(wanted[0], rel=1e-10)] * 2


def make_gpt() -> GPT:
    """Return a GPT whose output layer is its embedding."""
    torch.manual_seed(5)
    return GPT(is_tied=True).double()


def token_loss(model: nn.Module) -> float:
    """Return the loss of a batch of tokens."""
    ids = torch.arange(12).view(2, 6)
    with torch.no_grad():
        return float(TokenLoss()(model(ids), ids + 1))


def export_tied(folder: str) -> float:
    """Take a step, export, import into another boosted model; return the loss of what was exported."""
    ids = torch.arange(12).view(2, 6)
    model: Any = make_gpt()
    booster = Booster(Gemini(device_budget="1MiB"), precision="fp64")
    model, optimizer = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    booster.forward_backward(model, (ids, ids + 1), TokenLoss())
    optimizer.step()
    booster.export(model, f"{folder}/weights", max_file_bytes=20_000)
    other: Any = make_gpt()
    with torch.no_grad():
        other.head.weight.mul_(2)
    again = Booster(Gemini(device_budget="1MiB"), precision="fp64")
    other, _ = again.boost(other, torch.optim.SGD(other.parameters(), lr=0.1))
    again.import_weights(other, f"{folder}/weights")
    assert token_loss(other) == pytest.approx(token_loss(model), rel=1e-10)
    return token_loss(model)


def test_tied_weights_are_stored_once(tmp_path: Path) -> None:
    """In files of a small size; they fit a plain model, and stay tied."""
    safetensors = pytest.importorskip("safetensors.torch")

    wanted = run_ranks(export_tied, 2, str(tmp_path))

    stored: dict[str, torch.Tensor] = {}
    files = sorted((tmp_path / "weights").glob("*.safetensors"))
    for file in files:
        stored |= safetensors.load_file(file)
    plain = make_gpt()
    missing, unexpected = plain.load_state_dict(stored, strict=False)
    shared = [names for names in plain.state_dict() if names not in stored]
    assert len(files) > 1
    assert (unexpected, missing) == ([], shared)
    assert set(stored) == {name for name, _ in plain.named_parameters()}
    assert [token_loss(plain)] * 2 == [pytest.approx(loss, rel=1e-10) for loss in wanted]


PLACEMENTS = {
    "little of the device": Gemini(device_budget=11_000),
    "some of the device": Gemini(device_budget=16_000),
    "all of the device": Gemini(device_budget="1MiB"),
    "static": Gemini(device_budget="1MiB", placement="static"),
}


@pytest.mark.parametrize("name", PLACEMENTS)
def test_placements_give_identical_numbers(name: str) -> None:
    """Bit for bit those of everything on the device, and those of one process."""
    found = run_ranks(train, 2, "all", (PLACEMENTS[name],))

    compare(found, train_alone("all", 2))
    everything = run_ranks(train, 2, "all", (Gemini(device_budget="64MiB"),))
    for (norms, weights), (other_norms, others) in zip(found, everything, strict=True):
        assert norms == other_norms
        assert all(torch.equal(value, others[key]) for key, value in weights.items())


def train_on_disk(folder: str) -> Found:
    """Train with files below host memory, which computes."""
    return train("all", (Gemini(host_budget=30_000, disk=folder),))


def test_files_give_identical_numbers(tmp_path: Path) -> None:
    """Where host memory is too small for the state of the model."""
    compare(run_ranks(train_on_disk, 1, str(tmp_path)), train_alone("all", 1))


def train_gpt(budget: int) -> float:
    """Take two steps within a budget of the device; return the loss of the second."""
    torch.manual_seed(5)
    ids = torch.arange(24).view(4, 6)
    model: Any = GPT(num_blocks=3)
    booster = Booster(Gemini(device_budget=budget, host_budget="1MiB"))
    model, optimizer = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    loss = torch.zeros(())
    for _ in range(2):
        loss = booster.forward_backward(model, (ids, ids + 1), TokenLoss())
        optimizer.step()
        optimizer.zero_grad()
    return float(loss)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_least_budget_of_a_report_trains(num_ranks: int) -> None:
    """What was said without memory holds with it; far below, the first step says what would do."""
    ids = torch.arange(24).view(4, 6)
    report = Gemini(device_budget=1, host_budget="1MiB").fit(
        GPT(num_blocks=3), (ids, ids + 1), criterion=TokenLoss(), ranks=num_ranks
    )
    assert report.least_budget is not None

    losses = run_ranks(train_gpt, num_ranks, report.least_budget)
    errors = run_ranks_expecting_errors(train_gpt, num_ranks, int(report.least_budget * 0.9))

    assert losses == [losses[0]] * num_ranks
    assert all("let device_budget be at least" in str(error) for error in errors)


def list_chunks(chunk_bytes: int | None) -> list[Chunk]:
    """Return the chunks that a boosted GPT has."""
    torch.manual_seed(5)
    model: Any = GPT(num_blocks=3)
    booster = Booster(Gemini(device_budget="1MiB", chunk_bytes=chunk_bytes), precision="bf16")
    booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    manager = engine_of(booster).manager
    assert isinstance(manager, GeminiManager)
    return list(manager._chunks())


@pytest.mark.parametrize("chunk_bytes", [None, 3000])
def test_chunks_of_a_report_are_those_that_train(chunk_bytes: int | None) -> None:
    """Whatever their numbers are: as many, as large, of the same units."""
    layout = lay_out(GPT(num_blocks=3), Precision("bf16"), ranks=2, chunk_bytes=chunk_bytes)

    for chunks in run_ranks(list_chunks, 2, chunk_bytes):
        found, wanted = (
            Counter((one.numel, one.used, one.is_trainable, one.is_pinned) for one in row)
            for row in (chunks, layout.chunks)
        )
        assert found == wanted


# --- branches that some ranks skip --------------------------------------------------------------------------


class Forked(nn.Module):
    """Two branches, of which a call takes one."""

    def __init__(self) -> None:
        """Make three layers."""
        super().__init__()
        self.stem, self.left, self.right = (nn.Linear(5, 5) for _ in range(3))

    def forward(self, x: torch.Tensor, *, goes_left: bool) -> torch.Tensor:
        """Take a branch."""
        branch = self.left if goes_left else self.right
        outputs: torch.Tensor = branch(torch.tanh(self.stem(x)))
        return outputs


def part_of(model: nn.Module, rank: int, step: int, part: int) -> torch.Tensor:
    """Return one of the losses of a step; ranks take their branches at different times."""
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + 10 * part + rank)).double()
    loss: torch.Tensor = model(x, goes_left=bool((rank + step) % 3 == part % 2)).square().mean()
    return loss


def train_forked(device_budget: str | None) -> dict[str, torch.Tensor]:
    """Run three backward passes before each step, and communicate after each of them."""
    torch.manual_seed(2)
    model = Forked().double()
    booster = Booster(Gemini(device_budget=device_budget), precision="fp64")
    model, optimizer = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(3):
        for part in range(3):
            loss = part_of(model, dist.get_rank(), step, part)
            loss.backward()
            booster.mean(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    with booster.full_parameters(model) as full:
        return {name: value.detach().clone() for name, value in full.items()}


@pytest.mark.parametrize("device_budget", [None, "1MiB"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_that_skip_branches_let_the_others_go_on(num_ranks: int, device_budget: str | None) -> None:
    """A rank sends what a backward left when it ends, though it expected more."""
    torch.manual_seed(2)
    model = Forked().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        for part in range(3):
            for rank in range(num_ranks):
                (part_of(model, rank, step, part) / num_ranks).backward()
        optimizer.step()
        optimizer.zero_grad()

    for found in run_ranks(train_forked, num_ranks, device_budget, timeout_seconds=15):
        for name, value in model.state_dict().items():
            assert torch.allclose(found[name], value, rtol=0, atol=1e-10), name
