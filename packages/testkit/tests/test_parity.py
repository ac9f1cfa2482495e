"""Parity: what equals one process passes, and what does not is named with its largest difference."""

from __future__ import annotations

import math

import attrs
import pytest
import torch
from torch import nn

from colossal_testkit.models import MODELS, TokenLoss, Workload, build_workload
from colossal_testkit.parity import (
    FP64,
    ParityError,
    Recipe,
    Slab,
    Tolerance,
    Trace,
    check_parity,
    compare_traces,
    digest_of,
    join_slabs,
    reference_trace,
    share_of,
)
from colossal_testkit.ranks import run_ranks


def build_line(*, slope: float) -> Workload:
    """Build a run of this file: one weight, one step."""
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    model.weight.data.fill_(slope)
    samples = torch.arange(4.0, dtype=torch.float64).unsqueeze(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Workload(model=model, optimizer=optimizer, batches=[(samples, -samples)], criterion=nn.MSELoss())


def scale_targets(work: Workload) -> Workload:
    """Change the reference, as a strategy that changes the mathematics would ask for."""
    batches = [(inputs, 3 * target) for inputs, target in work.batches]
    return attrs.evolve(work, batches=batches)


def digest_of_model(name: str) -> str:
    """Return a hash of a reference model, built on this rank."""
    return digest_of(dict(build_workload(name).model.named_parameters()))


def _trace(
    weight: torch.Tensor, *, loss: float = 1.0, norm: float = 1.0, offset: int = 0, size: int = 0
) -> Trace:
    """Return a trace of one step and one weight, whole unless a size is given."""
    slab = Slab(shape=(size or len(weight),), offset=(offset,), values=weight)
    return Trace(losses=[torch.tensor(loss, dtype=torch.float64)], norms=[norm], slabs={"w": [slab]})


def test_a_run_of_a_test_file_equals_one_process() -> None:
    """Builders travel with their files, and their arguments with them."""
    recipe = Recipe(builder=build_line, arguments={"slope": 0.5}, max_grad_norm=1.0)

    traces = check_parity(recipe, nproc=2)

    # The mean of x (0.5 x + x) 2 over 0..3 is 10.5, which clipping brings to 1: the weight falls by 0.1.
    assert list(traces[0].norms) == pytest.approx([10.5])
    assert join_slabs(traces)["weight"].item() == pytest.approx(0.4)


def test_a_run_that_differs_is_told_by_name() -> None:
    """The reference of another run is another run."""
    recipe = Recipe(builder=build_line, arguments={"slope": 0.5}, adapt=scale_targets)

    with pytest.raises(ParityError, match=r"weight 'weight': 1\.4 at \[0, 0\]"):
        check_parity(recipe, nproc=2, tolerance=attrs.evolve(FP64, relative=0.5))


def test_differences_are_listed_worst_first() -> None:
    """Each line has the thing, the largest difference, its place and the bound."""
    reference = _trace(torch.tensor([1.0, 2.0, 4.0]))
    mine = _trace(torch.tensor([1.0, 2.5, 4.0]), loss=1.001)

    with pytest.raises(ParityError) as caught:
        compare_traces([mine], reference, Tolerance(name="coarse", relative=1e-6, reason="a test"))

    lines = str(caught.value).splitlines()
    assert lines[0] == "2 differences from one plain process (coarse: a test):"
    assert lines[1] == "  weight 'w': 0.5 at [1], expected at most 4e-06"
    assert lines[2].startswith("  loss of step 0: 0.001 at []")


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_different(bad: float) -> None:
    """A NaN compares as equal to nothing, in weights as in norms."""
    reference = _trace(torch.ones(2))

    with pytest.raises(ParityError, match="weight 'w': inf"):
        compare_traces([_trace(torch.tensor([1.0, bad]))], reference, FP64)
    with pytest.raises(ParityError, match="gradient norm of step 0: inf"):
        compare_traces([_trace(torch.ones(2), norm=bad)], reference, FP64)


def test_weights_of_ranks_are_put_together() -> None:
    """Cut weights are joined by their boxes; gaps and different bits of one element are errors."""
    whole = torch.arange(5.0)
    parts = [_trace(whole[:3], size=5), _trace(whole[2:], offset=2, size=5)]

    assert torch.equal(join_slabs(parts)["w"], whole)
    with pytest.raises(ParityError, match="3 of 5 elements of 'w' are on no rank"):
        join_slabs([_trace(whole[:2], size=5)])
    with pytest.raises(ParityError, match="rank 1 holds other bits of 'w'"):
        join_slabs([parts[0], _trace(whole[2:] + 1e-6, offset=2, size=5)])


def test_ranks_must_report_the_same_numbers() -> None:
    """A loss that differs by one bit between ranks is a loss that is not agreed."""
    with pytest.raises(ParityError, match="rank 1 has other losses than rank 0"):
        compare_traces(
            [_trace(torch.ones(1)), _trace(torch.ones(1), loss=1 + 2**-52)], _trace(torch.ones(1)), FP64
        )


@pytest.mark.parametrize("degree", [1, 2, 3, 4])
def test_shares_are_contiguous_and_complete(degree: int) -> None:
    """Every row is in one share, also in nested inputs; shares differ by one row at most."""
    rows = torch.arange(13)
    shares = [share_of(((rows, {"mask": rows}), rows), rank, degree) for rank in range(degree)]

    assert torch.equal(torch.cat([share[1] for share in shares]), rows)
    assert torch.equal(torch.cat([share[0][1]["mask"] for share in shares]), rows)
    assert {len(share[1]) for share in shares} <= {13 // degree, -(-13 // degree)}


def test_a_plain_loop_refuses_unequal_shares() -> None:
    """Without the Booster's weights, means of different sizes have no exact mean."""
    with pytest.raises(ValueError, match="13 samples do not divide among 2 ranks"):
        share_of(torch.arange(13), 0, 2, equal=True)


def test_references_are_computed_once() -> None:
    """Many tests compare with the same run."""
    recipe = Recipe(builder=build_line, arguments={"slope": 0.25})

    assert reference_trace(recipe) is reference_trace(Recipe(builder=build_line, arguments={"slope": 0.25}))


@pytest.mark.parametrize("name", sorted(MODELS))
def test_models_are_built_alike_everywhere(name: str) -> None:
    """Values come from seeds of their own, whatever the process and its generators."""
    torch.manual_seed(99)

    assert {digest_of_model(name), *run_ranks(digest_of_model, 2, name)} == {digest_of_model(name)}


@pytest.mark.parametrize("name", sorted(MODELS))
def test_models_hide_nothing_behind_constants(name: str) -> None:
    """All elements of all parameters differ, weights of normalisations too."""
    values = torch.cat(
        [parameter.detach().flatten() for parameter in build_workload(name).model.parameters()]
    )

    assert len(values.unique()) == len(values)
    assert not ((values == 0) | (values == 1)).any()


def test_token_loss_counts_what_is_not_ignored() -> None:
    """The mean is over tokens that count."""
    logits = torch.randn(2, 3, 5)
    target = torch.tensor([[1, 2, -100], [4, -100, -100]])
    expected = nn.functional.cross_entropy(logits[[0, 0, 1], [0, 1, 0]], torch.tensor([1, 2, 4]))

    assert torch.allclose(TokenLoss()(logits, target), expected)
