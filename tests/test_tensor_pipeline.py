"""Cut layers inside pipeline stages: the numbers stay those of one process, in all that goes with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file

from colossal_core import Recompute
from colossal_pipeline import Pipeline
from colossal_tensor_parallel import TensorParallel
from colossal_testkit.models import build_workload
from colossal_testkit.parity import Recipe, boost_workload, check_parity, take_steps, train_serial
from colossal_testkit.ranks import run_ranks
from colossal_zero import Zero

from .library_models import train_on_ranks
from .test_library_models import check, serial_outcome

pytestmark = pytest.mark.timeout(120)  # of a busy machine; the first import of transformers takes a while

RECIPE = Recipe(
    builder=build_workload,
    arguments={"name": "gpt-tied", "num_steps": 3, "ignores_some": True},
    loop="forward_backward",
    max_grad_norm=0.5,
)
FP64 = {"precision": "fp64"}


def make_pieces(schedule: str = "1f1b", *, sequence: bool = False) -> tuple[object, ...]:
    """Return two tensor ranks for each of two stages."""
    chunks = 1 if schedule in {"1f1b", "gpipe", "zbh1"} else 2
    pipeline = Pipeline(degree=2, microbatches=3, schedule=schedule, chunks=chunks)
    return (TensorParallel(degree=2, sequence=sequence), pipeline)


@pytest.mark.parametrize(
    ("schedule", "sequence", "more"),
    [
        ("1f1b", False, ()),
        ("zbv", False, ()),
        ("interleaved", True, ()),
        ("1f1b", True, (Recompute(),)),
        ("zbh1", True, ()),
    ],
)
def test_cut_layers_in_stages_are_exact(schedule: str, more: tuple[object, ...], *, sequence: bool) -> None:
    """The tied weight is cut, and held by two stages; labels of micro-batches weigh differently."""
    check_parity(RECIPE, nproc=4, pieces=(*make_pieces(schedule, sequence=sequence), *more), settings=FP64)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("sequence", [False, True])
def test_all_axes_together_are_exact(stage: Literal[1, 2], *, sequence: bool) -> None:
    """Two data ranks besides, which divide the state of the optimizer and bring other shares."""
    pieces = (*make_pieces(sequence=sequence), Zero(stage=stage))

    check_parity(RECIPE, nproc=8, pieces=pieces, settings=FP64, timeout_seconds=100)


@pytest.mark.parametrize(
    ("name", "sequence"),
    [("llama-tied", False), ("t5", True), pytest.param("gpt2", True, marks=pytest.mark.slow)],
)
def test_library_models_in_stages_are_exact(name: str, *, sequence: bool) -> None:
    """Their losses are computed of pieces on the last stage; relative positions are read by all layers."""
    pieces = make_pieces(sequence=sequence)

    ranks = run_ranks(train_on_ranks, 4, name, pieces, "forward_backward", timeout_seconds=100)

    for found in ranks:
        check(serial_outcome(name), found, loss_tolerance=1e-6)


def train_in_16_bits(precision: str, pieces: tuple[object, ...]) -> list[float]:
    """Return the losses of a run."""
    arguments = {"name": "gpt-tied", "num_steps": 3, "dtype": "float32"}
    recipe = Recipe(builder=build_workload, arguments=arguments, loop="forward_backward")
    booster, work = boost_workload(recipe, pieces, {"precision": precision})
    losses, _ = take_steps(recipe, booster, work)
    return [float(loss) for loss in losses]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_16_bits_stay_near_fp32(precision: str) -> None:
    """The losses of three steps, the same on all ranks."""
    expected = run_ranks(train_in_16_bits, 1, "fp32", ())[0]

    ranks = run_ranks(train_in_16_bits, 4, precision, make_pieces())

    assert all(found == ranks[0] for found in ranks)
    assert ranks[0] == pytest.approx(expected, rel=0.02)


def boost(layout: tuple[int, int]) -> tuple[Any, Any]:
    """Return Booster and workload of some tensor ranks and some stages."""
    tensor, stages = layout
    pieces: list[object] = [TensorParallel(degree=tensor)] if tensor > 1 else []
    pieces += [Pipeline(degree=stages, microbatches=3)] if stages > 1 else []
    return boost_workload(RECIPE, pieces, FP64)


def train_half(layout: tuple[int, int], root: str, half: int) -> dict[str, torch.Tensor]:
    """Take the first step and save, or load and take the other two; returns the weights in full."""
    booster, work = boost(layout)
    if half:
        booster.load(root)
    for batch in work.batches[1:] if half else work.batches[:1]:
        booster.forward_backward(work.model, batch, work.criterion)
        work.optimizer.step()
        work.optimizer.zero_grad()
    booster.save(root) if not half else booster.export(work.model, f"{root}/plain")
    with booster.full_parameters(work.model) as shown:
        return {name: value.clone() for name, value in shown.items()}


@pytest.mark.parametrize(("before", "after"), [((2, 2), (3, 1)), ((1, 2), (2, 2))])
def test_runs_go_on_under_another_layout(
    before: tuple[int, int], after: tuple[int, int], tmp_path: Path
) -> None:
    """Weights are those of one process, and so are exported ones."""
    expected = {name: slab.values for name, (slab,) in train_serial(RECIPE).slabs.items()}

    run_ranks(train_half, before[0] * before[1], before, str(tmp_path), 0)
    ranks = run_ranks(train_half, after[0] * after[1], after, str(tmp_path), 1)

    exported = load_file(tmp_path / "plain" / "model.safetensors")
    for found in (*ranks, exported):
        for name, value in expected.items():
            assert torch.allclose(found[name], value, rtol=1e-9, atol=1e-11), name
