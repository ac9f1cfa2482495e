"""Optimizers on segments: the arithmetic is the user's own, and so is the state that they show."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from colossal_core import Booster
from colossal_core.errors import CapabilityError
from colossal_core.runtime import segments
from colossal_core.runtime.optimizers import optimizer_spec
from colossal_testkit import run_ranks
from colossal_testkit.stories import Awkward, assert_close, batch_of, tiny_buffers

Make = Callable[[Iterable[Any]], torch.optim.Optimizer]


class Shrink(torch.optim.Optimizer):
    """A user's own optimizer: follows the gradient's direction, remembers shapes, and counts in its group."""

    def __init__(self, params: Iterable[Any], lr: float = 0.05) -> None:
        """Keep a count in each group."""
        super().__init__(params, {"lr": lr, "count": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Divide each gradient by its own norm, and by the square root of how often its group was stepped."""
        for group in self.param_groups:
            group["count"] += 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["shape"] = list(parameter.shape)
                state["steps"] = state.get("steps", 0) + 1
                state.setdefault("mean", torch.zeros_like(parameter)).lerp_(parameter.grad, 0.3)
                size = state["mean"].norm().clamp_min(1e-3) * group["count"] ** 0.5
                parameter.sub_(group["lr"] * state["mean"] / size)


class Centred(torch.optim.AdamW):
    """A subclass of a known optimizer that does something with whole gradients."""

    def step(self, closure: Any = None) -> Any:
        """Take the mean out of every matrix gradient first."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.dim() > 1:
                    parameter.grad = parameter.grad - parameter.grad.mean()
        return super().step(closure)


OPTIM = torch.optim
CASES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adadelta": (OPTIM.Adadelta, {"lr": 0.5, "weight_decay": 0.1}),
    "adadelta-foreach": (OPTIM.Adadelta, {"lr": 0.5, "foreach": True, "maximize": True}),
    "adagrad": (OPTIM.Adagrad, {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.2}),
    "adagrad-fused": (OPTIM.Adagrad, {"lr": 0.1, "fused": True, "weight_decay": 0.1}),
    "adam": (OPTIM.Adam, {"lr": 0.02, "weight_decay": 0.1}),
    "adam-amsgrad": (OPTIM.Adam, {"lr": 0.02, "amsgrad": True, "maximize": True}),
    "adam-fused": (OPTIM.Adam, {"lr": 0.02, "fused": True, "amsgrad": True}),
    "adam-foreach": (OPTIM.Adam, {"lr": 0.02, "foreach": True}),
    "adam-tensor-lr": (OPTIM.Adam, {"lr": torch.tensor(0.02, dtype=torch.float64), "fused": True}),
    "adamw": (OPTIM.AdamW, {"lr": 0.02, "weight_decay": 0.3}),
    "adamw-fused": (OPTIM.AdamW, {"lr": 0.02, "weight_decay": 0.3, "fused": True, "maximize": True}),
    "adamw-amsgrad": (OPTIM.AdamW, {"lr": 0.02, "amsgrad": True, "foreach": True}),
    "adamax": (OPTIM.Adamax, {"lr": 0.02, "weight_decay": 0.1}),
    "asgd": (OPTIM.ASGD, {"lr": 0.05, "lambd": 0.01, "t0": 2.0}),
    "nadam": (OPTIM.NAdam, {"lr": 0.02, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    "nadam-foreach": (OPTIM.NAdam, {"lr": 0.02, "foreach": True}),
    "radam": (OPTIM.RAdam, {"lr": 0.02, "weight_decay": 0.1}),
    "rmsprop": (OPTIM.RMSprop, {"lr": 0.01, "momentum": 0.9, "centered": True}),
    "rprop": (OPTIM.Rprop, {"lr": 0.01}),
    "sgd": (OPTIM.SGD, {"lr": 0.1}),
    "sgd-momentum": (OPTIM.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    "sgd-nesterov": (OPTIM.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}),
    "sgd-fused": (OPTIM.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
    "adafactor": (OPTIM.Adafactor, {"lr": 0.05, "weight_decay": 0.1}),
    "own": (Shrink, {}),
    "subclass": (Centred, {"lr": 0.02, "weight_decay": 0.3}),
}
WHOLE = {"adafactor", "own", "subclass", "muon"}


class OneElement(Awkward):
    """The awkward model without its empty parameter, which some optimizers of torch cannot hold."""

    def __init__(self) -> None:
        """Give the empty parameter an element."""
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(1, 1, dtype=torch.float64))


def build() -> nn.Module:
    """Make the model of these tests from a fixed seed."""
    torch.manual_seed(0)
    return OneElement()


def groups_of(model: nn.Module, lr: Any) -> list[dict[str, Any]]:
    """Put biases into a group of their own, and keep a third group empty."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    return [{"params": matrices}, {"params": others, "lr": lr * 0.5}, {"params": []}]


