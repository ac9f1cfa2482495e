"""Import: weights of others reach every layout, by rows, or an error says what does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

from colossal_core.errors import CheckpointError, RankMismatchError
from colossal_core.runtime.booster import Booster
from colossal_core.runtime.checkpointing.exporting import export_model
from colossal_core.runtime.checkpointing.importing import import_model
from colossal_core.runtime.checkpointing.report import LoadReport
from colossal_core.runtime.checkpointing.shards import model_holdings
from colossal_testkit.engine import engine_of
from colossal_testkit.models import randomise
from colossal_testkit.parity import boost_workload
from colossal_testkit.ranks import run_ranks, run_ranks_expecting_errors

from .strategy_cases import CASES, Case, build, make_registry
from .weight_files import read_weights, same_bits, unique_state, write_shards, write_weights

LAYOUTS = ("qkv-4-shared-kv", "stages-3", "vocabulary-3-x-data-2", "experts-2", "features-3", "cube")

each_layout = pytest.mark.parametrize(
    "case", [case for case in CASES if case.name in LAYOUTS], ids=lambda case: case.name
)


class Tied(nn.Module):
    """An embedding that is its head, with a norm between."""

    def __init__(self, vocabulary: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Map ``[batch, time]`` to logits."""
        outputs: torch.Tensor = self.head(self.norm(self.embedding(ids)))
        return outputs


def boost_tied(precision: str = "fp32") -> tuple[Booster, Tied, torch.optim.Optimizer]:
    """Return a boosted model of that kind."""
    torch.manual_seed(0)
    model = Tied()
    booster = Booster(precision=precision)
    _, optimizer = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.5))
    return booster, model, optimizer


def weights_of(vocabulary: int = 6) -> dict[str, torch.Tensor]:
    """Return other weights for it, as a file has them."""
    model = Tied(vocabulary)
    randomise(model, seed=11)
    return unique_state(model)


# --- what happens on the ranks ------------------------------------------------------------------------------


def import_case(case: Case, weights: Path, folder: Path) -> tuple[LoadReport, int]:
    """Import into the model of a case and export it; return the report and the bytes of this rank's boxes."""
    booster, work = boost_workload(case.recipe(), (), case.settings, make_registry)
    engine = engine_of(booster)
    report = import_model(engine, work.model, weights)
    export_model(engine, work.model, folder)
    (name,) = engine.models
    boxes = {(held.name, held.box): held.view.nbytes for held in model_holdings(engine, name).holdings}
    return report, sum(boxes.values())


