"""What happens when a strategy breaks a promise: every rank ends within seconds, with an error that says why.

Also what strategies may bring besides cuts: an executor, of which a plan has one.
"""

from __future__ import annotations

import pytest
import torch

from colossal_core.errors import CapabilityError, ColossalError, PluginError, RankMismatchError, UsageError
from colossal_core.plugins import Registry
from colossal_core.runtime.booster import Booster
from colossal_testkit.models import Workload
from colossal_testkit.parity import FP64, Recipe, boost_workload, check_parity, share_of
from colossal_testkit.ranks import collect_ranks, run_ranks, run_ranks_expecting_errors
from colossal_testkit.registry import isolated_registry
from colossal_testkit.traffic import measure_traffic

from .strategy_cases import build
from .third_party_cube import TwoLayers
from .third_party_faults import FAULTY, MICRO_BATCHES, OTHER_EXECUTOR
from .third_party_stages import STAGES


def make_registry() -> Registry:
    """Return a registry with the strategies of these tests."""
    return isolated_registry(FAULTY, MICRO_BATCHES, OTHER_EXECUTOR, STAGES, plugin="third-party")


def boost_faulty(fault: str, *, is_early: bool = False) -> None:
    """Boost a model by a strategy that breaks a promise.

    Args:
        fault: Which promise.
        is_early: Whether that is known before anything is cut; then nothing may have changed.
    """
    model = TwoLayers(8, 12, 4).double()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    plan = {"pieces": {"faulty": {"fault": fault}}, "precision": "fp64"}
    booster = Booster(plan=plan, registry=make_registry())
    try:
        booster.boost(model, optimizer)
    finally:
        after = model.state_dict()
        unchanged = all(torch.equal(after[name], value) for name, value in before.items())
        assert unchanged or not is_early


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ("groups differ", RankMismatchError, "ranks disagree about the groups of strategies"),
        ("unknown name", UsageError, "no parameter or buffer named 'up.weights'"),
        ("finding", UsageError, "heads are odd"),
    ],
)
def test_broken_promise_changes_nothing(fault: str, error: type[ColossalError], message: str) -> None:
    """What a proposal tells is judged on all ranks before any of them changes its model."""
    errors = run_ranks_expecting_errors(boost_faulty, 4, fault, is_early=True, error=error)

    assert all(message in str(found) for found in errors)


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ("nothing proposed", PluginError, "strategy 'faulty' cut 'up.weight' without having proposed it"),
        ("holders without data", UsageError, "'up.weight' is reduced over ranks"),
        ("beyond the tensor", UsageError, "reaches outside its global shape"),
    ],
)
def test_wrong_cut_is_told_on_every_rank(fault: str, error: type[ColossalError], message: str) -> None:
    """What is written into the table is held against the proposal, the tensors and the groups."""
    errors = run_ranks_expecting_errors(boost_faulty, 4, fault, error=error)

    assert all(message in str(found) for found in errors)


@pytest.mark.parametrize("step", ["propose", "apply"])
def test_failure_of_one_rank_reaches_all(step: str) -> None:
    """The rank that cannot go on raises its own error, the others quote it."""
    outcomes = collect_ranks(boost_faulty, 4, f"{step} raises on rank 1")

    assert [type(outcome.error) for outcome in outcomes] == [
        UsageError if rank == 1 else RankMismatchError for rank in range(4)
    ]
    assert all("do not divide among 2 ranks" in str(outcome.error) for outcome in outcomes)


@pytest.mark.parametrize("name", ["Adafactor", "Muon"])
def test_optimizer_that_needs_shapes_is_refused_over_cut_parameters(name: str) -> None:
    """An update that looks at rows and columns would compute something else on a piece of them."""
    errors = run_ranks_expecting_errors(boost_whole, 4, name, error=CapabilityError)

    assert all(f"optimizer {name} needs whole parameters" in str(error) for error in errors)
    assert all("'faulty' cuts 'up.weight' of shape (12, 8)" in str(error) for error in errors)


def boost_whole(name: str) -> None:
    """Boost with a whole-shaped optimizer over the matrices, and nothing else wrong."""
    model = TwoLayers(8, 12, 4).double()
    optimizer = getattr(torch.optim, name)([model.up.weight, model.down.weight], lr=0.01)
    booster = Booster(
        plan={"pieces": {"faulty": {"fault": "none"}}, "precision": "fp64"}, registry=make_registry()
    )
    booster.boost(model, optimizer)


def build_chain() -> Workload:
    """Return a run whose optimizer needs whole parameters."""
    work = build("chain")
    optimizer = torch.optim.Adafactor(work.model.parameters(), lr=0.02, weight_decay=0.1)
    return Workload(model=work.model, optimizer=optimizer, batches=work.batches, criterion=work.criterion)


def test_optimizer_that_needs_shapes_works_where_parameters_are_dealt_whole() -> None:
    """A stage has parameters as they are, or not at all, so such an optimizer is exact there."""
    check_parity(
        Recipe(builder=build_chain, max_grad_norm=0.05),
        nproc=4,
        settings={"plan": {"pieces": {"stages": {"degree": 2}}}},
        registry=make_registry,
        tolerance=FP64,
    )


# --- executors --------------------------------------------------------------------------------------------


def test_executor_of_a_strategy_runs_the_step() -> None:
    """Several backward passes, of which the manager knows the last, train as one of the whole batch."""
    check_parity(
        Recipe(builder=build, arguments={"name": "two layers"}, loop="forward_backward", max_grad_norm=0.05),
        nproc=2,
        settings={"plan": {"pieces": {"micro-batches": {"count": 2}}}},
        registry=make_registry,
        tolerance=FP64,
    )


def reduce_micro_batches() -> dict[str, int]:
    """Return how often gradients were reduced in the second step, whose backward passes are predicted."""
    recipe = Recipe(builder=build, arguments={"name": "two layers"})
    booster, work = boost_workload(
        recipe, (), {"plan": {"pieces": {"micro-batches": {"count": 4}}}}, make_registry
    )
    for batch in work.batches[:2]:
        share = share_of(batch, booster.data_rank, booster.data_degree)
        booster.forward_backward(work.model, share, work.criterion)
        work.optimizer.step()
        work.optimizer.zero_grad()
    return dict(measure_traffic(booster.last_traffic).phase("gradients").operations)


def test_micro_batches_of_an_executor_are_reduced_once() -> None:
    """Four backward passes under `hold` cost one reduction of the only buffer."""
    assert run_ranks(reduce_micro_batches, 2) == [{"all_reduce": 1}] * 2


def boost_with_two_executors() -> None:
    """Boost with two pieces that both want to run the step."""
    booster = Booster("micro-batches", "other-executor", registry=make_registry())
    model = TwoLayers(8, 12, 4)
    booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_second_executor_is_refused() -> None:
    """A step runs in one way; both pieces are named."""
    errors = run_ranks_expecting_errors(boost_with_two_executors, 2, error=UsageError)

    assert all("'micro-batches', 'other-executor' each bring" in str(error) for error in errors)
