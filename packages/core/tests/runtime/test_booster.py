"""``boost`` and ``release``: what goes in, what comes back, what is refused, and nothing half done."""

from __future__ import annotations

import copy
import gc
import io
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import lr_scheduler

from colossal_core import Booster, Replicated
from colossal_core.errors import CapabilityError, ColossalError, UsageError
from colossal_core.runtime.optimizer import BoostedOptimizer
from colossal_testkit import run_ranks

from .stories import Awkward, assert_close, batch_of, sgd, tiny_buffers


def make(*, seed: int = 0) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """Make a small fp32 model and its optimizer."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model: Any, optimizer: Any, steps: range) -> list[torch.Tensor]:
    """Train a model alone and return its parameters."""
    dtype = next(value.dtype for value in model.parameters() if value.is_floating_point())
    for step in steps:
        model(batch_of(0, step).to(dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


# --- what comes back -------------------------------------------------------------------------------------


def test_everything_comes_back_in_its_place() -> None:
    """Any order and subset, None and keywords included; models and criteria are the same objects."""
    model, optimizer = make()
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    criterion = nn.CrossEntropyLoss()

    back = Booster().boost(criterion, None, optimizer, nn.functional.mse_loss, model, scheduler, teacher=None)

    assert len(back) == 7
    assert back[0] is criterion
    assert back[1] is None
    assert isinstance(back[2], BoostedOptimizer)
    assert back[3] is nn.functional.mse_loss
    assert back[4] is model
    assert isinstance(back[5], lr_scheduler.StepLR)
    assert back[6] is None


def test_one_object_comes_back_alone() -> None:
    """``model = booster.boost(model)``."""
    model, _ = make()

    assert Booster().boost(model) is model


def test_model_comes_back_with_an_optimizer_of_none() -> None:
    """The same line serves training and inference."""
    model, _ = make()

    assert Booster().boost(model, None) == (model, None)


def test_keywords_come_last_and_name_their_objects() -> None:
    """Messages call a model by the name that the user gave it."""
    model, optimizer = make()
    other = make()[0].double()

    booster = Booster()
    with pytest.raises(UsageError, match="float64"):
        booster.boost(optimizer, model, critic=other)
    returned = Booster().boost(critic=model, optimizer=optimizer)

    assert returned[0] is model
    assert isinstance(returned[1], BoostedOptimizer)


def test_model_keeps_its_class_attributes_and_parameters() -> None:
    """The object is changed in place: same class, same Parameter objects, same names."""
    model: Any = Awkward()
    model.note = "mine"
    before = dict(model.named_parameters())
    names = list(model.state_dict())

    boosted, _ = Booster(precision="fp64").boost(model, sgd(model))

    assert boosted is model
    assert type(boosted) is Awkward
    assert boosted.note == "mine"
    assert list(boosted.state_dict()) == names
    assert all(value is before[name] for name, value in boosted.named_parameters())
    assert boosted.tied.weight is boosted.head_b.weight


def test_copies_and_checkpoints_of_a_boosted_model_are_plain() -> None:
    """``deepcopy``, ``state_dict`` and ``torch.save`` work as in torch, and a copy does not follow."""
    model, optimizer = make()
    model, optimizer = Booster().boost(model, optimizer)
    train(model, optimizer, range(2))

    twin = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    again, _ = make(seed=1)
    again.load_state_dict(torch.load(file, weights_only=True))
    before = [value.clone() for value in twin.parameters()]
    after = train(model, optimizer, range(2, 4))

    assert all(torch.equal(one, two) for one, two in zip(twin.parameters(), before, strict=True))
    assert all(torch.equal(one, two) for one, two in zip(again.parameters(), before, strict=True))
    assert not torch.equal(after[0], before[0])
    assert file.getbuffer().nbytes < 10_000
    twin(torch.ones(1, 5)).sum().backward()
    gradient = next(twin.parameters()).grad
    assert gradient is not None
    assert not gradient.isnan().any()


# --- what is refused -------------------------------------------------------------------------------------


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
    """Use a layer on the meta device."""
    model.append(nn.Linear(3, 3, device="meta"))
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
    (no_values, CapabilityError, r"'3.weight' is on the meta device"),
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


# --- twice -----------------------------------------------------------------------------------------------


def test_one_booster_boosts_once() -> None:
    """The message says how to boost several models."""
    model, optimizer = make()
    booster = Booster()
    booster.boost(model, optimizer)

    with pytest.raises(UsageError, match=r"boosted already\n  next: pass everything to one boost\(\) call"):
        booster.boost(make()[0])


@pytest.mark.parametrize("what", ["model", "optimizer", "old optimizer"])
def test_boosting_what_is_boosted_is_refused(what: str) -> None:
    """A second Booster does not take over what the first one holds."""
    model, optimizer = make()
    model, boosted = Booster().boost(model, optimizer)
    objects = {
        "model": [model],
        "optimizer": [make()[0], boosted],
        "old optimizer": [model, optimizer],
    }[what]

    with pytest.raises(UsageError, match="boosted already"):
        Booster().boost(*objects)

    train(model, boosted, range(1))


def test_calls_before_boost_say_what_comes_first() -> None:
    """Every method that needs a model names the call that is missing."""
    booster = Booster()
    model, _ = make()

    for call in (
        lambda: booster.forward_backward(model, (torch.ones(1, 5), torch.ones(1, 3)), nn.MSELoss()),
        lambda: booster.release(model),
        lambda: booster.mean(1.0),
        booster.report,
    ):
        with pytest.raises(UsageError, match=r"call booster.boost\(model, optimizer\) first"):
            call()


def test_models_of_others_are_refused_in_calls() -> None:
    """The message names the models that there are."""
    model, optimizer = make()
    booster = Booster()
    booster.boost(optimizer, actor=model)

    with pytest.raises(UsageError, match="was not boosted by this Booster, which has actor"):
        booster.forward_backward(make()[0], (torch.ones(1, 5), torch.ones(1, 3)), nn.MSELoss())


# --- kinds of models -------------------------------------------------------------------------------------


class Sequence(nn.Module):
    """Embedding, a deep bidirectional LSTM, and a head."""

    def __init__(self) -> None:
        """Build it in fp64."""
        super().__init__()
        self.embed = nn.Embedding(20, 8, padding_idx=0)
        self.lstm = nn.LSTM(8, 5, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(10, 3)
        self.double()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map ``[n, t]`` to ``[n, 3]``."""
        outputs: torch.Tensor = self.head(self.lstm(self.embed(tokens))[0][:, -1])
        return outputs


