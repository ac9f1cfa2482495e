"""What later packages need of the table, proven by strategies that somebody else could have written.

Each strategy cuts a small model, which trains for three AdamW steps with clipping in fp64 on gloo ranks.
Losses, gradient norms, weights and optimizer states, put together from the two books, equal those of one
process.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from colossal_core.errors import NonFiniteError
from colossal_core.runtime.booster import Booster
from colossal_core.runtime.cover import find_cover_problems
from colossal_testkit.models import Workload, randomise
from colossal_testkit.parity import FP64, Loop, Recipe, boost_workload, check_parity, share_of
from colossal_testkit.ranks import run_ranks, run_ranks_expecting_errors
from colossal_testkit.traffic import measure_traffic

from .published import Published, expected_gradient_words, join_states, publish
from .strategy_cases import BOUND, CASES, NUM_SAMPLES, Case, make_registry

STATES = ("value", "gradient", "exp_avg", "exp_avg_sq")

each_case = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])


# --- what happens on the ranks ------------------------------------------------------------------------------


def boost_case(case: Case, **settings: object) -> tuple[Booster, Workload]:
    """Return the Booster and the boosted training run of a case."""
    return boost_workload(case.recipe(), (), {**case.settings, **settings}, make_registry)


def run_backward(booster: Booster, work: Workload, step: int) -> None:
    """Run forward and backward of one step on this rank's share, and a weighted mean as users take it."""
    inputs, target = share_of(work.batches[step], booster.data_rank, booster.data_degree, equal=True)
    work.criterion(work.model(inputs), target).backward()


def train_and_publish(case: Case) -> Published:
    """Train, and return both books after the last step, whose gradients are not cleared."""
    booster, work = boost_case(case)
    for step in range(len(work.batches)):
        work.optimizer.zero_grad()
        run_backward(booster, work, step)
        work.optimizer.step()
    return publish(booster)


def poison(work: Workload, name: str) -> Any:
    """Make gradients of a parameter NaN in one element on this rank; return a handle that ends it."""

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        spoiled = gradient.clone()
        spoiled[(-1,) * gradient.dim()] = math.nan
        return spoiled

    return work.model.get_parameter(name).register_hook(spoil)


def step_on_poison(case: Case) -> None:
    """Take a good step and one whose gradient is not finite on one rank; check that it changed nothing."""
    booster, work = boost_case(case)
    run_backward(booster, work, 0)
    work.optimizer.step()
    work.optimizer.zero_grad()
    before = {name: value.detach().clone() for name, value in work.model.named_parameters()}
    if torch.distributed.get_rank() == case.poisoned[0]:
        poison(work, case.poisoned[1])
    run_backward(booster, work, 1)
    try:
        work.optimizer.step()
    finally:
        changed = [n for n, value in work.model.named_parameters() if not torch.equal(value, before[n])]
        assert not changed, changed


def skip_poison_and_train(case: Case) -> Published:
    """Skip a step whose gradient is not finite on one rank, then train as if it had not been."""
    booster, work = boost_case(case, nonfinite="skip")
    optimizer: Any = work.optimizer
    handle = poison(work, case.poisoned[1]) if torch.distributed.get_rank() == case.poisoned[0] else None
    run_backward(booster, work, 2)
    optimizer.step()
    assert (optimizer.stepped, optimizer.skipped_steps) == (False, 1)
    if handle is not None:
        handle.remove()
    for step in range(len(work.batches)):
        optimizer.zero_grad()
        run_backward(booster, work, step)
        optimizer.step()
        assert optimizer.stepped
    return publish(booster)


# --- the reference ------------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True, eq=False)
class Serial:
    """One process after training: values, clipped gradients of the last step and moments, by name."""

    states: dict[str, dict[str, torch.Tensor]]
    initial: dict[str, torch.Tensor]


@functools.lru_cache(maxsize=32)
def train_serial(recipe: Recipe) -> Serial:
    """Train with torch alone, and keep everything that places publish."""
    work = recipe.build()
    initial = {f"model.{name}": value.clone() for name, value in work.model.state_dict().items()}
    for inputs, target in work.batches:
        work.optimizer.zero_grad()
        work.criterion(work.model(inputs), target).backward()
        total = nn.utils.clip_grad_norm_(work.model.parameters(), BOUND)
        assert float(total) > BOUND
        work.optimizer.step()
    states: dict[str, dict[str, torch.Tensor]] = {state: {} for state in STATES}
    named = {**dict(work.model.named_parameters()), **dict(work.model.named_buffers())}
    for name, tensor in named.items():
        states["value"][f"model.{name}"] = tensor
        if tensor.grad is not None:
            states["gradient"][f"model.{name}"] = tensor.grad
        for state in ("exp_avg", "exp_avg_sq"):
            if tensor in work.optimizer.state:
                states[state][f"model.{name}"] = work.optimizer.state[tensor][state]
    return Serial(states=states, initial=initial)


