"""Recomputed blocks: the same gradients, bit for bit, and no trace of the second run."""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from colossal_core import Booster, Recompute
from colossal_core.errors import CapabilityError, UsageError
from colossal_testkit import run_ranks

from .blocks import MODELS, Block, Conversation, Stack, quiet_blocks

TOLERANCE = 1e-10


# --- one run --------------------------------------------------------------------------------------------


def rows_of(step: int, num: int = 6) -> torch.Tensor:
    """Return the inputs of a step."""
    return torch.randn(num, 4, generator=torch.Generator().manual_seed(step)) * 3


def build(make: Callable[[], nn.Module]) -> Any:
    """Return a model that starts from a seed."""
    torch.manual_seed(3)
    random.seed(3)
    return make()


def boost(model: nn.Module, *pieces: object, **settings: Any) -> tuple[Booster, Any, Any]:
    """Boost a model with SGD."""
    booster = Booster(*pieces, **settings)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model, boosted = booster.boost(model, optimizer)
    return booster, model, boosted


def train(model: nn.Module, optimizer: Any, *, use_autocast: bool = False) -> list[torch.Tensor]:
    """Train for three steps; return losses, gradients, weights, buffers, and a draw at the end."""
    found: list[torch.Tensor] = []
    for step in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=use_autocast):
            loss = model(rows_of(step)).square().mean()
        loss.backward()
        optimizer.step()
        found += [loss.detach(), optimizer.grad_norm]
    found += [p.grad for p in model.parameters() if type(p.grad) is torch.Tensor]  # no guards
    found += [value.clone() for value in model.state_dict().values()]
    return [*found, torch.rand(3), torch.tensor(random.random())]  # noqa: S311 - not for secrets


def run(make: Callable[[], nn.Module], *pieces: object, **options: Any) -> list[torch.Tensor]:
    """Build, boost with some pieces, and train."""
    _, model, optimizer = boost(build(make), *pieces)
    return train(model, optimizer, **options)


def assert_same_bits(mine: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    """Compare bit for bit."""
    assert len(mine) == len(wanted)
    for one, other in zip(mine, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_gradients_statistics_and_draws_have_the_same_bits(make: Callable[[], nn.Module]) -> None:
    """On one process nothing differs but the memory."""
    assert_same_bits(run(make, Recompute()), run(make))


def test_autocast_around_the_model_is_seen_again() -> None:
    """The second run computes in the dtypes of the first."""
    assert_same_bits(run(Stack, Recompute(), use_autocast=True), run(Stack, use_autocast=True))


def test_casts_of_a_narrow_precision_are_seen_once_each_way() -> None:
    """Hooks of borders, also of fp32 modules inside a block, give the second run what they gave the first."""
    settings = {"precision": "bf16", "keep_float32": ("*norm*",)}
    results = []
    for pieces in ((Recompute(),), ()):
        _, model, optimizer = boost(build(Stack), *pieces, **settings)
        results.append(train(model, optimizer))

    assert_same_bits(*results)


# --- which blocks, and when -----------------------------------------------------------------------------


def runs_of(model: Any, *, backward: bool = True) -> list[int]:
    """Return how often each block runs in one step."""
    for block in model.blocks:
        block.num_runs = 0
    loss = model(rows_of(0)).sum()
    if backward:
        loss.backward()
    return [block.num_runs for block in model.blocks]


@pytest.mark.parametrize(
    ("piece", "wanted"),
    [
        (Recompute(), [2, 2, 2, 2, 2]),
        (Recompute(every=2), [2, 1, 2, 1, 2]),
        (Recompute(every=9), [2, 1, 1, 1, 1]),
        (Recompute(blocks=("blocks.[13]",)), [1, 2, 1, 2, 1]),
        (Recompute(blocks="*", every=3), [1, 1, 2, 1, 1]),
        ("recompute", [2, 2, 2, 2, 2]),
    ],
    ids=str,
)
def test_blocks_are_found_or_named(piece: object, wanted: list[int]) -> None:
    """The first of every k runs again in backward; of nested matches the outermost, containers never."""
    _, model, _ = boost(build(five_blocks), piece)

    assert runs_of(model) == wanted


def five_blocks() -> nn.Module:
    """Return a stack of five blocks."""
    return Stack(depth=5)


def test_nothing_runs_again_without_gradients() -> None:
    """Evaluation costs what it costs without the piece; training through an evaluated model does not."""
    _, model, _ = boost(build(Stack), Recompute())

    with torch.no_grad():
        assert runs_of(model, backward=False) == [1, 1, 1]
    model.eval()
    with torch.inference_mode():
        assert runs_of(model, backward=False) == [1, 1, 1]
    assert runs_of(model, backward=False) == [1, 1, 1]
    assert runs_of(model) == [2, 2, 2]


def test_blocks_without_anything_to_train_pass() -> None:
    """A frozen model is called as before."""
    model = build(Stack).requires_grad_(False)
    model.head.requires_grad_(True)
    _, model, _ = boost(model, Recompute())

    assert runs_of(model) == [1, 1, 1]


def test_a_model_without_repeated_blocks_is_refused_with_what_can_be_named() -> None:
    """The message has the names, and naming one works."""
    with pytest.raises(
        UsageError, match=r"no repeated blocks are in 'model'.*'0' and 1 more|'0', '2'"
    ) as error:
        boost(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)), Recompute())

    assert "'0', '2'" in str(error.value)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    boost(model, Recompute(blocks=("[02]",)))
    model(rows_of(0)).sum().backward()


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("layers.*", r"matches none of the \d+ modules"),
        ("blocks", r"matches only 'blocks', which others contain or which is never called"),
    ],
)
def test_a_pattern_without_effect_is_refused(pattern: str, reason: str) -> None:
    """A misspelled name and a container are told apart."""
    with pytest.raises(UsageError, match=reason):
        boost(build(Stack), Recompute(blocks=("head", pattern)))