def tokens_of(rank: int, step: int) -> torch.Tensor:
    """Return tokens; on rank 1 now and then nothing but padding."""
    tokens = torch.randint(20, (2, 4), generator=torch.Generator().manual_seed(100 * step + rank))
    return tokens * int(rank == 0 or step != 1)


def train_lstm() -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Train three steps; return weights, and outputs of the forward that torch's kernels compute."""
    torch.manual_seed(0)
    model: Any = Sequence()
    with tiny_buffers(400, 100):
        booster = Booster(precision="fp64", max_grad_norm=0.2)
        model, optimizer = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))
    for step in range(3):
        model(tokens_of(dist.get_rank(), step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(), model.eval()(tokens_of(0, 9))


def test_lstm_weights_really_train() -> None:
    """Recurrent modules keep lists of their weights; forward computes with the updated ones."""
    results = run_ranks(train_lstm, 2)

    torch.manual_seed(0)
    model = Sequence()
    untrained = model.eval()(tokens_of(0, 9))
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for step in range(3):
        for rank in range(2):
            (model(tokens_of(rank, step)).square().mean() / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        optimizer.step()
        optimizer.zero_grad()
    for weights, outputs in results:
        assert list(weights) == list(model.state_dict())
        for name, value in model.state_dict().items():
            assert_close(weights[name], value, name)
        assert_close(outputs, model.eval()(tokens_of(0, 9)), "outputs")
        assert not torch.allclose(outputs, untrained, atol=1e-3)
        assert not weights["embed.weight"][0].any()


class Shared(nn.Module):
    """A model whose embedding belongs to another one as well."""

    def __init__(self, weight: nn.Parameter) -> None:
        """Build it around a weight ``[4, 3]``."""
        super().__init__()
        self.weight = weight
        self.bias = nn.Parameter(torch.zeros(4, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[n, 3]`` to ``[n, 4]``."""
        return nn.functional.linear(x, self.weight, self.bias)


def train_shared(rank: int | None) -> list[torch.Tensor]:
    """Train two models that share a parameter, on this rank, or in one process for two."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(4, 3, dtype=torch.float64))
    first, second = Shared(weight), Shared(weight)
    parameters = [weight, first.bias, second.bias]
    optimizer: Any = torch.optim.AdamW(parameters, lr=0.05)
    if rank is not None:
        with tiny_buffers():
            first, second, optimizer = Booster(precision="fp64").boost(first, second, optimizer)
        assert first.weight is second.weight
    ranks = [0, 1] if rank is None else [rank]
    for step in range(3):
        for place in ranks:
            x = batch_of(place, step, width=3)
            loss = first(x).square().mean() + second(x * 2).abs().mean()
            (loss / len(ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in parameters]


def train_shared_here() -> list[torch.Tensor]:
    """Train on this rank of the pool."""
    return train_shared(dist.get_rank())


def test_two_models_may_share_a_parameter() -> None:
    """It is one entry, updated once, and stays one object."""
    wanted = train_shared(None)
    for result in run_ranks(train_shared_here, 2):
        for found, reference in zip(result, wanted, strict=True):
            assert_close(found, reference, "parameter")


def test_models_of_different_dtypes_get_the_plans() -> None:
    """One fp64 plan widens an fp32 model beside an fp64 one; both then train."""
    first, _ = make()
    second = make(seed=1)[0].double()
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)

    first, second, boosted = Booster(precision="fp64").boost(first, second, optimizer)
    x = batch_of(0, 0)
    (first(x).sum() + second(x).sum()).backward()
    boosted.step()

    assert {value.dtype for model in (first, second) for value in model.parameters()} == {torch.float64}


@pytest.mark.parametrize("with_optimizer", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_frozen_model_can_be_boosted(precision: str, *, with_optimizer: bool) -> None:
    """A model in which nothing trains computes as before, with or without an optimizer over it."""
    model, optimizer = make()
    model.requires_grad_(requires_grad=False)
    before = [value.detach().clone() for value in model.parameters()]
    wanted = model(torch.ones(2, 5))

    found = Booster(precision=precision).boost(model, *([optimizer] if with_optimizer else []))
    if with_optimizer:
        found[1].step()

    assert torch.allclose(model(torch.ones(2, 5)), wanted, atol=0.02)
    assert all(
        torch.allclose(one.float(), two, atol=0.01)
        for one, two in zip(model.parameters(), before, strict=True)
    )


def test_module_without_parameters_is_a_model_when_it_is_named() -> None:
    """Alone it would be taken for a criterion."""
    flat, (model, optimizer) = nn.Flatten(), make()

    back = Booster().boost(model, optimizer, head=flat)

    assert back[2] is flat


def test_hooks_and_buffers_of_the_user_survive() -> None:
    """Hooks on modules and parameters from before boost still run, once each."""
    model, optimizer = make()
    calls: list[str] = []
    model.register_forward_hook(lambda *_: calls.append("forward"))

    def double(gradient: torch.Tensor) -> torch.Tensor:
        calls.append("gradient")
        return gradient * 2

    next(model.parameters()).register_hook(double)
    plain, reference = make()
    next(plain.parameters()).register_hook(lambda gradient: gradient * 2)

    model, optimizer = Booster().boost(model, optimizer)
    found = train(model, optimizer, range(2))

    assert calls == ["forward", "gradient"] * 2
    for value, wanted in zip(found, train(plain, reference, range(2)), strict=True):
        assert torch.allclose(value, wanted, atol=1e-7)


def test_parameters_in_any_memory_layout_train() -> None:
    """Transposed, expanded in channels-last order, or a slice of something larger: values are what counts."""
    torch.manual_seed(0)
    storage = torch.randn(40, dtype=torch.float64)

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.turned = nn.Parameter(torch.randn(4, 5, dtype=torch.float64).t())
            self.slice = nn.Parameter(storage[3:23:5])
            convolution = torch.randn(4, 3, 2, 2, dtype=torch.float64)
            self.convolution = nn.Parameter(convolution.contiguous(memory_format=torch.channels_last))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = x @ self.turned + self.slice
            return hidden * self.convolution.flatten(1).sum(1)

    torch.manual_seed(0)
    model: Any = Odd()
    torch.manual_seed(0)
    plain = Odd()
    plain.load_state_dict(model.state_dict())
    model, optimizer = Booster(precision="fp64").boost(model, torch.optim.AdamW(model.parameters(), lr=0.1))

    found = train(model, optimizer, range(3))

    for value, wanted in zip(
        found, train(plain, torch.optim.AdamW(plain.parameters(), lr=0.1), range(3)), strict=True
    ):
        assert_close(value, wanted, "parameter")


# --- release ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
def test_released_model_trains_on_in_plain_torch(precision: str) -> None:
    """Parameters own their memory, hooks are gone, and the user's own optimizer goes on with its state."""
    torch.manual_seed(0)
    dtype = torch.float64 if precision == "fp64" else torch.float32
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).to(dtype)
    plain = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    reference = torch.optim.AdamW(plain.parameters(), lr=0.01)
    booster = Booster(precision=precision)
    model, boosted = booster.boost(model, optimizer)
    train(model, boosted, range(2))

    released = booster.release(model)
    found = train(released, optimizer, range(2, 4))

    assert released is model
    storages = {value.untyped_storage()._cdata for value in model.parameters()}
    assert len(storages) == len(list(model.parameters()))
    assert all(value.untyped_storage().nbytes() == value.nbytes for value in model.parameters())
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    tolerance = {"fp64": 1e-10, "fp32": 1e-6, "bf16": 0.02}[precision]
    for value, wanted in zip(found, train(plain, reference, range(4)), strict=True):
        assert torch.allclose(value.to(dtype), wanted, atol=tolerance)


def test_released_optimizer_says_so() -> None:
    """What ``boost`` returned is dead after release; every use names the object that lives."""
    model, optimizer = make()
    booster = Booster()
    model, boosted = booster.boost(model, optimizer)
    train(model, boosted, range(1))
    state = boosted.state_dict()
    booster.release(model)

    for use in (
        boosted.step,
        boosted.state_dict,
        lambda: boosted.load_state_dict(state),
        lambda: boosted.clip_grad_norm_(1.0),
        lambda: boosted.add_param_group({"params": []}),
    ):
        with pytest.raises(UsageError, match="was released"):
            use()


def boost_again() -> list[torch.Tensor]:
    """Boost, train, release, boost with a second Booster, train."""
    torch.manual_seed(0)
    model: Any = Awkward()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for generation in range(2):
        booster = Booster(precision="fp64")
        with tiny_buffers():
            model, boosted = booster.boost(model, optimizer)
        for step in range(2):
            model(batch_of(dist.get_rank(), step + 2 * generation)).square().mean().backward()
            boosted.step()
            boosted.zero_grad()
        booster.release(model)
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_released_model_can_be_boosted_again() -> None:
    """A second Booster continues exactly where the first one stopped."""
    results = run_ranks(boost_again, 2)

    torch.manual_seed(0)
    model = Awkward()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(4):
        for rank in range(2):
            (model(batch_of(rank, step)).square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for weights in results:
        for value, wanted in zip(weights, model.parameters(), strict=True):
            assert_close(value, wanted, "weight")


def release_in_between(when: str) -> tuple[list[torch.Tensor | None], list[torch.Tensor]]:
    """Release after a step, or between a backward of which some ranks have sent a part and the step."""
    torch.manual_seed(0)
    model: Any = Awkward()
    booster = Booster(precision="fp64")
    with tiny_buffers():
        model, optimizer = booster.boost(model, sgd(model))
    for step in range(2):
        model(batch_of(dist.get_rank(), step)).square().mean().backward()
        optimizer.step()
        if when != "kept":
            optimizer.zero_grad()
    if when == "backward":
        model(batch_of(dist.get_rank(), 2), "ab"[dist.get_rank()]).square().mean().backward()
    booster.release(model)
    value = torch.ones(3)
    dist.all_reduce(value)
    assert value.tolist() == [2.0] * 3
    shown = [None if value.grad is None else value.grad.clone() for value in model.parameters()]
    return shown, [value.detach().clone() for value in model.parameters()]


@pytest.mark.parametrize("when", ["cleared", "kept", "backward"])
def test_release_leaves_neither_guards_nor_messages_behind(when: str) -> None:
    """A plain model shows plain gradients or none, and no collective of a rank waits for another one."""
    torch.manual_seed(0)
    model = Awkward()
    optimizer = sgd(model)
    for step in range(2):
        for rank in range(2):
            (model(batch_of(rank, step)).square().mean() / 2).backward()
        optimizer.step()
        if when != "kept":
            optimizer.zero_grad()

    for gradients, weights in run_ranks(release_in_between, 2, when):
        for found, value, wanted in zip(gradients, weights, model.parameters(), strict=True):
            assert_close(value, wanted, "weight")
            assert (found is None) == (wanted.grad is None)
            if found is not None and wanted.grad is not None:
                # As for one rank without clearing: the second backward added to the mean of the first.
                assert_close(found, wanted.grad, "gradient")


# --- small calls -----------------------------------------------------------------------------------------


def call_everything() -> dict[str, Any]:
    """Use what tells a rank its place, and what averages."""
    model, optimizer = make()
    booster = Booster(Replicated(), max_grad_norm=1.0)
    booster.boost(model, optimizer)
    rank = dist.get_rank()
    found = {
        "place": (booster.data_rank, booster.data_degree, booster.is_first, booster.world.rank),
        "mean": booster.mean(float(rank), weight=rank),
        "tensor": booster.mean(torch.tensor(rank + 1.0)),
        "none": "",
        "step": booster.step,
    }
    booster.print("only once")
    try:
        booster.mean(1.0, weight=0.0)
    except UsageError as error:
        found["none"] = str(error)
    return found


def test_ranks_know_their_place_and_average_by_weight(capsys: pytest.CaptureFixture[str]) -> None:
    """``mean`` weighs, and weights that sum to nothing are an error everywhere."""
    results = run_ranks(call_everything, 3)

    for rank, result in enumerate(results):
        assert result["place"] == (rank, 3, rank == 0, rank)
        assert result["mean"] == pytest.approx(5 / 3)
        assert result["tensor"] == pytest.approx(2.0)
        assert "sum to 0.0" in result["none"]
        assert result["step"] == 0
    assert capsys.readouterr().out.count("only once") == 1


def test_report_counts_bytes_by_category() -> None:
    """Memory of a bf16 plan with AdamW: 2 bytes of values and gradients, 4 of masters, 8 of moments."""
    model, optimizer = make()
    booster = Booster(precision="bf16")
    model, optimizer = booster.boost(model, optimizer)
    train(model, optimizer, range(1))
    numel = sum(value.numel() for value in model.parameters())

    memory = booster.report()["memory"]

    assert memory["value"] == 2 * numel
    assert memory["gradient"] == 2 * numel
    assert memory["master"] == 4 * numel
    assert memory["optimizer state"] == 8 * numel


def test_full_parameters_shows_and_keeps_edits() -> None:
    """By serial name; what is written inside is there afterwards."""
    model, optimizer = make()
    booster = Booster()
    booster.boost(model, optimizer)

    with booster.full_parameters(model) as found:
        names = list(found)
        found["0.bias"].fill_(math.pi)

    assert names == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert torch.equal(model.get_parameter("0.bias"), torch.full((4,), math.pi))


def test_describe_names_every_setting_with_its_origin() -> None:
    """The effective plan, a line each."""
    text = Booster(max_grad_norm=0.5).describe()

    assert "max_grad_norm = 0.5" in text
    assert all("(" in line and "=" in line for line in text.splitlines())


# --- lifetimes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("releases", [False, True])
def test_nothing_keeps_a_boosted_model_alive(precision: str, *, releases: bool) -> None:
    """Sweeps boost many models in one process; each is freed with the last reference of the user."""

    def run() -> list[weakref.ref[Any]]:
        model, optimizer = make()
        booster = Booster(precision=precision)
        model, boosted = booster.boost(model, optimizer)
        train(model, boosted, range(2))
        if releases:
            booster.release(model)
        return [weakref.ref(thing) for thing in (model, optimizer, booster, boosted, *model.parameters())]

    references = run()
    for _ in range(3):
        gc.collect()

    assert [reference() for reference in references] == [None] * len(references)


def test_model_outlives_its_booster_as_a_plain_one() -> None:
    """Who keeps only the model has a model: gradients are torch's own."""
    model, optimizer = make()
    model, boosted = Booster().boost(model, optimizer)
    train(model, boosted, range(1))

    del optimizer, boosted
    gc.collect()
    model(torch.ones(1, 5)).sum().backward()
    model(torch.ones(1, 5)).sum().backward()

    plain = copy.deepcopy(model)
    for parameter in plain.parameters():
        parameter.grad = None
    (2 * plain(torch.ones(1, 5)).sum()).backward()
    for parameter, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        assert parameter.grad is not None
        assert wanted.grad is not None
        assert torch.allclose(parameter.grad, wanted.grad)
