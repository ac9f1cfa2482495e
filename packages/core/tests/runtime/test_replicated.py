"""The replicated manager: parameters that come and go, optimizers that share a model, exact traffic."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from colossal_core import Booster
from colossal_core.errors import UsageError
from colossal_core.runtime import buckets
from colossal_testkit import run_ranks, run_ranks_expecting_errors
from colossal_testkit.stories import (
    Awkward,
    Story,
    Trace,
    Turn,
    assert_close,
    assert_same_story,
    batch_of,
    expect,
    tell,
    tiny_buffers,
    zero_grad,
)

from .small_models import Layers, adam_over_all


def on_rank(story: Story) -> Trace:
    """Play a story on a rank of the pool, with many buffers."""
    with tiny_buffers():
        return tell(story)


def check(story: Story, *, world_size: int = 2) -> None:
    """Play a story on every rank and in one plain process, and compare."""
    traces = run_ranks(on_rank, world_size, story)

    assert_same_story(traces, expect(story, world_size))


# --- parameters that come and go -------------------------------------------------------------------------


def half_frozen() -> nn.Module:
    """Freeze the first two layers."""
    model = Layers()
    model.first.requires_grad_(requires_grad=False)
    model.second.requires_grad_(requires_grad=False)
    return model


def adam_over_trainable(model: nn.Module) -> torch.optim.Optimizer:
    """Leave frozen layers out of the optimizer."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.Adam(trainable, lr=0.02, weight_decay=0.1)


def play_branches(turn: Turn) -> None:
    """Leave out another layer on each rank."""
    turn.loss("fst"[(turn.rank + turn.step) % 3]).backward()


def unfreeze_into_a_group(turn: Turn) -> None:
    """Unfreeze a layer after the second step and another after the fourth, into groups of their own."""
    zero_grad(turn)
    layer = {1: turn.model.first, 3: turn.model.second}.get(turn.step)
    if layer is not None:
        layer.requires_grad_(requires_grad=True)
        turn.optimizer.add_param_group({"params": layer.parameters(), "lr": 0.005})


def unfreeze_in_place(turn: Turn) -> None:
    """Unfreeze a layer that the optimizer holds already, and freeze another one for two steps."""
    zero_grad(turn)
    if turn.step == 1:
        turn.model.first.requires_grad_(requires_grad=True)
    turn.model.third.requires_grad_(requires_grad=turn.step not in {1, 2})


def regroup(turn: Turn) -> None:
    """Move parameters between groups, as schedules of decay do, and take one out for a while."""
    zero_grad(turn)
    groups = turn.optimizer.param_groups
    if turn.step == 1:
        groups[0]["params"] = [value for value in groups[0]["params"] if value is not turn.model.last.bias]
        turn.optimizer.add_param_group({"params": [turn.model.last.bias], "lr": 0.001, "weight_decay": 0.0})
    elif turn.step == 2:
        groups[1]["params"].append(groups[0]["params"].pop(0))
    elif turn.step == 3:
        groups[0]["params"].insert(0, groups[1]["params"].pop())


@pytest.mark.parametrize(
    ("build", "optimizer", "after"),
    [
        (half_frozen, adam_over_trainable, unfreeze_into_a_group),
        (half_frozen, adam_over_all, unfreeze_in_place),
        (Layers, adam_over_all, regroup),
    ],
)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_parameters_that_join_leave_or_move_are_exact(
    build: Callable[[], nn.Module],
    optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    after: Callable[[Turn], None],
    world_size: int,
) -> None:
    """Groups may change after boost; buffers of several generations never mix up their messages."""
    story = Story(play=play_branches, after=after, build=build, optimizer=optimizer, steps=8)

    check(story, world_size=world_size)


def unfreeze_and_look(precision: str) -> list[str]:
    """Unfreeze a layer that the optimizer holds, run backward, and return what its gradients show."""
    model: Any = half_frozen().float()
    model, optimizer = Booster(precision=precision).boost(model, adam_over_all(model))
    model.first.requires_grad_(requires_grad=True)
    model(batch_of(dist.get_rank(), 0).float()).square().mean().backward()
    shown = [repr(value.grad) for value in model.first.parameters()]
    optimizer.step()
    return [*shown, str(optimizer.stepped or optimizer.skipped_steps)]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_parameters_unfrozen_in_place_are_guarded_at_once(precision: str) -> None:
    """The first gradient after ``requires_grad_`` is no more reduced than any other."""
    for *shown, counted in run_ranks(unfreeze_and_look, 2, precision):
        assert all("not reduced yet" in text for text in shown), shown
        assert counted


