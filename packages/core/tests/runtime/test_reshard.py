"""Any layout reads what any other wrote: weights, masters, moments and step counts, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from colossal_core.checkpoint import read_manifest
from colossal_testkit import run_ranks
from colossal_testkit.models import Workload
from colossal_testkit.parity import Recipe, boost_workload, share_of

from .published import Published, join_states, publish
from .strategy_cases import BOUND, CASES, Case, build, make_registry

STATES = ("value", "exp_avg", "exp_avg_sq")

each_case = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])


def boost_layout(model: str, pieces: Mapping[str, Mapping[str, int]]) -> tuple[Any, Workload]:
    """Return the Booster and the boosted training run of a model under some strategies."""
    recipe = Recipe(builder=build, arguments={"name": model}, loop="plain", max_grad_norm=BOUND)
    return boost_workload(recipe, (), {"plan": {"pieces": pieces}}, make_registry)


def train_some(booster: Any, work: Workload, steps: Sequence[int]) -> None:
    """Take some of the steps."""
    for step in steps:
        work.optimizer.zero_grad()
        inputs, target = share_of(work.batches[step], booster.data_rank, booster.data_degree, equal=True)
        work.criterion(work.model(inputs), target).backward()
        work.optimizer.step()
    work.optimizer.zero_grad()


def save_and_go_on(case: Case, root: Path) -> tuple[Published, Published]:
    """Train two steps under the strategies of a case, save, and train the third."""
    booster, work = boost_layout(case.model, case.pieces)
    train_some(booster, work, (0, 1))
    booster.save(root)
    saved = publish(booster)
    train_some(booster, work, (2,))
    return saved, publish(booster)


def load_and_go_on(
    model: str, pieces: Mapping[str, Mapping[str, int]], root: Path
) -> tuple[Published, Published]:
    """Load under any strategies, and train the third step."""
    booster, work = boost_layout(model, pieces)
    booster.load(root)
    loaded = publish(booster)
    train_some(booster, work, (2,))
    return loaded, publish(booster)


def compare(mine: Sequence[Published], theirs: Sequence[Published], *, exact: bool) -> None:
    """Hold what two layouts publish to each other, put together from the books."""
    for state in STATES:
        one, other = join_states(mine, state), join_states(theirs, state)
        assert one.keys() == other.keys()
        for name, tensor in one.items():
            if exact:
                assert torch.equal(tensor, other[name]), f"{state} of {name}"
            else:
                torch.testing.assert_close(tensor, other[name], rtol=1e-10, atol=1e-10)


@each_case
def test_every_layout_is_read_by_one_process_and_the_other_way_round(case: Case, tmp_path: Path) -> None:
    """What strategies have cut loads into the serial model, and what one process wrote loads cut."""
    cut = run_ranks(save_and_go_on, case.nproc, case, tmp_path / "cut")
    whole = run_ranks(load_and_go_on, 1, case.model, {}, tmp_path / "cut")
    compare([pair[0] for pair in cut], [pair[0] for pair in whole], exact=True)
    compare([pair[1] for pair in cut], [pair[1] for pair in whole], exact=False)

    root = tmp_path / "whole"
    run_ranks(rewrite, 1, case.model, tmp_path / "cut", root)
    again = run_ranks(load_and_go_on, case.nproc, case.model, case.pieces, root)

    compare([pair[0] for pair in cut], [pair[0] for pair in again], exact=True)
    compare([pair[1] for pair in cut], [pair[1] for pair in again], exact=True)


def rewrite(model: str, source: Path, target: Path) -> None:
    """Load in one process and save again."""
    booster, _ = boost_layout(model, {})
    booster.load(source)
    booster.save(target)


def test_cut_layouts_read_each_other(tmp_path: Path) -> None:
    """Stages, a divided vocabulary and both together exchange one run without a detour."""
    chains = [case for case in CASES if case.model == "chain"]
    written = {
        case.name: run_ranks(save_and_go_on, case.nproc, case, tmp_path / case.name) for case in chains
    }
    for writer, reader in zip(chains, [*chains[1:], chains[0]], strict=True):
        loaded = run_ranks(load_and_go_on, reader.nproc, reader.model, reader.pieces, tmp_path / writer.name)

        compare([pair[0] for pair in written[writer.name]], [pair[0] for pair in loaded], exact=True)


@each_case
def test_state_is_written_once(case: Case, tmp_path: Path) -> None:
    """Pieces cover every element once, whoever holds it; names are those of the serial model."""
    run_ranks(save_and_go_on, case.nproc, case, tmp_path)
    work = build(case.model)
    manifest = read_manifest(tmp_path / "step-2")

    model, optimizer = manifest.objects["model"], manifest.objects["optimizer"]

    assert list(model.tensors) == [*dict(work.model.named_parameters()), *dict(work.model.named_buffers())]
    for record in (model, optimizer):
        for tensor in record.tensors.values():
            boxes = [piece.box for piece in tensor.pieces]
            assert sum(box.volume for box in boxes) * tensor.item_bytes == tensor.num_bytes
            assert not any(a.intersect(b) for i, a in enumerate(boxes) for b in boxes[:i])