def import_and_step(weights: Path, precision: str) -> dict[str, list[torch.Tensor]]:
    """Import, and take a step that changes nothing; return values and masters before and after."""
    booster, model, optimizer = boost_tied(precision)
    engine = engine_of(booster)
    import_model(engine, model, weights)
    optimizer.param_groups[0]["lr"] = 0.0
    found: dict[str, list[torch.Tensor]] = {}
    for _ in range(2):
        for place in engine.manager.places():
            if place.state in {"value", "master"}:
                found.setdefault(f"{place.key[1]} {place.state}", []).append(place.tensor.detach().clone())
        model(torch.arange(4).view(2, 2)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return found


def import_from(folders: list[Path]) -> LoadReport:
    """Import from a directory that each rank is given; weights are as they were when that fails."""
    booster, model, _ = boost_tied()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    try:
        return import_model(engine_of(booster), model, folders[torch.distributed.get_rank()])
    except CheckpointError:
        assert all(map(torch.equal, before, model.parameters()))
        raise


def import_alone(
    weights: Path, *, strict: bool = True, precision: str = "fp32"
) -> tuple[LoadReport, Mapping[str, torch.Tensor]]:
    """Import in this process; return the report and the state of the model afterwards."""
    booster, model, _ = boost_tied(precision)
    report = import_model(engine_of(booster), model, weights, strict=strict)
    return report, {name: value.detach().clone() for name, value in model.state_dict().items()}


# --- contents -----------------------------------------------------------------------------------------------


@each_layout
def test_every_layout_reads_its_boxes(case: Case, tmp_path: Path) -> None:
    """Ranks of any plan hold the weights of the file afterwards, and have read no row that is not theirs."""
    other = build(case.model).model
    randomise(other, seed=17)
    weights = unique_state(other)
    write_shards(tmp_path / "hub", weights)

    found = run_ranks(import_case, case.nproc, case, tmp_path / "hub", tmp_path / "export")

    exported = read_weights(tmp_path / "export")
    assert all(same_bits(exported[name], value) for name, value in weights.items())
    assert all(report.loaded == len(weights) and not report.problems for report, _ in found)
    assert all(report.bytes_read <= 1.05 * num_bytes for report, num_bytes in found)


def test_masters_take_the_stored_bits_and_values_are_rounded_from_them(tmp_path: Path) -> None:
    """A step after an import starts from the file, not from what the model had before."""
    weights = weights_of()
    write_weights(tmp_path / "model.safetensors", weights)

    for found in run_ranks(import_and_step, 2, tmp_path, "bf16"):
        for name, stored in weights.items():
            for value, master in zip(found[f"{name} value"], found[f"{name} master"], strict=True):
                assert same_bits(master.view(-1), stored.view(-1))
                assert same_bits(value.view(-1), stored.bfloat16().view(-1))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_files_of_mixed_dtypes_are_cast(precision: str, tmp_path: Path) -> None:
    """Every floating dtype is read, and the report says what was cast."""
    weights = weights_of()
    weights["embedding.weight"] = weights["embedding.weight"].bfloat16()
    weights["norm.weight"] = weights["norm.weight"].double()
    write_weights(tmp_path / "model.safetensors", weights)

    report, state = import_alone(tmp_path, precision=precision)

    assert report.cast == ("embedding.weight from BF16 to F32", "norm.weight from F64 to F32")
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    for name, stored in weights.items():
        assert torch.equal(state[name], stored.float().to(dtype))


def test_tied_weights_are_found_under_any_of_their_names(tmp_path: Path) -> None:
    """A file may have either name, or both with the same values."""
    weights = weights_of()
    tied = weights.pop("embedding.weight")
    write_weights(tmp_path / "second" / "model.safetensors", {**weights, "head.weight": tied})
    both = {**weights, "head.weight": tied, "embedding.weight": tied}
    write_weights(tmp_path / "both" / "model.safetensors", both)

    for folder, aliased in (("second", ("embedding.weight as head.weight",)), ("both", ())):
        report, state = import_alone(tmp_path / folder)
        assert report.aliased == aliased
        assert torch.equal(state["head.weight"], tied)


def test_two_values_of_tied_weights_are_refused(tmp_path: Path) -> None:
    """A file of a model without the tie does not lose one of its two matrices silently."""
    weights = weights_of()
    write_weights(tmp_path / "model.safetensors", {**weights, "head.weight": weights["embedding.weight"] + 1})

    with pytest.raises(CheckpointError, match="one tensor in the model") as caught:
        import_alone(tmp_path)

    assert "'head.weight'" in str(caught.value)
    assert "untie" in caught.value.hint


def test_one_file_may_be_named(tmp_path: Path) -> None:
    """A path of a file, and a directory with one file of any name, are as good as the usual one."""
    weights = weights_of()
    write_weights(tmp_path / "pytorch.safetensors", weights)

    for path in (tmp_path, tmp_path / "pytorch.safetensors"):
        _, state = import_alone(path)
        assert torch.equal(state["norm.bias"], weights["norm.bias"])


def test_old_graphs_do_not_see_new_weights(tmp_path: Path) -> None:
    """A backward through a graph from before the import fails as after any change in place."""
    write_weights(tmp_path / "model.safetensors", weights_of())
    booster, model, _ = boost_tied()
    loss = model(torch.arange(4).view(2, 2)).square().mean()

    import_model(engine_of(booster), model, tmp_path)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# --- what does not fit --------------------------------------------------------------------------------------


def test_resized_vocabulary_is_told_with_both_shapes(tmp_path: Path) -> None:
    """Nothing is cut or filled up silently: shapes are named on every rank, with what to do."""
    write_weights(tmp_path / "model.safetensors", weights_of(vocabulary=8))

    errors = run_ranks_expecting_errors(import_from, 2, [tmp_path, tmp_path], error=CheckpointError)

    for error in errors:
        assert "embedding.weight (8, 4), here (6, 4)" in str(error)
        assert "resize_token_embeddings" in error.hint


def test_missing_and_unexpected_tensors_are_named(tmp_path: Path) -> None:
    """Strict by default; otherwise what is there is taken, and the report says the rest."""
    weights = weights_of()
    del weights["norm.bias"]
    weights["classifier.weight"] = torch.zeros(2, 2)
    weights["norm.weight"] = torch.zeros(5)
    write_weights(tmp_path / "model.safetensors", weights)

    with pytest.raises(CheckpointError) as caught:
        import_alone(tmp_path)
    report, state = import_alone(tmp_path, strict=False)

    for text in ("1 missing: norm.bias", "1 unexpected: classifier.weight", "norm.weight (5,), here (4,)"):
        assert text in str(caught.value)
    assert (report.loaded, report.missing, report.unexpected) == (1, ("norm.bias",), ("classifier.weight",))
    assert torch.equal(state["embedding.weight"], weights["embedding.weight"])
    assert torch.equal(state["norm.weight"], torch.ones(4))


def test_ranks_that_see_different_files_are_told(tmp_path: Path) -> None:
    """Copies on two machines that are not equal would make a mixture of models."""
    weights = weights_of()
    write_weights(tmp_path / "a" / "model.safetensors", weights)
    write_weights(tmp_path / "b" / "model.safetensors", {n: value.double() for n, value in weights.items()})

    errors = run_ranks_expecting_errors(
        import_from, 2, [tmp_path / "a", tmp_path / "b"], error=RankMismatchError
    )

    assert all("F64" in str(error) for error in errors)


def test_a_file_that_only_one_rank_misses_ends_all(tmp_path: Path) -> None:
    """The others are told the reason instead of waiting."""
    write_weights(tmp_path / "a" / "model.safetensors", weights_of())

    errors = run_ranks_expecting_errors(import_from, 2, [tmp_path / "a", tmp_path / "b"])

    assert all("does not exist" in str(error) for error in errors)