def add_in_the_middle() -> tuple[list[str], float]:
    """Unfreeze a layer into a group between two backward passes; return what is shown, and the norm."""
    torch.manual_seed(0)
    model: Any = half_frozen()
    optimizer: Any = adam_over_trainable(model)
    with tiny_buffers():
        model, optimizer = Booster(precision="fp64").boost(model, optimizer)
    model(batch_of(dist.get_rank(), 0)).square().mean().backward()
    model.second.requires_grad_(requires_grad=True)
    optimizer.add_param_group({"params": model.second.parameters()})
    model(batch_of(dist.get_rank(), 1)).square().mean().backward()
    shown = [repr(value.grad) for value in model.second.parameters()]
    optimizer.step()
    return shown, float(optimizer.grad_norm)


def test_gradients_of_a_new_group_are_guarded_at_once() -> None:
    """Between ``add_param_group`` and the next step they are no less local than all others."""
    results = run_ranks(add_in_the_middle, 2)

    torch.manual_seed(0)
    model = half_frozen()
    for step in range(2):
        for rank in range(2):
            (model(batch_of(rank, step)).square().mean() / 2).backward()
        model.get_submodule("second").requires_grad_(requires_grad=True)
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), 1e9))
    for shown, found in results:
        assert ["not reduced yet" in text for text in shown] == [True, True]
        assert found == pytest.approx(norm, rel=1e-10)


def freeze_everything_else() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Train one layer of four; return all weights before and after."""
    torch.manual_seed(0)
    model = Layers()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("third"))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model, optimizer = Booster(precision="fp64").boost(model, adam_over_all(model))
    for step in range(2):
        model(batch_of(dist.get_rank(), step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return before, dict(model.state_dict())


def test_frozen_weights_stay_bit_for_bit() -> None:
    """Only what is trainable moves, whatever the optimizer holds."""
    for before, after in run_ranks(freeze_everything_else, 2):
        for name, value in before.items():
            assert torch.equal(value, after[name]) == (not name.startswith("third")), name


def add_foreign_group() -> None:
    """Add a group of a layer that was never boosted."""
    model = Layers()
    model, optimizer = Booster(precision="fp64").boost(model, adam_over_all(model))
    stranger = nn.Linear(2, 2)
    try:
        optimizer.add_param_group({"params": stranger.parameters()})
    finally:
        assert len(optimizer.param_groups) == 1


def test_groups_of_strangers_are_refused() -> None:
    """A parameter of no boosted model would never be updated; nothing is added."""
    for error in run_ranks_expecting_errors(add_foreign_group, 2, error=UsageError):
        assert "belongs to none of the boosted models" in error.message


def add_foreign_parameter_by_hand() -> None:
    """Put a parameter of a stranger into a group behind the optimizer's back, and step."""
    model = Layers()
    model, optimizer = Booster(precision="fp64").boost(model, adam_over_all(model))
    optimizer.param_groups[0]["params"].append(nn.Parameter(torch.zeros(2)))
    model(batch_of(dist.get_rank(), 0)).square().mean().backward()
    optimizer.step()


def test_strangers_in_a_group_are_never_silently_left_out() -> None:
    """What was put into a group by hand is trained or refused."""
    for error in run_ranks_expecting_errors(add_foreign_parameter_by_hand, 2, error=UsageError):
        assert "belongs to none of the boosted models" in error.message


# --- groups smaller than the world -----------------------------------------------------------------------


def one_group_each(model: nn.Module) -> torch.optim.Optimizer:
    """Give every parameter a group of its own, with rates and decay that alternate."""
    rates = itertools.cycle([0.01, 0.1])
    groups: list[dict[str, Any]] = [
        {"params": [parameter], "lr": next(rates), "weight_decay": 0.1 * (parameter.dim() > 1)}
        for parameter in model.parameters()
    ]
    return torch.optim.SGD([*groups, {"params": []}], lr=0.01, momentum=0.9)


def play_both_heads(turn: Turn) -> None:
    """Use everything."""
    turn.loss("ab").backward()


def test_groups_may_hold_less_than_there_are_ranks() -> None:
    """One parameter a group, one of a single element, one of none, and an empty group, on four ranks."""
    check(Story(play=play_both_heads, optimizer=one_group_each, steps=3), world_size=4)


class Single(nn.Module):
    """Fewer elements than ranks."""

    def __init__(self) -> None:
        """Hold one number."""
        super().__init__()
        self.only = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))

    def forward(self, x: torch.Tensor, head: str = "") -> torch.Tensor:
        """Scale the input."""
        return x * self.only + len(head)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW over everything."""
    return torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)


def test_model_of_one_element_trains() -> None:
    """A model with fewer elements than ranks is no special case."""
    check(Story(play=play_both_heads, build=Single, optimizer=adamw, max_grad_norm=0.3), world_size=3)


# --- lifetimes -------------------------------------------------------------------------------------------


def step_through_an_old_graph() -> str:
    """Run backward through a graph that a step has made outdated."""
    model: Any = Layers()
    model, optimizer = Booster(precision="fp64").boost(model, adam_over_all(model))
    loss = model(batch_of(dist.get_rank(), 0)).square().mean()
    loss.backward(retain_graph=True)
    optimizer.step()
    try:
        loss.backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_backward_through_outdated_weights_fails_as_in_torch() -> None:
    """Updates happen behind autograd's back, but not unseen."""
    for message in run_ranks(step_through_an_old_graph, 2):
        assert "modified by an inplace operation" in message


