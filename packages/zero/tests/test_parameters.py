"""Stage 3: what is resident when, and what happens to code that reaches for what is not."""

from __future__ import annotations

import copy
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from colossal_core import Booster, CapabilityError, RankMismatchError, UsageError
from colossal_core.runtime import standstill
from colossal_testkit import run_ranks, run_ranks_expecting_errors
from colossal_testkit.stories import assert_close, batch_of
from colossal_zero import Zero

from .models import Stage, boost, build, loss_of, sgd


def reach_for_released() -> dict[str, str]:
    """Do to released parameters what people do; return the errors."""
    _, model, _ = boost()
    weight = model.blocks[0].up.weight
    wrongs = {
        "state_dict": model.state_dict,
        "load_state_dict": lambda: model.load_state_dict({}),
        "deepcopy": lambda: copy.deepcopy(model),
        "clamp_": lambda: weight.data.clamp_(-1, 1),
    }
    found = {"shape": str(tuple(weight.shape)), "value": str(weight.sum().item())}
    for name, wrong in wrongs.items():
        try:
            wrong()
        except (UsageError, RuntimeError) as error:
            found[name] = str(error)
    with torch.no_grad():
        weight.zero_()
    try:
        loss_of(model, dist.get_rank(), 0)
    except UsageError as error:
        found["zero_"] = str(error)
    return found


def test_released_parameters_are_poison_to_readers_and_refuse_writers() -> None:
    """They keep their shape, read as NaN, and what was written is named at the latest by the next gather."""
    for found in run_ranks(reach_for_released, 2):
        assert (found["shape"], found["value"]) == ("(12, 6)", "nan")
        for name in ("state_dict", "load_state_dict", "deepcopy"):
            assert "full_parameters" in found[name]
        assert "single memory location" in found["clamp_"]
        assert "blocks.0.up.weight" in found["zero_"]


