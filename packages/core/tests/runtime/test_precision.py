"""Precision: bf16 computes in 16 bits, updates in fp32, and changes nothing else that a user sees."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from colossal_core import Booster
from colossal_core.errors import UsageError
from colossal_testkit import run_ranks
from colossal_testkit.stories import Awkward, batch_of, tiny_buffers


class Block(nn.Module):
    """Two layers with a norm between them."""

    def __init__(self) -> None:
        """Build it."""
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.outer = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[n, 6]`` to ``[n, 6]``."""
        outputs: torch.Tensor = self.outer(self.norm(torch.tanh(self.inner(x))))
        return outputs


class Net(nn.Module):
    """Remembers the dtypes that its parts saw, and carries buffers of every kind."""

    def __init__(self) -> None:
        """Build it."""
        super().__init__()
        self.entry = nn.Linear(5, 6)
        self.block = Block()
        self.last_norm = nn.LayerNorm(6)
        self.leave = nn.Linear(6, 3)
        self.index = nn.Parameter(torch.arange(3), requires_grad=False)
        self.register_buffer("frequencies", torch.linspace(0.1, 1.0, 6))
        self.register_buffer("wide", torch.linspace(0.1, 1.0, 6, dtype=torch.float64), persistent=False)
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("phases", torch.polar(torch.ones(3), torch.ones(3)))
        self.register_buffer("short", torch.ones(2, dtype=torch.float16))
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[n, 5]`` to ``[n, 3]``."""
        self.seen["input"] = x.dtype
        hidden = self.entry(x)
        self.seen["hidden"] = hidden.dtype
        hidden = self.block(hidden)
        self.seen["block"] = hidden.dtype
        hidden = self.last_norm(hidden)
        self.seen["normed"] = hidden.dtype
        outputs: torch.Tensor = self.leave(hidden)
        return outputs


def boost(precision: str = "bf16", **settings: Any) -> tuple[Any, Any, Booster]:
    """Boost the net with AdamW."""
    torch.manual_seed(0)
    model: Any = Net()
    booster = Booster(precision=precision, **settings)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model, optimizer = booster.boost(model, torch.optim.AdamW(trainable, lr=0.01))
    return model, optimizer, booster


# --- what is narrow and what is not ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32), ("fp64", torch.float64)]
)
@pytest.mark.parametrize("by_dtype", [False, True])
def test_parameters_and_inputs_are_cast_and_outputs_are_wide(
    precision: str,
    dtype: torch.dtype,
    by_dtype: bool,  # noqa: FBT001
) -> None:
    """The plan's dtype holds inside the model; under 16 bits outputs leave in fp32."""
    torch.manual_seed(0)
    model: Any = Net()
    model = Booster(precision=dtype if by_dtype else precision).boost(model)

    outputs = model(torch.randn(2, 5, dtype=torch.float32 if precision == "bf16" else dtype))

    floating = [value for value in model.parameters() if value.is_floating_point()]
    assert {value.dtype for value in floating} == {dtype}
    assert set(model.seen.values()) == {dtype}
    assert outputs.dtype == (torch.float32 if precision == "bf16" else dtype)


@pytest.mark.parametrize("precision", ["bf16", "fp32", "fp64"])
def test_buffers_and_integer_parameters_keep_their_dtype_and_values(precision: str) -> None:
    """Positions, masks, counters and rotations mean what they meant; a cast would change them."""
    before = {name: value.clone() for name, value in Net().named_buffers()}

    model, _, _ = boost(precision)

    assert model.index.dtype == torch.int64
    for name, value in model.named_buffers():
        assert value.dtype == before[name].dtype, name
        assert torch.equal(value, before[name]), name


def test_masters_and_moments_are_fp32() -> None:
    """Both are kept wide, and the model's values are the masters, rounded."""
    model, optimizer, booster = boost()
    model(torch.randn(2, 5)).square().mean().backward()
    optimizer.step()

    assert booster._engine is not None
    places = list(booster._engine.manager.places())
    by_state: dict[str, set[torch.dtype]] = defaultdict(set)
    for place in places:
        if not place.key[1].startswith(("index", "freq", "wide", "mask", "count", "phases", "short")):
            by_state[place.state].add(place.tensor.dtype)
    assert by_state == {
        "value": {torch.bfloat16},
        "master": {torch.float32},
        "gradient": {torch.bfloat16},
        "exp_avg": {torch.float32},
        "exp_avg_sq": {torch.float32},
    }
    masters = {place.key: place.tensor for place in places if place.state == "master"}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert torch.equal(masters["model", name].bfloat16().view(parameter.shape), parameter), name
    for state in optimizer.state_dict()["state"].values():
        assert state["exp_avg"].dtype == torch.float32


