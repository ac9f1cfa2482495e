"""Whole tensors of models that strategies have cut: parameters and gradients as one process has them."""

from __future__ import annotations

import copy

import pytest
import torch

from colossal_core import UsageError
from colossal_testkit import run_ranks

from .strategy_cases import CASES, Case, build
from .test_reshard import boost_layout

each_case = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])

Tensors = dict[str, torch.Tensor]


def read_whole(case: Case) -> tuple[Tensors, Tensors, Tensors]:
    """Return parameters and gradients after one backward, and parameters after edits."""
    booster, work = boost_layout(case.model, case.pieces)
    with booster.full_parameters(work.model) as shown:
        before = {name: tensor.detach().clone() for name, tensor in shown.items()}
    rows = slice(booster.data_rank, None, booster.data_degree)
    inputs, target = (tensor[rows] for tensor in work.batches[0])
    work.criterion(work.model(inputs), target).backward()
    with booster.full_gradients(work.model) as shown:
        gradients = {name: tensor.clone() for name, tensor in shown.items()}
    with booster.full_parameters(work.model) as shown, torch.no_grad():
        for name, tensor in shown.items():
            tensor.mul_(2)
            if tensor.dim() == 1:
                shown[name] = torch.full_like(tensor, 7)
    with booster.full_parameters(work.model) as shown:
        return before, gradients, {name: tensor.detach().clone() for name, tensor in shown.items()}


@each_case
def test_full_parameters_and_gradients_are_those_of_one_process(case: Case) -> None:
    """On every rank, whatever is cut: names, order, values, and which gradients exist; edits are kept."""
    work = build(case.model)
    initial = {name: tensor.detach().clone() for name, tensor in work.model.named_parameters()}
    inputs, target = work.batches[0]
    work.criterion(work.model(inputs), target).backward()
    wanted = {name: p.grad for name, p in work.model.named_parameters() if p.grad is not None}

    for before, gradients, after in run_ranks(read_whole, case.nproc, case):
        assert list(before) == list(initial)
        assert list(gradients) == list(wanted)
        for name, tensor in initial.items():
            assert torch.equal(before[name], tensor)
            assert torch.equal(after[name], torch.full_like(tensor, 7) if tensor.dim() == 1 else 2 * tensor)
        for name, gradient in wanted.items():
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-10, atol=1e-10)


def copy_cut_model(case: Case) -> None:
    """Try everything that would copy boxes as if they were all."""
    booster, work = boost_layout(case.model, case.pieces)
    work.criterion(work.model(work.batches[0][0]), work.batches[0][1]).backward()
    work.optimizer.step()
    for call in (
        work.model.state_dict,
        lambda: work.model.load_state_dict({}),
        lambda: copy.deepcopy(work.model),
        work.optimizer.state_dict,
    ):
        with pytest.raises(UsageError, match=r"(?s)would be incomplete.*booster\.save"):
            call()
    booster.release(work.model)
    assert work.model.state_dict()
    assert "__deepcopy__" not in vars(work.model)


@pytest.mark.parametrize("name", ["qkv-2", "stages-3"])
def test_copies_of_cut_models_are_refused_with_the_line_to_use(name: str) -> None:
    """On every rank, until the model is released; ranks that hold nothing of it refuse as well."""
    case = next(case for case in CASES if case.name == name)

    run_ranks(copy_cut_model, case.nproc, case)
