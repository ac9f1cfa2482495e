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
from torch import nn

from colossal_core.errors import NonFiniteError
from colossal_core.runtime.booster import Booster
from colossal_core.runtime.cover import find_cover_problems
from colossal_testkit.models import Workload
from colossal_testkit.parity import FP64, Loop, Recipe, boost_workload, check_parity, share_of
from colossal_testkit.ranks import run_ranks, run_ranks_expecting_errors
from colossal_testkit.traffic import measure_traffic

from .published import Published, expected_gradient_words, join_states, publish
from .strategy_cases import BOUND, CASES, Case, make_registry

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
