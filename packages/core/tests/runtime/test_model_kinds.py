"""Models of every kind train: recurrent, sharing parameters, frozen, without parameters, in any layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from colossal_core import Booster
from colossal_testkit import run_ranks
from colossal_testkit.stories import assert_close, batch_of, tiny_buffers

from .small_models import make, train


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
        """Parameters that lie in memory otherwise than row by row."""

        def __init__(self) -> None:
            super().__init__()
            self.turned = nn.Parameter(torch.randn(4, 5, dtype=torch.float64).t())
            self.slice = nn.Parameter(storage[3:23:5])
            convolution = torch.randn(4, 3, 2, 2, dtype=torch.float64)
            self.convolution = nn.Parameter(convolution.contiguous(memory_format=torch.channels_last))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Use all of them."""
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