# --- how far from the truth ------------------------------------------------------------------------------


class Stacked(nn.Module):
    """An MLP of four layers."""

    def __init__(self) -> None:
        """Build it."""
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(5, 16),
            nn.Tanh(),
            nn.Linear(16, 16),
            nn.Tanh(),
            nn.Linear(16, 16),
            nn.Tanh(),
            nn.Linear(16, 3),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[n, 5]`` to ``[n, 3]``."""
        outputs: torch.Tensor = self.layers(x)
        return outputs


def target_of(inputs: torch.Tensor) -> torch.Tensor:
    """Return what the model shall learn."""
    return torch.stack([inputs.sum(1), inputs.prod(1), inputs.norm(dim=1)], dim=1)


def train_bf16(rank: int | None, world_size: int, passes: int) -> list[torch.Tensor]:
    """Train 30 steps on the ranks in bf16; return the masters."""
    torch.manual_seed(0)
    model: Any = Stacked()
    booster = Booster(precision="bf16", max_grad_norm=1.0)
    with tiny_buffers(300, 100):
        model, optimizer = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    for step in range(30):
        for part in range(passes):
            places = range(world_size) if rank is None else [rank]
            inputs = torch.cat([batch_of(place, step + 100 * part, rows=8) for place in places])
            loss = (model(inputs) - target_of(inputs).float()).square().mean() / passes
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert booster._engine is not None
    masters = {
        place.key[1]: place.tensor for place in booster._engine.manager.places() if place.state == "master"
    }
    return [masters[name].reshape(value.shape).clone() for name, value in model.named_parameters()]


def train_bf16_here(world_size: int, passes: int) -> list[torch.Tensor]:
    """Train on this rank of the pool."""
    return train_bf16(dist.get_rank(), world_size, passes)


@pytest.mark.parametrize("passes", [1, 4])
def test_bf16_on_two_ranks_is_as_exact_as_on_one(passes: int) -> None:
    """Against fp64, two ranks err at most twice as much as one with the same scheme, and all ranks alike."""
    results = run_ranks(train_bf16_here, 2, 2, passes)

    torch.manual_seed(0)
    model = Stacked().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(30):
        for part in range(passes):
            inputs = torch.cat([batch_of(rank, step + 100 * part, rows=8) for rank in range(2)])
            ((model(inputs) - target_of(inputs)).square().mean() / passes).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    wanted = list(model.parameters())
    alone = error_of(train_bf16(None, 2, passes), wanted)
    assert alone > 0
    for weights in results:
        assert error_of(weights, wanted) <= 2 * alone
        assert all(torch.equal(one, other) for one, other in zip(weights, results[0], strict=True))


def error_of(weights: list[torch.Tensor], wanted: list[nn.Parameter]) -> float:
    """Return the relative distance."""
    distance = sum(
        float((w.double() - t.detach()).square().sum()) for w, t in zip(weights, wanted, strict=True)
    )
    return float((distance / sum(float(t.detach().square().sum()) for t in wanted)) ** 0.5)


def test_small_updates_are_not_lost() -> None:
    """Updates far below the resolution of bf16 add up in the masters and show in the end."""
    model: Any = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    model, optimizer = Booster(precision="bf16").boost(model, torch.optim.SGD(model.parameters(), lr=1e-4))

    for _ in range(100):
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    assert model.weight.item() == torch.tensor(0.99).bfloat16().item()


def test_many_passes_of_one_window_are_summed_in_fp32() -> None:
    """64 gradients of different size lose nothing to the 8 bits of bf16 on the way."""
    model: Any = nn.Linear(1, 1, bias=False)
    model, optimizer = Booster(precision="bf16").boost(model, torch.optim.SGD(model.parameters(), lr=1.0))
    before = model.weight.item()
    with torch.no_grad():
        model(torch.ones(1, 1))

    for step in range(64):
        model(torch.full((1, 1), 1.0 if step == 0 else 2.0**-9)).sum().backward()
    optimizer.step()

    assert float(optimizer.grad_norm) == pytest.approx(1 + 63 * 2.0**-9, rel=2.0**-8)
    assert model.weight.item() == pytest.approx(before - 1 - 63 * 2.0**-9, abs=2.0**-7)


# --- what the user writes into parameters ----------------------------------------------------------------


def load_state(model: Any, booster: Booster) -> None:
    """Load other weights the usual way."""
    del booster
    model.load_state_dict({name: torch.ones_like(value) for name, value in model.state_dict().items()})


def copy_in_place(model: Any, booster: Booster) -> None:
    """Overwrite parameters without gradients."""
    del booster
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)


def initialise_again(model: Any, booster: Booster) -> None:
    """Use torch's initialisers."""
    del booster
    for parameter in model.parameters():
        nn.init.ones_(parameter)


