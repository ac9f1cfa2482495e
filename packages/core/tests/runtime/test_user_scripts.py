"""What users do in scripts of their own, as they would write it, against one plain process in fp64."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import swa_utils
from torch.utils.data import DataLoader, TensorDataset

from colossal_core import Booster, Replicated, launch, spawn
from colossal_core.errors import UsageError
from colossal_testkit import run_ranks

WORDS, ROWS, LENGTH = 9, 5, 7


def ForCausalLMLoss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:  # noqa: N802 - theirs
    """Predict the next token, as the function of this name in transformers."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def ForMaskedLMLoss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:  # noqa: N802 - theirs
    """Predict tokens in their place."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class LanguageModel(nn.Module):
    """A model with tied weights and a loss of its own, in the manner of transformers."""

    def __init__(self, loss_function: Callable[..., torch.Tensor]) -> None:
        """Build it in fp64."""
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, 6), nn.Linear(6, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.loss_function = loss_function
        self.double()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **_: Any) -> SimpleNamespace:
        """Return logits and loss as attributes."""
        logits = self.head(self.embed(input_ids).tanh())
        return SimpleNamespace(logits=logits, loss=self.loss_function(logits, labels))


class Translator(LanguageModel):
    """Shifts what its decoder reads, as T5 does, and has a loss function that it does not use."""

    config = SimpleNamespace(is_encoder_decoder=True)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **_: Any) -> SimpleNamespace:
        """Return logits and loss as attributes."""
        logits = self.head(self.embed(input_ids).tanh())
        return SimpleNamespace(logits=logits, loss=F.cross_entropy(logits.flatten(0, 1), labels.flatten()))


def language_batch(step: int) -> dict[str, torch.Tensor]:
    """Return a global batch, many labels of which do not count, and others in each row."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(WORDS, (ROWS, LENGTH), generator=generator)
    dropped = torch.rand(ids.shape, generator=generator) < torch.linspace(0, 0.8, ROWS)[:, None]
    return {"input_ids": ids, "labels": ids.masked_fill(dropped, -100)}


def tune(name: str) -> float:
    """Fine-tune on this rank's rows and return the largest difference from one process."""
    torch.manual_seed(0)
    kind = Translator if name == "translating" else LanguageModel
    model: Any = kind(ForMaskedLMLoss if name == "masked" else ForCausalLMLoss)
    plain = copy.deepcopy(model)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.5)
    booster = Booster(precision="fp64")
    model, optimizer = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.5))
    mine = slice(booster.data_rank, None, booster.data_degree)
    for step in range(3):
        batch = language_batch(step)
        share = {key: rows[mine] for key, rows in batch.items()}
        seen = booster.evaluate(model, share)
        loss = booster.forward_backward(model, share)
        optimizer.step()
        optimizer.zero_grad()

        wanted = plain(**batch).loss
        wanted.backward()
        theirs.step()
        theirs.zero_grad()
        assert float(seen) == pytest.approx(float(loss), rel=1e-6)
        assert float(loss) == pytest.approx(float(wanted.detach()), rel=1e-6)
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return max(float((ours - value).detach().abs().max()) for ours, value in pairs)


@pytest.mark.parametrize("name", ["causal", "masked", "translating"])
def test_losses_inside_models_count_their_labels(name: str) -> None:
    """Ranks have different numbers of labels that count, and causal models never count the first of a row."""
    assert max(run_ranks(tune, 2, name)) < 1e-10


