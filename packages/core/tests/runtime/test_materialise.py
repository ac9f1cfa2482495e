"""Models built on the meta device: memory comes with boost, and values are the same on any layout."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from colossal_core import Booster, CapabilityError, launch
from colossal_testkit import run_ranks, run_ranks_expecting_errors

from .strategy_cases import make_registry
from .third_party_stages import TiedChain

Tensors = dict[str, torch.Tensor]


class Awkward(nn.Module):
    """Every kind of tensor: buffers that are kept and not, integers, 0-d, frozen, unused, tied."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(5, 7)
        self.norm = nn.BatchNorm1d(7)
        self.back = nn.Linear(7, 7, bias=False)
        self.again = nn.Linear(7, 7, bias=False)
        self.again.weight = self.back.weight
        self.frozen = nn.Linear(7, 3).requires_grad_(requires_grad=False)
        self.scale = Scale()

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        """Map ``[batch, 5]`` to ``[batch, 3]``."""
        inner = torch.tanh(self.norm(self.enter(samples)))
        outputs: torch.Tensor = self.frozen(self.again(self.back(inner))) * self.scale()
        return outputs


class Scale(nn.Module):
    """A parameter and a buffer of a user's own, who says how they begin."""

    offset: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.empty(()))
        self.register_buffer("offset", torch.empty(()), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Begin at two and a half."""
        nn.init.constant_(self.factor, 2.0)
        self.offset.fill_(0.5)

    def forward(self) -> torch.Tensor:
        """Return the factor."""
        total: torch.Tensor = self.factor + self.offset
        return total


def begin(precision: str = "fp32") -> tuple[Tensors, float]:
    """Boost a model without memory; return its tensors, and the loss after two steps."""
    launch(seed=3)
    with torch.device("meta"):
        model = Awkward()
    enter = model.enter.weight
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    booster = Booster(precision=precision)
    model, optimizer = booster.boost(model, optimizer)
    assert model.enter.weight is enter
    with booster.full_parameters(model) as shown:
        found = {name: tensor.detach().clone() for name, tensor in shown.items()}
    found.update({name: tensor.clone() for name, tensor in model.named_buffers()})
    samples = torch.linspace(-1, 1, 60).view(12, 5)[booster.data_rank :: booster.data_degree]
    loss = torch.zeros(())
    for _ in range(2):
        loss = booster.forward_backward(model, (samples, samples[:, :3]), nn.functional.mse_loss)
        optimizer.step()
        optimizer.zero_grad()
    return found, float(loss)


def test_values_are_the_same_at_any_number_of_ranks() -> None:
    """Parameters and buffers, as their modules begin; training goes on from them as from any others."""
    alone = run_ranks(begin, 1)[0]

    for found, loss in run_ranks(begin, 3):
        assert found.keys() == alone[0].keys()
        assert all(torch.equal(tensor, found[name]) for name, tensor in alone[0].items())
        assert loss == pytest.approx(alone[1], rel=1e-5)
    values = alone[0]
    assert float(values["scale.factor"]) == 2.0
    assert float(values["scale.offset"]) == 0.5
    assert values["norm.running_var"].tolist() == [1.0] * 7
    assert int(values["norm.num_batches_tracked"]) == 0
    assert 0 < float(values["enter.weight"].abs().max()) <= 5**-0.5
    assert not torch.equal(values["back.weight"][:5, :5], values["enter.weight"][:5, :5])


def test_bf16_rounds_what_fp32_begins_with() -> None:
    """Masters hold the values of fp32."""
    wide, narrow = run_ranks(begin, 2)[0][0], run_ranks(begin, 2, "bf16")[0][0]

    for name, tensor in wide.items():
        is_parameter = name in {"enter.weight", "back.weight", "frozen.weight"}
        assert torch.equal(tensor.bfloat16() if is_parameter else tensor.to(narrow[name].dtype), narrow[name])


def begin_chain(pieces: dict[str, dict[str, int]]) -> Tensors:
    """Boost a chain without memory under some strategies."""
    launch(seed=3)
    with torch.device("meta"):
        model = TiedChain(12, 6, 3)
    booster = Booster(plan={"pieces": pieces}, registry=make_registry())
    model, _ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with booster.full_parameters(model) as shown:
        return {name: tensor.detach().clone() for name, tensor in shown.items()}


@pytest.mark.parametrize("pieces", [{"vocabulary": {"degree": 2}}, {"stages": {"degree": 2}}])
def test_cut_models_begin_as_whole_ones(pieces: dict[str, dict[str, int]]) -> None:
    """A rank gives memory to its boxes only, and they are those of the whole."""
    whole = run_ranks(begin_chain, 1, {})[0]

    for found in run_ranks(begin_chain, 2, pieces):
        assert all(torch.equal(tensor, found[name]) for name, tensor in whole.items())


class Silent(nn.Module):
    """A parameter that nothing initialises."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))


def begin_silent() -> None:
    """Boost what cannot begin."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), Silent())
    Booster().boost(model)


def test_module_that_cannot_initialise_itself_is_named() -> None:
    """On every rank, with the method to write."""
    errors = run_ranks_expecting_errors(begin_silent, 2, error=CapabilityError)

    assert "Silent '1'" in str(errors[0])
    assert "reset_parameters()" in str(errors[0])


class Forgetful(nn.Linear):
    """Leaves its bias as it finds it."""

    def reset_parameters(self) -> None:
        """Set the weight only."""
        nn.init.ones_(self.weight)


def begin_forgetful() -> None:
    """Boost what stays without values."""
    with torch.device("meta"):
        model = nn.Sequential(Forgetful(2, 2))
    Booster().boost(model)


def test_tensor_that_stays_without_values_is_named() -> None:
    """Memory as it happens to be is nothing to train from."""
    errors = run_ranks_expecting_errors(begin_forgetful, 2, error=CapabilityError)

    assert "'bias' of Forgetful '0' has no values" in str(errors[0])