@functools.lru_cache(maxsize=32)
def published_by(name: str) -> Sequence[Published]:
    """Return what all ranks of a case publish after training; they train once for all tests."""
    case = next(case for case in CASES if case.name == name)
    return run_ranks(train_and_publish, case.nproc, case)


def check_close(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Compare tensors by name, as `check_parity` does.

    Raises:
        AssertionError: One is missing, or differs by more than rounding.
    """
    for name, whole in expected.items():
        gap = float((found[name].double() - whole.detach().double()).abs().max())
        assert gap <= FP64.bound_of(whole.detach()), f"{name} differs by {gap}"


# --- tests --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loop", ["plain", "forward_backward"])
@each_case
def test_training_equals_one_process(case: Case, loop: Loop) -> None:
    """Losses, gradient norms and weights are those of one process, whatever is cut, in both loops."""
    check_parity(
        case.recipe(loop), nproc=case.nproc, settings=case.settings, registry=make_registry, tolerance=FP64
    )


@each_case
def test_tables_cover_every_element_once(case: Case) -> None:
    """Each parameter and buffer is complete, and ranks agree about who holds it and who sums with whom."""
    books = [published.book for published in published_by(case.name)]

    assert find_cover_problems(books) == []


@pytest.mark.parametrize("state", STATES)
@each_case
def test_places_hold_every_state_in_full(case: Case, state: str) -> None:
    """Values, buffers, clipped gradients and moments come out of the books as one process has them.

    No rank holds other bits of an element than another one, and none says anything of what it does not hold.
    """
    expected = train_serial(case.recipe()).states[state]
    ranks = published_by(case.name)

    joined = join_states(ranks, state)

    # A parameter without a gradient has room for one.
    assert joined.keys() - expected.keys() <= {f"model.{name}" for name in case.untouched}
    check_close(joined, expected)
    for published in ranks:
        absent = {".".join(key) for key, entry in published.book.items() if not entry.parts}
        assert not absent & published.states[state].keys()


@pytest.mark.parametrize("case", [case for case in CASES if case.untouched], ids=lambda case: case.name)
def test_cut_parameters_that_no_loss_needs_stay_untouched(case: Case) -> None:
    """Weight decay leaves alone what has no gradient on any rank, as torch does, and moments do not exist."""
    initial = train_serial(case.recipe()).initial
    ranks = published_by(case.name)

    values = join_states(ranks, "value")

    for name in case.untouched:
        assert torch.equal(values[f"model.{name}"], initial[f"model.{name}"])
        assert all(f"model.{name}" not in published.states["exp_avg"] for published in ranks)


@each_case
def test_traffic_follows_from_the_table_and_the_formulas(case: Case) -> None:
    """Gradients cost what the table says, the norm 8 bytes, and each strategy what its formula says."""
    for published in published_by(case.name):
        traffic = measure_traffic(published.transfers)
        gradients = traffic.phase("gradients").words
        fewest, most = (expected_gradient_words(published, num_notes=notes) for notes in (0, 4))

        assert fewest * (1 - 1e-12) <= gradients <= most * (1 + 1e-12)
        assert traffic.phase("norm").message_bytes == 8
        assert traffic.phase("norm").operations == {"all_reduce": 1}
        assert {phase: traffic.phase(phase).words for phase in case.volumes} == pytest.approx(case.volumes)
        assert traffic.phases.keys() <= {"gradients", "norm", *case.volumes, "vocabulary"}


@each_case
def test_gradient_that_is_not_finite_on_one_rank_stops_all(case: Case) -> None:
    """Every rank raises in the same step, names the parameter, and has changed nothing."""
    errors = run_ranks_expecting_errors(step_on_poison, case.nproc, case, error=NonFiniteError)

    assert all(repr(case.poisoned[1]) in str(error) for error in errors)


@each_case
def test_step_that_was_skipped_leaves_no_trace(case: Case) -> None:
    """After a skipped step, training goes on as if it had not been, on all ranks alike."""
    expected = train_serial(case.recipe()).states["value"]

    joined = join_states(run_ranks(skip_poison_and_train, case.nproc, case), "value")

    # Statistics of batches have seen one more of them.
    check_close(
        joined,
        {name: value for name, value in expected.items() if ".norm." not in name or value.requires_grad},
    )


def train_without_clearing(case: Case) -> Published:
    """Train, and never clear a gradient."""
    booster, work = boost_case(case)
    for step in range(len(work.batches)):
        run_backward(booster, work, step)
        work.optimizer.step()
    return publish(booster)


@each_case
def test_gradients_that_nobody_clears_add_up(case: Case) -> None:
    """What a step left of a gradient counts in the next one as in torch, over whatever ranks it is summed."""
    work = case.recipe().build()
    for inputs, target in work.batches:
        work.criterion(work.model(inputs), target).backward()
        nn.utils.clip_grad_norm_(work.model.parameters(), BOUND)
        work.optimizer.step()

    joined = join_states(run_ranks(train_without_clearing, case.nproc, case), "value")

    check_close(joined, {f"model.{name}": value for name, value in work.model.named_parameters()})


@pytest.mark.parametrize("reduce", ["window", "backward"])
@each_case
def test_backward_passes_add_up(case: Case, reduce: str) -> None:
    """Two passes before a step give the sum, also when each of them ends with averages."""
    pieces = {**case.pieces, "replicated": {"reduce": reduce}}

    check_parity(
        case.recipe("twice"), nproc=case.nproc, settings={"plan": {"pieces": pieces}}, registry=make_registry
    )


# --- two models -------------------------------------------------------------------------------------------


class Speaker(nn.Module):
    """An embedding and a head; another model may share the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(12, 6)
        self.out = nn.Linear(6, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Map token numbers ``[batch, time]`` to ``[batch, 3]``."""
        outputs: torch.Tensor = self.out(self.tokens(ids).mean(dim=1))
        return outputs


@attrs.frozen(kw_only=True, eq=False)
class Pair:
    """Two models that share an embedding, an optimizer for each, and what they learn from."""

    speaker: Speaker
    listener: Speaker
    optimizers: Sequence[Any]
    batches: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]

    @classmethod
    def build(cls) -> Pair:
        """Return the pair, the same in every process; the shared weight belongs to the first optimizer."""
        speaker, listener = Speaker().double(), Speaker().double()
        randomise(speaker, seed=1)
        randomise(listener, seed=2)
        listener.tokens.weight = speaker.tokens.weight
        optimizers = [
            torch.optim.AdamW(speaker.parameters(), lr=0.02, weight_decay=0.1),
            torch.optim.AdamW(listener.out.parameters(), lr=0.03),
        ]
        source = torch.Generator().manual_seed(4)
        batches = []
        for _ in range(3):
            ids = torch.randint(0, 12, (NUM_SAMPLES, 5), generator=source)
            targets = torch.randn(2, NUM_SAMPLES, 3, generator=source, dtype=torch.float64)
            batches.append((ids, targets[0], targets[1]))
        return cls(speaker=speaker, listener=listener, optimizers=optimizers, batches=batches)

    def run_backward(self, batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
        """Let one backward reach both models."""
        ids, one, other = batch
        loss = F.mse_loss(self.speaker(ids), one) + 2 * F.mse_loss(self.listener(ids), other)
        loss.backward()

    @property
    def named(self) -> Mapping[str, torch.Tensor]:
        """Every parameter under the name of its entry."""
        shared = {f"speaker.{name}": value for name, value in self.speaker.named_parameters()}
        return shared | {
            f"listener.out.{name}": value for name, value in self.listener.out.named_parameters()
        }


def train_pair(degree: int) -> tuple[Published, list[list[float]]]:
    """Boost both models in one call, train, and return both books and the norms of both optimizers."""
    pair = Pair.build()
    booster = Booster(
        plan={"pieces": {"vocabulary": {"degree": degree}}, "precision": "fp64", "max_grad_norm": BOUND},
        registry=make_registry(),
    )
    optimizers = booster.boost(*pair.optimizers, speaker=pair.speaker, listener=pair.listener)[:2]
    assert pair.listener.tokens.weight is pair.speaker.tokens.weight
    norms: list[list[float]] = []
    for batch in pair.batches:
        pair.run_backward(share_of(batch, booster.data_rank, booster.data_degree, equal=True))
        for optimizer in optimizers:
            optimizer.step()
        norms.append([float(optimizer.grad_norm) for optimizer in optimizers])
        for optimizer in optimizers:
            optimizer.zero_grad()
    return publish(booster), norms


@pytest.mark.parametrize(("degree", "nproc"), [(2, 2), (2, 4), (3, 3)])
def test_models_may_share_a_cut_parameter(degree: int, nproc: int) -> None:
    """One entry, cut once under the name in the second model; each optimizer clips by the norm of its own."""
    pair, expected_norms = Pair.build(), []
    for batch in pair.batches:
        pair.run_backward(batch)
        expected_norms.append(
            [
                float(nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], BOUND))
                for optimizer in pair.optimizers
            ]
        )
        for optimizer in pair.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    found = run_ranks(train_pair, nproc, degree)

    ranks = [published for published, _ in found]
    assert find_cover_problems([published.book for published in ranks]) == []
    assert ("listener", "tokens.weight") not in ranks[0].book
    assert ranks[0].local_numel["speaker", "tokens.weight"] == 12 * 6 // degree
    check_close(join_states(ranks, "value"), pair.named)
    for _, norms in found:
        for mine, theirs in zip(norms, expected_norms, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-12)
