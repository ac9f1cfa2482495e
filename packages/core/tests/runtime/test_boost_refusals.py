"""What ``boost`` refuses, with the reason, and leaves as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from colossal_core import Booster
from colossal_core.errors import CapabilityError, ColossalError, UsageError
from colossal_testkit import run_ranks

from .small_models import make, train


def foreign_parameters(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Pass an optimizer over another model."""
    del optimizer
    return [model, torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)]


def one_parameter_in_two(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Give the last layer to a second optimizer as well."""
    return [model, optimizer, torch.optim.SGD(model[2].parameters(), lr=0.1)]


def the_same_twice(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Pass the model twice."""
    return [model, optimizer, model]


def no_model(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Forget the model."""
    del model
    return [optimizer]


def something_else(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Pass what cannot be boosted."""
    return [model, optimizer, "model"]


def in_data_parallel(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Wrap the model for several devices."""
    return [nn.DataParallel(model), optimizer]


def a_live_graph(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Keep a loss from before boost."""
    loss: torch.Tensor = model(torch.ones(1, 5)).sum()
    return [model, optimizer, lambda: loss]


def shared_memory(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Tie two Parameters by their memory."""
    model[2].bias = nn.Parameter(model.get_parameter("0.bias").detach()[:3])
    return [model, optimizer]


def a_sparse_embedding(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Use sparse gradients."""
    model.append(nn.Embedding(3, 2, sparse=True))
    return [model, optimizer]


def no_shape(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Use a lazy layer."""
    model.append(nn.LazyLinear(3))
    return [model, optimizer]


def no_values(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Use a parameter on the meta device that nothing initialises."""
    model.append(nn.ParameterList([nn.Parameter(torch.empty(3, device="meta"))]))
    return [model, optimizer]


class Labelled(nn.Parameter):
    """A Parameter of another library."""


def a_strange_parameter(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Use a subclass of Parameter."""
    model[0].register_parameter("label", Labelled(torch.zeros(2)))
    return [model, optimizer]


def complex_values(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Train a complex parameter."""
    model[0].register_parameter("phase", nn.Parameter(torch.zeros(2, dtype=torch.complex64)))
    optimizer.add_param_group({"params": [model[0].phase]})
    return [model, optimizer]


REFUSALS: list[tuple[Callable[..., list[Any]], type[ColossalError], str]] = [
    (foreign_parameters, UsageError, r"shape \(2, 2\) that belongs to none of the models"),
    (one_parameter_in_two, UsageError, r"'2.weight' is in two optimizers"),
    (the_same_twice, UsageError, r"the same Sequential is given twice"),
    (no_model, UsageError, r"given no model"),
    (something_else, UsageError, r"cannot boost a str"),
    (in_data_parallel, UsageError, r"wrapped in DataParallel\n  next: pass the module inside"),
    (a_live_graph, UsageError, r"graph over parameter '0.weight' is alive"),
    (shared_memory, UsageError, r"'0.bias' and '2.bias' share memory"),
    (a_sparse_embedding, CapabilityError, r"embedding '3' has sparse=True"),
    (no_shape, CapabilityError, r"'3.weight' has no shape yet"),
    (no_values, CapabilityError, r"ParameterList '3' of model has '0' on the meta device"),
    (a_strange_parameter, UsageError, r"'0.label' is a Labelled"),
    (complex_values, CapabilityError, r"'0.phase' is complex"),
]


@pytest.mark.parametrize(
    ("prepare", "kind", "message"), REFUSALS, ids=[case[0].__name__ for case in REFUSALS]
)
def test_what_cannot_be_boosted_is_refused_and_left_alone(
    prepare: Callable[..., list[Any]], kind: type[ColossalError], message: str
) -> None:
    """The error says why and what to do; model and optimizer train on as if nothing had been."""
    model, optimizer = make()
    objects = prepare(model, optimizer)
    plain = [value for value in model.parameters() if type(value) is nn.Parameter and not value.is_meta]
    places = [value.data_ptr() for value in plain]

    booster = Booster()
    with pytest.raises(kind, match=message) as caught:
        booster.boost(*objects)

    assert caught.value.hint
    assert [value.data_ptr() for value in plain] == places
    optimizer.step()
    with pytest.raises(UsageError, match="needs a boosted model"):
        booster.report()


def wrap_in_ddp() -> str:
    """Boost a model that torch's DDP has wrapped."""
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    try:
        Booster().boost(model)
    except UsageError as error:
        return str(error)
    return ""


def test_models_of_ddp_are_refused_with_what_to_pass() -> None:
    """Two systems would both reduce."""
    for message in run_ranks(wrap_in_ddp, 2):
        assert "wrapped in DistributedDataParallel" in message
        assert "model.module" in message


def test_two_tensors_of_one_buffer_may_share_memory() -> None:
    """Only parameters are moved into flat buffers; a buffer that is a view of another one is harmless."""
    model, optimizer = make()
    table = torch.arange(6.0)
    model.register_buffer("table", table)
    model.register_buffer("head", table[:2], persistent=False)

    model, optimizer = Booster().boost(model, optimizer)
    train(model, optimizer, range(1))

    assert model.head.data_ptr() == model.table.data_ptr()