def edit_full(model: Any, booster: Booster) -> None:
    """Edit what ``full_parameters`` shows."""
    with booster.full_parameters(model) as found:
        for value in found.values():
            value.fill_(1.0)


def assign_data(model: Any, booster: Booster) -> None:
    """Swap the tensors behind the parameters, as averages that are stored and restored do."""
    del booster
    for parameter in model.parameters():
        parameter.data = torch.ones_like(parameter)


def from_vector(model: Any, booster: Booster) -> None:
    """Set all parameters from one vector."""
    del booster
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(torch.ones_like(vector), model.parameters())


@pytest.mark.parametrize(
    "write", [assign_data, from_vector, load_state, copy_in_place, initialise_again, edit_full]
)
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_weights_that_the_user_writes_stay_written(
    write: Callable[[Any, Booster], None], precision: str
) -> None:
    """The next step starts from what the user wrote, not from masters that know nothing of it."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    booster = Booster(precision=precision)
    model, optimizer = booster.boost(model, torch.optim.SGD(model.parameters(), lr=1e-4))
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    write(model, booster)
    model[1](torch.ones(1, 4, dtype=next(model.parameters()).dtype)).sum().backward()
    optimizer.step()

    for parameter in model.parameters():
        assert torch.allclose(parameter.float(), torch.ones(parameter.shape), atol=1e-2)
    assert not torch.equal(model[1].bias.float(), torch.ones(2)) or precision == "bf16"


@pytest.mark.parametrize("convert", [nn.Module.double, nn.Module.half])
def test_models_converted_after_boost_are_refused(convert: Callable[[nn.Module], nn.Module]) -> None:
    """Training would go on in tensors that the model no longer has."""
    torch.manual_seed(0)
    model: Any = nn.Linear(3, 2)
    model, optimizer = Booster().boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    convert(model)

    with pytest.raises(UsageError, match=r"'bias' was made a float(64|16) tensor .* where it is float32"):
        optimizer.step()


# --- keep_float32 ----------------------------------------------------------------------------------------


def test_kept_modules_compute_in_fp32_and_hand_on_bf16() -> None:
    """Their parameters stay wide, inputs are cast up, outputs back."""
    model, optimizer, _ = boost(keep_float32=("*norm*",))
    inside: dict[str, torch.dtype] = {}
    model.last_norm.register_forward_pre_hook(lambda _, args: inside.update(norm=args[0].dtype))

    model(torch.randn(2, 5)).square().mean().backward()
    optimizer.step()

    for name, parameter in model.named_parameters():
        if parameter.is_floating_point():
            assert parameter.dtype == (torch.float32 if "norm" in name else torch.bfloat16), name
    assert inside == {"norm": torch.float32}
    assert model.seen["normed"] == torch.bfloat16


@pytest.mark.parametrize("pattern", ["block", "block*", "*block*"])
def test_kept_block_is_fp32_inside_throughout(pattern: str) -> None:
    """A pattern that matches a block and its parts casts at the block's border only."""
    model, _, _ = boost(keep_float32=(pattern,))
    dtypes: list[torch.dtype] = []
    for part in (model.block.inner, model.block.norm, model.block.outer):
        part.register_forward_hook(lambda _module, _args, output: dtypes.append(output.dtype))

    outputs = model.block(torch.randn(2, 6).bfloat16())

    assert dtypes == [torch.float32] * 3
    assert outputs.dtype == torch.bfloat16
    assert {parameter.dtype for parameter in model.block.parameters()} == {torch.float32}


