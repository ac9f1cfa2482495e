"""Whole tensors of models that strategies have cut: parameters and gradients as one process has them."""

from __future__ import annotations

import pytest
import torch

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