def penalise(critic: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Return the gradient penalty of a critic."""
    rows = rows.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(critic(rows).sum(), rows, create_graph=True)
    penalty: torch.Tensor = (gradient.norm(dim=1) - 1).square().mean()
    return penalty


def play_game(makers: Any, optimizers: Any, batch: Any, backward: Any) -> None:
    """Take one step of a critic and one of a generator; the second leaves gradients in the critic."""
    (generator, critic), (generates, judges), (real, noise) = makers, optimizers, batch
    fake = generator(noise)
    judges.zero_grad()
    backward(critic(fake.detach()).mean() - critic(real).mean() + 10 * penalise(critic, real))
    judges.step()
    generates.zero_grad()
    backward(-critic(fake).mean())
    generates.step()


def train_both() -> float:
    """Train two models with two optimizers, and return the largest difference from one process."""
    torch.manual_seed(0)
    generator, critic = nn.Linear(3, 4).double(), nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    makers: Any = [generator, critic.double()]
    plain = copy.deepcopy(makers)
    theirs = [torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.5, 0.9)) for model in plain]
    ours = [torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.5, 0.9)) for model in makers]
    booster = Booster(precision="fp64")
    *makers, first, second = booster.boost(*makers, *ours)
    mine = slice(booster.data_rank, None, booster.data_degree)
    for step in range(4):
        seeded = torch.Generator().manual_seed(step)
        batch = [torch.randn(6, width, generator=seeded, dtype=torch.float64) for width in (4, 3)]
        play_game(makers, (first, second), [rows[mine] for rows in batch], booster.backward)
        play_game(plain, theirs, batch, torch.Tensor.backward)
    pairs = [zip(a.parameters(), b.parameters(), strict=True) for a, b in zip(makers, plain, strict=True)]
    return max(float((a - b).detach().abs().max()) for pair in pairs for a, b in pair)


def test_two_players_and_a_gradient_penalty_equal_one_process() -> None:
    """Gradients that one player's step leaves in the other are cleared by the user, as in torch."""
    assert max(run_ranks(train_both, 2)) < 1e-10


def make_run() -> Any:
    """Return a Booster with what a script boosts, in the middle of nothing."""
    torch.manual_seed(0)
    rows = torch.randn(30, 4)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    groups: list[dict[str, Any]] = [
        {"params": model[0].parameters(), "lr": 0.02},
        {"params": model[2].parameters()},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, [lambda step: 0.9**step, lambda step: 1 / (1 + step)]
    )
    loader = DataLoader(TensorDataset(rows, rows.sum(1, keepdim=True)), batch_size=8, shuffle=True)
    booster = Booster(max_grad_norm=1.0)
    return booster, *booster.boost(model, optimizer, scheduler, loader)


def train_epoch(run: Any, *, until: int | None = None) -> list[float]:
    """Train to the end of an epoch, or until some steps are taken, and return the losses."""
    booster, model, optimizer, scheduler, loader = run
    losses = []
    for batch in loader:
        losses.append(float(booster.forward_backward(model, batch, F.mse_loss)))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if len(losses) == until:
            break
    return losses


def resume() -> tuple[list[float], list[float]]:
    """Return the losses after a break, without and with having been written to a file there."""
    run = make_run()
    train_epoch(run, until=2)
    _, model, optimizer, scheduler, loader = run
    file = io.BytesIO()
    state = [optimizer.state_dict(), scheduler.state_dict(), loader.position()]
    torch.save([model.state_dict(), *state], file)
    loader.seek(loader.position())
    wanted = train_epoch(run) + train_epoch(run)

    _, model, optimizer, scheduler, loader = again = make_run()
    file.seek(0)
    for_model, for_optimizer, for_scheduler, position = torch.load(file, weights_only=False)
    model.load_state_dict(for_model)
    optimizer.load_state_dict(for_optimizer)
    scheduler.load_state_dict(for_scheduler)
    loader.seek(position)
    return wanted, train_epoch(again) + train_epoch(again)


def test_a_run_goes_on_from_state_dicts_with_equal_losses() -> None:
    """State dicts of model, optimizer and scheduler and the loader's position are a checkpoint by hand."""
    for wanted, found in run_ranks(resume, 2):
        assert found == wanted


def measure() -> list[float]:
    """Return by how much metrics over uneven batches, one of a single sample, miss those of one process."""
    torch.manual_seed(0)
    rows, labels = torch.randn(37, 6, dtype=torch.float64), torch.randint(3, (37,))
    model = nn.Linear(6, 3).double()
    outputs = model(rows).detach()
    booster = Booster(precision="fp64")
    model, loader = booster.boost(model, DataLoader(TensorDataset(rows, labels), batch_size=9))
    total, right, losses = 0.0, 0, []
    for inputs, target in loader:
        loss, found = booster.evaluate(model, (inputs, target), F.cross_entropy, return_outputs=True)
        everyone, answers = booster.gather((found.argmax(1), target))
        right += int((everyone == answers).sum())
        total += float(loss) * len(answers)
        losses.append(F.cross_entropy(found, target, reduction="none"))
    mean = float(F.cross_entropy(outputs, labels))
    accuracy = float((outputs.argmax(1) == labels).double().mean())
    gathered = float(booster.gather(torch.cat(losses)).mean())
    return [total / 37 - mean, gathered - mean, right / 37 - accuracy]


def test_metrics_over_uneven_batches_equal_one_process() -> None:
    """The mean loss of each batch by its rows, the gathered losses of all rows, and the accuracy."""
    for by_batch, by_row, accuracy in run_ranks(measure, 2):
        assert abs(by_batch) < 1e-6  # evaluate returns fp32
        assert abs(by_row) < 1e-12
        assert accuracy == 0


@pytest.mark.parametrize("value", [torch.ones(2), "text", None, {"loss": 1.0}])
def test_mean_of_what_is_no_number_is_refused(value: Any) -> None:
    """The message names what came, and which call is meant for rows."""
    booster = Booster()
    booster.boost(nn.Linear(1, 1))

    with pytest.raises(UsageError, match=r"mean got .*, expected a number"):
        booster.mean(value)


def make_regression() -> tuple[Any, Any, Any, Any]:
    """Return a model, an optimizer, a schedule and a loader whose last batch is smaller."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    rows = torch.randn(22, 4)
    loader = DataLoader(TensorDataset(rows, rows.sum(1, keepdim=True)), batch_size=8)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5), loader


def scale_by_hand(model: Any, optimizer: Any, scheduler: Any, loader: Any) -> list[torch.Tensor]:
    """Train as the tutorials of torch.amp do; the fourth loss is infinite."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for epoch in range(3):
        for number, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            scaler.scale(loss * (float("inf") if (epoch, number) == (1, 0) else 1.0)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        scheduler.step()
    assert scaler.get_scale() == 2.0**9
    return [value.detach().clone() for value in model.parameters()]


def train_with_scaler() -> list[torch.Tensor]:
    """Boost the objects and run the loop unchanged."""
    return scale_by_hand(*Booster(Replicated(reduce="backward")).boost(*make_regression()))


def test_a_loop_with_a_grad_scaler_stays_as_it_is() -> None:
    """Uneven shares, unscaling, clipping, a skipped step and a schedule: the weights of one process."""
    wanted = scale_by_hand(*make_regression())

    for found in run_ranks(train_with_scaler, 3):
        for value, reference in zip(found, wanted, strict=True):
            torch.testing.assert_close(value, reference, rtol=1e-5, atol=1e-6)


def test_a_notebook_trains_on_several_ranks_and_goes_on_alone(tmp_path: Path) -> None:
    """One cell makes the objects, one spawns the training, the last one reads what it left."""
    model, optimizer, scheduler, loader = make_regression()

    def train() -> None:
        """Train an epoch on each rank."""
        launch()
        booster = Booster()
        ours = booster.boost(model, optimizer, scheduler, loader)
        for batch in ours[3]:
            booster.forward_backward(ours[0], batch, F.mse_loss)
            ours[1].step()
            ours[2].step()
            ours[1].zero_grad()
        if booster.is_first:
            torch.save(ours[0].state_dict(), tmp_path / "weights.pt")

    before = model[0].weight.detach().clone()
    spawn(train, 2)

    assert torch.equal(model[0].weight, before)
    model.load_state_dict(torch.load(tmp_path / "weights.pt"))
    again, theirs, schedule, _ = make_regression()
    for x, y in loader:
        F.mse_loss(again(x), y).backward()
        theirs.step()
        schedule.step()
        theirs.zero_grad()
    for value, reference in zip(model.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(value, reference, rtol=1e-5, atol=1e-6)


def average_both_ways() -> float:
    """Keep an average of ours and one of torch, evaluate with ours, and return how far they are apart."""
    model, optimizer, _, loader = make_regression()
    booster = Booster(precision="fp64")
    model, optimizer, loader = booster.boost(model, optimizer, loader)
    ours = booster.average(model, 0.9)
    theirs: Any = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    theirs.update_parameters(model)  # the first call copies
    for batch in loader:
        booster.forward_backward(model, batch, F.mse_loss)
        optimizer.step()
        theirs.update_parameters(model)
        optimizer.zero_grad()
    last = [value.detach().clone() for value in model.parameters()]
    x = torch.ones(2, 4)
    with ours.applied(), torch.no_grad():
        worst = float((model(x) - theirs(x.double())).abs().max())
    assert all(map(torch.equal, last, model.parameters()))
    return worst


def test_running_averages_of_ours_and_of_torch_agree() -> None:
    """``AveragedModel`` works on a replicated model; ``booster.average`` needs no call in the loop."""
    assert max(run_ranks(average_both_ways, 2)) < 1e-12