def test_pattern_that_matches_nothing_is_refused() -> None:
    """A typo would silently leave everything in bf16; names that exist are shown."""
    with pytest.raises(UsageError, match=r"'\*nrom\*' matches none of the 7 modules") as caught:
        boost(keep_float32=("*nrom*",))

    assert "'entry'" in str(caught.value)


def test_pattern_may_match_one_model_of_several() -> None:
    """With two models a pattern that means one of them is no typo."""
    first, second = Net(), nn.Linear(3, 3)

    Booster(precision="bf16", keep_float32=("*norm*",)).boost(first, second)

    assert first.last_norm.weight.dtype == torch.float32
    assert second.weight.dtype == torch.bfloat16


def test_tie_across_the_border_is_refused() -> None:
    """One tensor cannot be bf16 and fp32 at once."""
    model = nn.ModuleDict({"embed": nn.Embedding(4, 3), "head": nn.Linear(3, 4, bias=False)})
    model["head"].weight = model["embed"].weight

    with pytest.raises(UsageError, match=r"'embed.weight' is tied to one that keep_float32 keeps wide"):
        Booster(precision="bf16", keep_float32=("head",)).boost(model)


def train_with_kept_norms() -> list[dict[str, torch.Tensor]]:
    """Train three steps with buffers of two dtypes in one lane."""
    torch.manual_seed(0)
    model: Any = Net()
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with tiny_buffers(100, 50):
        booster = Booster(precision="bf16", keep_float32=("*norm*",), max_grad_norm=0.5)
        model, optimizer = booster.boost(model, torch.optim.AdamW(trainable, lr=0.01))
    norms = []
    for step in range(3):
        model(batch_of(dist.get_rank(), step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        norms.append(optimizer.grad_norm.clone())
    return [dict(model.named_parameters()), {"norms": torch.stack(norms)}]


def test_mixed_dtypes_train_alike_on_all_ranks() -> None:
    """Buffers of both dtypes are reduced in one order, and the update is near that of fp64."""
    results = run_ranks(train_with_kept_norms, 2)

    torch.manual_seed(0)
    model = Net().double()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    norms = []
    for step in range(3):
        for rank in range(2):
            (model(batch_of(rank, step)).square().mean() / 2).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    for weights, extra in results:
        for name, value in weights.items():
            assert torch.equal(value, results[0][0][name]), name
        assert extra["norms"].tolist() == pytest.approx(norms, rel=0.02)


# --- refusals, and what stays legal ----------------------------------------------------------------------


def test_float64_parameters_are_not_narrowed_by_accident() -> None:
    """A plan that does not say so never drops bits."""
    with pytest.raises(UsageError, match=r"'0.weight' is float64, but precision is 'fp32'"):
        Booster().boost(nn.Sequential(nn.Linear(2, 2).double()))


def test_autocast_inside_fp32_is_legal() -> None:
    """The user's own autocast computes what it computes without a Booster."""
    torch.manual_seed(0)
    model: Any = Net()
    torch.manual_seed(0)
    plain = Net()
    reference = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.1)
    optimizer: Any = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model, optimizer = Booster().boost(model, optimizer)

    for one, chosen in ((model, optimizer), (plain, reference)):
        for step in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                loss = one(batch_of(0, step).float()).float().square().mean()
            loss.backward()
            chosen.step()
            chosen.zero_grad()

    for value, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(value.double(), wanted.double(), atol=1e-6)


def test_awkward_parameters_train_in_bf16() -> None:
    """0-d, empty, tied and unused parameters have masters like any other."""
    torch.manual_seed(0)
    model: Any = Awkward().float()
    model, optimizer = Booster(precision="bf16").boost(model, torch.optim.Adam(model.parameters(), lr=0.05))
    before = {name: value.detach().clone() for name, value in model.named_parameters()}

    for step in range(2):
        model(batch_of(0, step), "b").square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    changed = {name for name, value in model.named_parameters() if not torch.equal(value, before[name])}
    assert changed == {"trunk.weight", "trunk.bias", "norm.weight", "norm.bias"} | {
        "head_b.weight",
        "head_b.bias",
        "scale",
        "shift",
    }