def edit_whole(precision: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Edit whole parameters, one past torch's count of writes; return them after a step at rate 0."""
    booster, model, optimizer = boost("adapted", precision=precision)
    with booster.full_parameters(model) as full:
        full["adapters.0.weight"].fill_(0.25)
        model.leave.weight.data.mul_(0).add_(0.5)  # frozen
        expected = {name: value.clone() for name, value in full.items()}
    for group in optimizer.param_groups:
        group.update(lr=0.0, weight_decay=0.0)
    loss_of(model, dist.get_rank(), 0).backward()
    optimizer.step()
    with booster.full_parameters(model) as full:
        return [(value.clone(), expected[name]) for name, value in full.items()]


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_edits_of_whole_parameters_are_kept(precision: str) -> None:
    """In values and in masters, of trained and of frozen parameters."""
    for pairs in run_ranks(edit_whole, 3, precision):
        for value, wanted in pairs:
            assert torch.equal(value, wanted)


def unfreeze(stage: Stage) -> dict[str, torch.Tensor]:
    """Train adapters, then a block that was frozen as well; return the weights."""
    model: Any = build("adapted")
    chosen = list(model.adapters.parameters())
    booster = Booster(Zero(stage=stage), precision="fp64")
    model, optimizer = booster.boost(model, torch.optim.Adam(chosen, lr=0.05))
    for step in range(4):
        if step == 2:
            model.blocks[1].requires_grad_(requires_grad=True)
            optimizer.add_param_group({"params": list(model.blocks[1].parameters()), "lr": 0.01})
        loss_of(model, dist.get_rank(), step).backward()
        optimizer.step()
        optimizer.zero_grad()
    with booster.full_parameters(model) as full:
        return {name: value.clone() for name, value in full.items()}


@pytest.mark.parametrize("stage", [2, 3])
def test_frozen_parameters_can_be_unfrozen_later(stage: Stage) -> None:
    """Frozen ones cost no state and keep every bit; unfrozen ones train like in one process."""
    model: Any = build("adapted")
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    optimizer = torch.optim.Adam(model.adapters.parameters(), lr=0.05)
    for step in range(4):
        if step == 2:
            model.blocks[1].requires_grad_(requires_grad=True)
            optimizer.add_param_group({"params": list(model.blocks[1].parameters()), "lr": 0.01})
        (loss_of(model, 0, step) / 2 + loss_of(model, 1, step) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()

    for found in run_ranks(unfreeze, 2, stage):
        for name, value in model.named_parameters():
            assert_close(found[name], value.detach(), name)
        assert torch.equal(found["blocks.0.up.weight"], before["blocks.0.up.weight"])


def run_frozen() -> torch.Tensor:
    """Run a model that nothing trains."""
    model = build("tower").requires_grad_(requires_grad=False)
    booster = Booster(Zero(stage=3), precision="fp64")
    model = booster.boost(model)
    with torch.no_grad():
        outputs: torch.Tensor = model(batch_of(0, 0))
    return outputs


def test_a_frozen_model_is_divided_without_an_optimizer() -> None:
    """It computes what the plain one does."""
    wanted = build("tower")(batch_of(0, 0)).detach()

    for outputs in run_ranks(run_frozen, 2):
        assert_close(outputs, wanted, "outputs")


def update_between() -> None:
    """Run backward through a graph that is older than the last update."""
    _, model, optimizer = boost()
    old = loss_of(model, dist.get_rank(), 0)
    loss_of(model, dist.get_rank(), 1).backward()
    optimizer.step()
    old.backward()


def test_a_graph_that_is_older_than_the_update_is_refused() -> None:
    """As in torch, instead of gradients from new weights."""
    errors = run_ranks_expecting_errors(update_between, 2, error=UsageError)

    assert all("updated after the forward" in str(error) for error in errors)


def generate(whole: bool) -> list[float]:  # noqa: FBT001 - what is varied
    """Call the model twice on one rank, and five times on the other one."""
    vars(standstill).update(PATIENCE_SECONDS=0.3)
    booster, model, _ = boost()
    num_calls = 2 if dist.get_rank() == 0 else 5
    with torch.no_grad():
        if whole:
            with booster.full_parameters(model):
                found = [model(batch_of(0, call)).sum().item() for call in range(num_calls)]
        else:
            found = [model(batch_of(0, call)).sum().item() for call in range(num_calls)]
    booster.mean(0.0)
    return found


def test_calls_that_differ_in_number_are_refused_or_run_on_whole_parameters() -> None:
    """Ranks that generate texts of different lengths do not wait for each other for ever."""
    model = build("tower")
    wanted = [model(batch_of(0, call)).sum().item() for call in range(5)]

    errors = run_ranks_expecting_errors(generate, 2, False, error=RankMismatchError)
    short, long = run_ranks(generate, 2, True)

    assert all("full_parameters" in str(error) for error in errors)
    assert short == pytest.approx(wanted[:2])
    assert long == pytest.approx(wanted)


def penalise() -> dict[str, torch.Tensor]:
    """Add a penalty that reads weights outside of any module."""
    booster, model, optimizer = boost()
    for step in range(2):
        with booster.full_parameters(model):
            loss = loss_of(model, dist.get_rank(), step)
            (loss + model.blocks[1].up.weight.abs().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    with booster.full_parameters(model) as full:
        return {name: value.clone() for name, value in full.items()}


def test_penalties_on_parameters_are_exact_where_they_are_whole() -> None:
    """Within the context, forward, penalty and backward read whole parameters."""
    model: Any = build("tower")
    optimizer = sgd(model)
    for step in range(2):
        loss = (loss_of(model, 0, step) + loss_of(model, 1, step)) / 2
        (loss + model.blocks[1].up.weight.abs().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()

    for found in run_ranks(penalise, 2):
        for name, value in model.named_parameters():
            assert_close(found[name], value.detach(), name)


def look_between() -> list[tuple[str, bool]]:
    """Read parameters between a step and the next forward; return what is finite."""
    model = build("tower")
    booster = Booster(Zero(stage=2, gather="forward"), precision="fp64")
    model, optimizer = booster.boost(model, sgd(model))
    found = []
    for step, look in enumerate(
        ("nothing", "values", "state_dict", "deepcopy", "full_parameters", "forward")
    ):
        loss_of(model, dist.get_rank(), step).backward()
        optimizer.step()
        optimizer.zero_grad()
        tensors: list[torch.Tensor] = list(model.parameters())
        if look == "state_dict":
            tensors = list(model.state_dict().values())
        elif look == "deepcopy":
            tensors = list(copy.deepcopy(model).parameters())
        elif look == "full_parameters":
            with booster.full_parameters(model) as full:
                tensors = [value.clone() for value in full.values()]
        elif look == "forward":
            loss_of(model, dist.get_rank(), step)
        found.append((look, all(bool(torch.isfinite(tensor).all()) for tensor in tensors)))
    return found


def test_values_on_their_way_are_poison_until_somebody_asks_for_them() -> None:
    """State dicts, copies and forward wait for them; a bare look does not get old values."""
    for found in run_ranks(look_between, 2):
        assert dict(found) == {
            "nothing": False,
            "values": False,
            "state_dict": True,
            "deepcopy": True,
            "full_parameters": True,
            "forward": True,
        }


def compile_first() -> None:
    """Boost a compiled model."""
    model = build("tower")
    vars(model)["_compiled_call_impl"] = model.forward  # what model.compile() sets
    Booster(Zero(stage=3), precision="fp64").boost(model, sgd(model))


def test_compiled_models_are_refused() -> None:
    """Compiled code would keep tensors that come and go."""
    errors = run_ranks_expecting_errors(compile_first, 2, error=CapabilityError)

    assert all("compiled" in str(error) for error in errors)


def average(stage: Stage, precision: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Follow a model with an average; return what is shown, and the same average of full values."""
    booster, model, optimizer = boost(stage=stage, precision=precision)
    mean = booster.average(model, 0.5)
    with booster.full_parameters(model) as full:
        wanted = {name: value.clone().double() for name, value in full.items()}
    for step in range(3):
        loss_of(model, dist.get_rank(), step).backward()
        optimizer.step()
        optimizer.zero_grad()
        with booster.full_parameters(model) as full:
            wanted = {name: (wanted[name] + value.double()) / 2 for name, value in full.items()}
    with mean.applied(), booster.full_parameters(model) as full:
        return [(value.clone().double(), wanted[name]) for name, value in full.items()]


@pytest.mark.parametrize(
    ("stage", "precision", "tolerance"), [(1, "fp64", 1e-12), (3, "fp64", 1e-12), (2, "bf16", 2e-2)]
)
def test_averages_are_those_of_whole_parameters(stage: Stage, precision: str, tolerance: float) -> None:
    """Kept beside the shards, and shown whole."""
    for pairs in run_ranks(average, 2, stage, precision):
        for value, wanted in pairs:
            assert_close(value, wanted, "average", tolerance)


def look_at_averages(piece: Zero) -> dict[str, tuple[bool, str]]:
    """Read parameters while averages are shown, then edit one; tell what came back, and the error."""
    found = {}
    for precision in ("fp64", "fp32", "bf16", "fp16"):
        model = build("adapted") if precision == "fp64" else build("adapted").float()
        booster = Booster(piece, precision=precision)
        model, optimizer = booster.boost(model, sgd(model))
        mean = booster.average(model, 0.5)
        outputs = model(
            batch_of(dist.get_rank(), 0).to(torch.float64 if precision == "fp64" else torch.float32)
        )
        booster.backward(outputs.square().mean())
        optimizer.step()
        with booster.full_parameters(model) as full:
            before = {name: value.clone() for name, value in full.items()}
        with mean.applied(), booster.full_parameters(model) as full:
            assert all(bool(value.isfinite().all()) for value in full.values())
        with booster.full_parameters(model) as full:
            same = all(torch.equal(value, before[name]) for name, value in full.items())
        error = ""
        try:
            with mean.applied(), booster.full_parameters(model) as full:
                full["adapters.0.weight"].add_(1.0)
        except UsageError as err:
            error = str(err)
        found[precision] = same, error
    return found


@pytest.mark.parametrize(
    "piece",
    [
        Zero(stage=1),
        Zero(stage=2, gather="forward"),
        Zero(stage=2, offload="optimizer"),
        Zero(stage=3),
        Zero(stage=3, offload="optimizer"),
    ],
)
def test_averages_may_be_read_whole_and_not_edited(piece: Zero) -> None:
    """Reading is no change, whatever keeps masters; an edit would be lost, and is an error."""
    for found in run_ranks(look_at_averages, 2, piece):
        for precision, (same, error) in found.items():
            assert same, precision
            assert "'adapters.0.weight' was changed" in error, precision


def train_from(root: Path, stage: Stage, steps: range) -> dict[str, torch.Tensor]:
    """Load what is there, train some steps with Adam, save, and return the weights."""
    model = build("tied")
    booster = Booster(Zero(stage=stage), precision="fp64", max_grad_norm=0.5)
    model, optimizer = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.02))
    booster.load(root, missing_ok=True)
    for step in steps:
        whole = torch.cat([batch_of(rank, step, rows=2) for rank in range(3)])
        mine = whole.tensor_split(booster.data_degree)[booster.data_rank]
        booster.forward_backward(model, (mine, torch.ones(len(mine), 5).double()), nn.MSELoss())
        optimizer.step()
        optimizer.zero_grad()
    booster.save(root)
    with booster.full_parameters(model) as full:
        return {name: value.clone() for name, value in full.items()}


@pytest.mark.parametrize("stages", [(1, 3, 2), (3, 2, 1)])
def test_any_stage_goes_on_from_any_other_on_other_ranks(
    stages: tuple[Stage, Stage, Stage], tmp_path: Path
) -> None:
    """Values, moments and step counts pass through checkpoints of 3, 2 and 1 ranks."""
    wanted = run_ranks(train_from, 1, tmp_path / "alone", 1, range(6))[0]

    found = [
        run_ranks(train_from, num_ranks, tmp_path / "shared", stage, range(2 * part, 2 * part + 2))
        for part, (stage, num_ranks) in enumerate(zip(stages, (3, 2, 1), strict=True))
    ]

    for name, value in found[-1][0].items():
        assert_close(value, wanted[name], name)


class Writes(nn.Module):
    """Writes over what its own backward needs."""

    def __init__(self) -> None:
        """Make a layer."""
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return a product whose factor is zeroed."""
        found: torch.Tensor = self.layer(inputs).exp()
        result = found * found.detach()
        found.zero_()
        return result


def keep_of_graphs() -> tuple[bool, str]:
    """Return whether a forward without backward is freed, and what backward says to values written over."""
    storages = []

    def note(_module: nn.Module, _args: Any, outputs: torch.Tensor) -> None:
        storages.append(weakref.ref(outputs.untyped_storage()))

    booster, model, _ = boost()
    handle = model.blocks[1].register_forward_hook(note)
    model(batch_of(0, 0))
    handle.remove()
    is_freed = storages[0]() is None
    booster.release(model)
    torch.manual_seed(1)
    other: Any = Writes().double()
    other, _ = Booster(Zero(stage=3), precision="fp64").boost(other, sgd(other))
    loss = other(torch.ones(2, 5, dtype=torch.float64)).sum()
    try:
        loss.backward()
    except UsageError as err:
        return is_freed, err.message
    return is_freed, ""


def test_graphs_without_backward_are_freed_and_values_written_over_are_noticed() -> None:
    """As in torch, although what autograd saves is packed."""
    for is_freed, message in run_ranks(keep_of_graphs, 2):
        assert is_freed
        assert "shape (2, 3)" in message