def make(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """Make an optimizer of the list over a model."""
    kind, settings = CASES[name]
    settings = dict(settings)
    if isinstance(settings.get("lr"), torch.Tensor):
        settings["lr"] = settings["lr"].clone()
    return kind(groups_of(model, settings.get("lr", 0.05)), **settings)


def loss_of(model: Any, rank: int, step: int) -> torch.Tensor:
    """Return a loss that leaves head B without a gradient in odd steps."""
    loss: torch.Tensor = model(batch_of(rank, step), "a" if step % 2 else "ab").square().mean()
    return loss


def train_boosted(
    model: Any, optimizer: torch.optim.Optimizer, steps: Iterable[int], rank: int
) -> list[list[torch.Tensor]]:
    """Step and return the parameters after each step."""
    found = []
    for step in steps:
        loss_of(model, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append([parameter.detach().clone() for parameter in model.parameters()])
    return found


def train_plain(
    model: Any, optimizer: torch.optim.Optimizer, steps: Iterable[int], world_size: int
) -> list[list[torch.Tensor]]:
    """Step plain torch on the mean over the ranks and return the parameters after each step."""
    found = []
    for step in steps:
        for rank in range(world_size):
            (loss_of(model, rank, step) / world_size).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append([parameter.detach().clone() for parameter in model.parameters()])
    return found


def compare(found: list[list[torch.Tensor]], wanted: list[list[torch.Tensor]]) -> None:
    """Compare the parameters after each step."""
    names = [name for name, _ in build().named_parameters()]
    assert len(found) == len(wanted)
    for step, (mine, theirs) in enumerate(zip(found, wanted, strict=True)):
        for name, one, other in zip(names, mine, theirs, strict=True):
            assert_close(one, other, f"{name} after step {step}")


def compare_states(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Compare two state dicts: the same parameters, the same names, the same values and shapes."""
    assert found["param_groups"] == wanted["param_groups"]
    assert found["state"].keys() == wanted["state"].keys()
    for index, state in wanted["state"].items():
        assert found["state"][index].keys() == state.keys(), index
        for name, value in state.items():
            other = found["state"][index][name]
            if isinstance(value, torch.Tensor):
                assert_close(other, value, f"{name} of {index}")
                assert other.dtype == value.dtype, f"{name} of {index}"
            else:
                assert other == value, f"{name} of {index}"


# --- five steps of every optimizer -----------------------------------------------------------------------


def run_cases(names: list[str], chunk: int) -> dict[str, Any]:
    """Train with several optimizers; return parameters and states."""
    before = segments.CHUNK_NUMEL
    vars(segments)["CHUNK_NUMEL"] = chunk
    found: dict[str, Any] = {}
    for name in names:
        model = build()
        with tiny_buffers(200, 60):
            model, optimizer = Booster(precision="fp64").boost(model, make(name, model))
        weights = train_boosted(model, optimizer, range(5), dist.get_rank())
        found[name] = (weights, optimizer.state_dict())
    vars(segments)["CHUNK_NUMEL"] = before
    return found


BATCHES = [tuple(CASES)[start : start + 7] for start in range(0, len(CASES), 7)]


@pytest.mark.parametrize("names", BATCHES, ids="+".join)
def test_every_optimizer_computes_what_torch_computes(names: tuple[str, ...]) -> None:
    """Two groups and an empty one, gradients that are missing every other step, weights cut by segments."""
    results = run_ranks(run_cases, 2, list(names), 16)

    for name in names:
        model = build()
        optimizer = make(name, model)
        wanted = train_plain(model, optimizer, range(5), 2)
        for result in results:
            weights, state = result[name]
            compare(weights, wanted)
            compare_states(state, optimizer.state_dict())


def run_muon() -> list[list[torch.Tensor]]:
    """Train the matrices with Muon, which orthogonalises them."""
    model = build()
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    optimizer = torch.optim.Muon(matrices, lr=0.05)
    with tiny_buffers():
        model, optimizer = Booster(precision="fp64").boost(model, optimizer)
    return train_boosted(model, optimizer, range(4), dist.get_rank())


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_muon_sees_whole_matrices() -> None:
    """An update that needs the matrix gets it, not a stretch of a buffer."""
    results = run_ranks(run_muon, 2)

    model = build()
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    wanted = train_plain(model, torch.optim.Muon(matrices, lr=0.05), range(4), 2)
    for result in results:
        compare(result, wanted)


@pytest.mark.parametrize("name", CASES)
def test_flat_updates_are_used_only_where_they_are_known_to_be_right(name: str) -> None:
    """Optimizers from elsewhere and subclasses that override ``step`` see whole parameters."""
    assert optimizer_spec(make(name, build())).shapes == ("whole" if name in WHOLE else "flat")


def test_subclass_that_keeps_the_step_stays_flat() -> None:
    """A subclass that only changes defaults computes what its parent does."""

    class Tuned(torch.optim.AdamW):
        """AdamW with other defaults."""

        def __init__(self, params: Iterable[Any]) -> None:
            """Choose them."""
            super().__init__(params, lr=0.3)

    assert optimizer_spec(Tuned(build().parameters())).shapes == "flat"


@pytest.mark.parametrize(
    ("kind", "settings", "reason"),
    [
        (torch.optim.LBFGS, {}, "evaluates the loss several times"),
        (torch.optim.SparseAdam, {}, "needs sparse gradients"),
        (torch.optim.Adam, {"differentiable": True}, "differentiable=True"),
    ],
)
def test_optimizers_that_cannot_work_are_refused_with_the_reason(
    kind: type[torch.optim.Optimizer], settings: dict[str, Any], reason: str
) -> None:
    """The refusal comes at boost, and leaves the model alone."""
    model = nn.Linear(3, 2)
    before = model.weight.data_ptr()

    with pytest.raises(CapabilityError, match=reason):
        Booster().boost(model, kind(model.parameters(), **settings))

    assert model.weight.data_ptr() == before


# --- state -----------------------------------------------------------------------------------------------

ROUND_TRIPS = ["adamw-fused", "sgd-momentum", "nadam", "asgd", "rprop", "adagrad", "adafactor", "own"]


def continue_from_plain(names: list[str], how: str) -> dict[str, Any]:
    """Take over two steps of a plain optimizer, before boost or by ``load_state_dict``, and train on."""
    found: dict[str, Any] = {}
    for name in names:
        model = build()
        plain = make(name, model)
        train_plain(model, plain, range(2), 2)
        optimizer = plain if how == "before boost" else make(name, model)
        with tiny_buffers():
            model, boosted = Booster(precision="fp64").boost(model, optimizer)
        if how != "before boost":
            boosted.load_state_dict(plain.state_dict())
        early = boosted.state_dict()
        found[name] = (early, train_boosted(model, boosted, range(2, 5), dist.get_rank()))
    return found


@pytest.mark.parametrize("how", ["before boost", "load_state_dict"])
def test_state_of_a_plain_optimizer_is_taken_over(how: str) -> None:
    """Steps that were taken before boost, or loaded, count as they do in torch, and show unchanged."""
    results = run_ranks(continue_from_plain, 2, ROUND_TRIPS, how)

    for name in ROUND_TRIPS:
        model = build()
        optimizer = make(name, model)
        train_plain(model, optimizer, range(2), 2)
        early = optimizer.state_dict()
        early["state"] = {
            index: {
                key: value.clone() if isinstance(value, torch.Tensor) else value
                for key, value in state.items()
            }
            for index, state in early["state"].items()
        }
        wanted = train_plain(model, optimizer, range(2, 5), 2)
        for result in results:
            state, weights = result[name]
            if how != "before boost" or name != "own":  # the count of the group has gone on since
                compare_states(state, {**early, "param_groups": state["param_groups"]})
            compare(weights, wanted)


def hand_over(names: list[str]) -> dict[str, Any]:
    """Train two boosted steps; return what is needed to go on in plain torch."""
    found: dict[str, Any] = {}
    for name in names:
        model = build()
        with tiny_buffers():
            model, optimizer = Booster(precision="fp64").boost(model, make(name, model))
        train_boosted(model, optimizer, range(2), dist.get_rank())
        found[name] = (model.state_dict(), optimizer.state_dict())
    return found


def test_plain_torch_goes_on_from_a_boosted_state() -> None:
    """``state_dict`` is what torch would have saved: shapes, steps and indices."""
    results = run_ranks(hand_over, 2, ROUND_TRIPS)

    for name in ROUND_TRIPS:
        model = build()
        optimizer = make(name, model)
        train_plain(model, optimizer, range(2), 2)
        wanted = resume(name, model.state_dict(), optimizer.state_dict())
        for weights, state in (result[name] for result in results):
            compare(resume(name, weights, state), wanted)


def resume(name: str, weights: dict[str, Any], state: dict[str, Any]) -> list[list[torch.Tensor]]:
    """Load a state into plain torch and train on."""
    model = build()
    model.load_state_dict(weights)
    optimizer = make(name, model)
    optimizer.load_state_dict(state)
    return train_plain(model, optimizer, range(2, 5), 2)


def test_loading_leaves_the_loaded_state_alone() -> None:
    """Training on changes neither saved moments nor saved groups, with a learning rate in a tensor."""
    model = build()
    model, optimizer = Booster(precision="fp64").boost(model, make("adam-tensor-lr", model))
    train_boosted(model, optimizer, range(2), 0)
    saved = optimizer.state_dict()
    saved["param_groups"][0]["lr"] = torch.tensor(0.02, dtype=torch.float64)
    moment = saved["state"][0]["exp_avg"].clone()

    optimizer.load_state_dict(saved)
    optimizer.param_groups[0]["lr"].mul_(3.0)
    train_boosted(model, optimizer, range(2, 4), 0)

    assert torch.equal(saved["state"][0]["exp_avg"], moment)
    assert float(saved["param_groups"][0]["lr"]) == 0.02
    assert float(saved["state"][0]["step"]) == 2


class Hollow(nn.Module):
    """Has empty parameters before, between and behind others, and a group of nothing else."""

    def __init__(self) -> None:
        """Make them in fp64."""
        super().__init__()
        sizes = [(0,), (3,), (0, 2), (2, 2), (1,), (), (0,)]
        values = [torch.linspace(0.1, 1.0, max(1, math.prod(size))).double() for size in sizes]
        self.items = nn.ParameterList(
            nn.Parameter(value[: math.prod(size)].reshape(size))
            for value, size in zip(values, sizes, strict=True)
        )

    def forward(self) -> torch.Tensor:
        """Use every parameter."""
        total: torch.Tensor = sum((item.square().sum() for item in self.items), torch.zeros(()))
        return total


def train_hollow(name: str, *, boosts: bool) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Train parameters without elements and with few, two of them in a group of their own."""
    kind, settings = CASES[name]
    model: Any = Hollow()
    items = list(model.items)
    optimizer = kind([{"params": items[1:6]}, {"params": [items[0], items[6]]}], **settings)
    if boosts:
        with tiny_buffers():
            model, optimizer = Booster(precision="fp64").boost(model, optimizer)
    for _ in range(3):
        model().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer.state_dict(), [item.detach().clone() for item in model.items]


@pytest.mark.parametrize("chunk", [1, 2, 1000])
@pytest.mark.parametrize("name", ["adamw", "adamw-fused", "sgd-momentum", "rmsprop", "asgd"])
def test_empty_and_zero_dimensional_parameters_have_a_state_as_in_torch(
    name: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What torch keeps for parameters without elements, and for scalars, is there, wherever segments end."""
    monkeypatch.setattr(segments, "CHUNK_NUMEL", chunk)
    wanted_state, wanted = train_hollow(name, boosts=False)

    state, found = train_hollow(name, boosts=True)

    compare_states(state, wanted_state)
    for one, other in zip(found, wanted, strict=True):
        assert_close(one, other, name)