def test_a_model_without_blocks_beside_one_that_has_some_is_noted() -> None:
    """A small critic beside a deep actor is no error, but no secret either."""
    actor, critic = build(Stack), nn.Linear(2, 1)
    booster = Booster(Recompute())

    with pytest.warns(UserWarning, match="model 'critic' has no repeated blocks"):
        booster.boost(actor=actor, critic=critic)


# --- graphs that are used in other ways -----------------------------------------------------------------


def use_twice(model: nn.Module) -> None:
    """Run backward twice through one graph."""
    loss = model(rows_of(0)).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()


def interleave(model: nn.Module) -> None:
    """Run forward twice before backward, and draw in between."""
    first = model(rows_of(0)).square().mean()
    torch.rand(5)
    second = model(rows_of(1)).square().mean()
    second.backward()
    first.backward()


def penalise(model: nn.Module) -> None:
    """Add a penalty on the gradient of the inputs."""
    rows = rows_of(0).requires_grad_()
    outputs = model(rows)
    (gradient,) = torch.autograd.grad(outputs.square().sum(), rows, create_graph=True)
    (outputs.mean() + gradient.square().mean()).backward()


def switch_modes(model: nn.Module) -> None:
    """Evaluate between forward and backward, and leave a module in evaluation."""
    loss = model(rows_of(0)).square().mean()
    model.eval()
    with torch.no_grad():
        model(rows_of(1))
    loss.backward()
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize("story", [use_twice, interleave, penalise, switch_modes], ids=lambda it: it.__name__)
def test_graphs_may_be_used_as_in_torch(story: Callable[[nn.Module], None]) -> None:
    """Gradients and buffers have the bits of a run without recomputation."""
    results = []
    for pieces in ((Recompute(),), ()):
        _, model, _ = boost(build(Stack), *pieces)
        story(model)
        results.append(
            [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            + list(model.buffers())
        )

    assert_same_bits(*results)


# --- what a second run cannot reproduce -----------------------------------------------------------------


class InPlace(nn.Module):
    """Adds to its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Map ``[n, 6]`` to ``[n, 6]``."""
        return rows.add_(self.layer(rows))


class Late(Block):
    """Changes a buffer for the first time in its second forward."""

    def __init__(self) -> None:
        super().__init__()
        self.table: torch.Tensor
        self.register_buffer("table", torch.zeros(3))
        self.num_calls = 0

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Map ``[n, 6]`` to ``[n, 6]``."""
        self.num_calls += 1
        if self.num_calls > 2:
            self.table.add_(1)
        return super().forward(rows)


def in_place() -> nn.Module:
    """Return a stack of blocks that change their arguments."""
    return Stack(InPlace)


def late() -> nn.Module:
    """Return a stack of blocks that change a buffer late."""
    return Stack(Late)


def test_a_block_that_changes_its_argument_is_refused() -> None:
    """The block is named; torch would find out in backward, or not at all."""
    _, model, _ = boost(build(in_place), Recompute())

    with pytest.raises(CapabilityError, match=r"block 'blocks\.0' changes an argument in place"):
        model(rows_of(0))


def test_a_buffer_that_starts_to_change_is_refused() -> None:
    """There is no copy to recompute from, and that is said instead of giving other gradients."""
    _, model, _ = boost(build(late), Recompute())
    model(rows_of(0)).sum().backward()

    with pytest.raises(CapabilityError, match=r"buffer 'table' of a Late in block 'blocks\.0' was changed"):
        model(rows_of(0))


def test_weights_that_were_updated_before_backward_are_refused() -> None:
    """As in torch, where the saved weights are found to have changed."""
    _, model, optimizer = boost(build(Stack), Recompute())
    outputs = model.blocks[2](torch.ones(2, 6, requires_grad=True))
    model(rows_of(0)).sum().backward()
    optimizer.step()

    with pytest.raises(
        UsageError, match=r"parameter '.*' of block 'blocks.2', which is recomputed in backward"
    ):
        outputs.sum().backward()


def test_nested_arguments_that_changed_before_backward_are_refused() -> None:
    """A tensor inside a tuple is watched like one that is passed alone."""
    _, model, _ = boost(build(Conversation), Recompute())
    factor = torch.full((), 2.0)
    outputs = model.blocks[0](torch.ones(2, 6), (factor, None), mask=torch.ones(6))
    factor.add_(1)

    with pytest.raises(UsageError, match=r"an argument of block 'blocks\.0'"):
        outputs["rows"].sum().backward()


class KeyValueCache:
    """Looks like one of transformers."""

    def __init__(self, length: int) -> None:
        """Hold so many tokens."""
        self.length = length

    def get_seq_length(self) -> int:
        """Return how many tokens it holds."""
        return self.length


class Caching(Block):
    """A block that takes a cache, and tells whether it got one."""

    def forward(self, rows: torch.Tensor, cache: object = None) -> torch.Tensor:
        """Add one where there is a cache."""
        return super().forward(rows) + (cache is not None)


def test_empty_caches_of_keys_and_values_are_left_out_and_others_refused() -> None:
    """The second run would write once more; without gradients there is none."""
    model = build(Stack)
    model.blocks[0] = Caching()
    _, model, _ = boost(model, Recompute(blocks=("blocks.0",)))
    model.eval()  # no dropout; gradients are wanted all the same
    rows = torch.ones(2, 6)

    assert torch.equal(model.blocks[0](rows, cache=KeyValueCache(0)), model.blocks[0](rows))
    with pytest.raises(CapabilityError, match=r"block 'blocks\.0' is given a KeyValueCache of 3") as caught:
        model.blocks[0](rows, KeyValueCache(3))
    assert "use_cache = False" in caught.value.hint
    with torch.no_grad():
        assert torch.equal(model.blocks[0](rows, KeyValueCache(3)), model.blocks[0](rows) + 1)


# --- the user's objects ---------------------------------------------------------------------------------


def test_copies_pickles_and_release_are_as_before() -> None:
    """A block stays the object and the class that it was, with its own forward and its hooks."""
    model = build(Stack)
    blocks = list(model.blocks)
    calls: list[str] = []
    blocks[0].register_forward_hook(lambda *_: calls.append("hook"))
    blocks[1].forward = lambda rows: rows * blocks[1].down.bias
    booster, model, _ = boost(model, Recompute())
    assert list(model.blocks) == blocks
    assert type(blocks[0]) is Block

    model(rows_of(0)).sum().backward()
    assert calls == ["hook"]

    twin = copy.deepcopy(model.blocks[2])
    twin.down.weight.data.zero_()
    assert not torch.equal(twin(torch.ones(2, 6)), model.blocks[2](torch.ones(2, 6)))

    file = io.BytesIO()
    torch.save(model.blocks[2], file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(loaded.eval()(torch.ones(2, 6)), model.blocks[2].eval()(torch.ones(2, 6)))

    booster.release(model)
    assert "forward" not in vars(blocks[0])
    assert vars(blocks[1])["forward"].__name__ == "<lambda>"
    assert not any("colossal" in key for key in vars(blocks[0]))
    assert runs_of(model)[0] == 1


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_compiled_models_are_recomputed_by_the_compiler() -> None:
    """``torch.compile`` traces through the blocks in one graph, and gives the same gradients."""
    results = []
    for pieces in ((Recompute(),), ()):
        torch.compiler.reset()
        _, model, _ = boost(build(quiet_blocks).double(), *pieces, precision="fp64")
        compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
        compiled(rows_of(0).double()).square().mean().backward()
        results.append([parameter.grad for parameter in model.parameters()])

    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=TOLERANCE, atol=TOLERANCE)


# --- ranks ----------------------------------------------------------------------------------------------


def on_ranks(step_rows: int) -> dict[str, torch.Tensor]:
    """Train blocks with synchronised norms, without dropout, on this rank's share."""
    model = without_dropout(build(Stack)).double()
    booster, model, optimizer = boost(model, Recompute(every=2), precision="fp64")
    for step in range(3):
        rows = rows_of(step, step_rows).double().tensor_split(booster.data_degree)[booster.data_rank]
        booster.forward_backward(model, (rows, rows[:, :2]), nn.MSELoss())
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


def without_dropout(model: Any) -> Any:
    """Switch dropout off, which is outside of what ranks promise."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_ranks_recompute_what_one_process_computes(num_ranks: int) -> None:
    """Weights and statistics equal those of plain torch on the global batch; BatchNorm counts once."""
    model = without_dropout(build(Stack)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        rows = rows_of(step, 11).double()
        F.mse_loss(model(rows), rows[:, :2]).backward()
        optimizer.step()
        optimizer.zero_grad()

    states = run_ranks(on_ranks, num_ranks, 11)

    for state in states:
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=TOLERANCE, atol=TOLERANCE, msg=name)