# --- traffic ---------------------------------------------------------------------------------------------


class Transformer(nn.Module):
    """One encoder layer of a realistic shape: 200 thousand parameters in 16 tensors."""

    def __init__(self) -> None:
        """Build it."""
        super().__init__()
        self.embed = nn.Embedding(97, 128)
        self.block = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
        self.head = nn.Linear(128, 97, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map tokens ``[n, t]`` to logits ``[n, t, 97]``."""
        logits: torch.Tensor = self.head(self.block(self.embed(tokens)))
        return logits


def measure(precision: str, buffer_bytes: int) -> dict[str, Any]:
    """Take three steps; return the transfers of each by phase, and the size of the model."""
    torch.manual_seed(0)
    model: Any = Transformer()
    with tiny_buffers(buffer_bytes, buffer_bytes // 4):
        booster = Booster(precision=precision, max_grad_norm=1.0)
        model, optimizer = booster.boost(model, torch.optim.AdamW(model.parameters(), fused=True))
    found: dict[str, Any] = {"numel": sum(parameter.numel() for parameter in model.parameters()), "steps": []}
    for step in range(3):
        tokens = torch.randint(97, (2, 5), generator=torch.Generator().manual_seed(step + dist.get_rank()))

        def criterion(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())

        booster.forward_backward(model, (tokens, tokens), criterion)
        optimizer.step()
        optimizer.zero_grad()
        words: Counter[str] = Counter()
        size: Counter[str] = Counter()
        messages: Counter[str] = Counter()
        for transfer in booster.last_traffic:
            words[transfer.phase] += int(transfer.full_bytes // transfer.item_bytes)
            size[transfer.phase] += transfer.full_bytes
            messages[transfer.phase] += 1
        received = sum(t.received_words for t in booster.last_traffic if t.phase == "gradients")
        found["steps"].append((dict(words), dict(size), dict(messages), received))
    return found


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    ("precision", "buffer_bytes"), [("fp32", 1 << 17), ("bf16", 1 << 16), ("fp64", 8 << 20)]
)
def test_a_step_moves_what_the_formula_says(precision: str, buffer_bytes: int, world_size: int) -> None:
    """2(D-1)/D words a parameter and less than 0.1% of flags; norm, loss and weight at most 16 bytes each."""
    results = run_ranks(measure, world_size, precision, buffer_bytes)

    for result in results:
        numel = result["numel"]
        formula = 2 * (world_size - 1) / world_size * numel
        for words, size, messages, received in result["steps"]:
            assert set(words) == {"gradients", "norm", "loss"}
            assert numel < words["gradients"] <= 1.001 * numel
            assert formula < received <= 1.001 * formula
            assert size["norm"] <= 16
            assert messages["norm"] == 1
            assert size["loss"] <= 16
            assert messages["loss"] <= 2


def count_messages() -> list[int]:
    """Return the gradient messages of each step when predictions come true, fail, and come true again."""
    torch.manual_seed(0)
    model: Any = Layers()
    booster = Booster(precision="fp64")
    with tiny_buffers(300, 100):
        model, optimizer = booster.boost(model, adam_over_all(model))
    found = []
    for passes in (1, 1, 2, 2, 1):
        for part in range(passes):
            model(batch_of(dist.get_rank(), part)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(sum(transfer.phase == "gradients" for transfer in booster.last_traffic))
    return found


def test_wrong_predictions_cost_one_more_round_and_right_ones_nothing() -> None:
    """Only the step whose second backward was not expected sends buffers twice."""
    results = run_ranks(count_messages, 2)

    for first, second, surprised, known, fewer in results:
        assert first == second == known == fewer
        assert first > 2
        assert first < surprised < 2 * first


def test_buffers_of_any_size_change_no_number() -> None:
    """From one element a buffer to one buffer for all, weights agree to the last bit of the sum."""
    results = [run_ranks(train_with_buffers, 3, size) for size in (1, 10, 97, 4096, 8 << 20)]

    for result in results:
        for weights in result:
            for one, other in zip(weights, results[0][0], strict=True):
                assert_close(one, other, "weight", 1e-12)


def train_with_buffers(buffer_bytes: int) -> list[torch.Tensor]:
    """Train four steps with buffers of a size."""
    torch.manual_seed(0)
    model: Any = Awkward()
    with tiny_buffers(buffer_bytes, max(1, buffer_bytes // 2)):
        booster = Booster(precision="fp64", max_grad_norm=0.1)
        model, optimizer = booster.boost(model, adam_over_all(model))
        assert buffer_bytes == buckets.BUFFER_BYTES
    for step in range(4):
        model(batch_of(dist.get_rank(), step), "ab").square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]
