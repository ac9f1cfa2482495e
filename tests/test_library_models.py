"""Models of the transformers library, cut among ranks, have the numbers of one process to 1e-10."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from colossal_core import Recompute
from colossal_tensor_parallel import TensorParallel
from colossal_testkit.ranks import run_ranks
from colossal_testkit.traffic import all_reduce_words, gather_words

from .library_models import NAMES, Outcome, train_on_ranks, train_serial

pytest.importorskip("transformers")
pytestmark = pytest.mark.timeout(120)  # the first import of the library takes a while on a busy machine


@functools.lru_cache(maxsize=32)
def serial_outcome(name: str, **changes: object) -> Outcome:
    """Return the numbers of one process."""
    return run_ranks(train_serial, 1, name, **changes, process_group=False, timeout_seconds=100)[0]


def train_changed(name: str, pieces: tuple[object, ...], changes: dict[str, Any]) -> Outcome:
    """Train a model with another configuration on this rank and the others."""
    return train_on_ranks(name, pieces, "plain", **changes)


def check(expected: Outcome, found: Outcome, *, loss_tolerance: float = 1e-10) -> None:
    """Compare losses, norms, all gradients of the first step, and all weights at the end."""
    assert found.losses == pytest.approx(expected.losses, rel=loss_tolerance)
    assert found.norms == pytest.approx(expected.norms, rel=1e-10)
    for kind in ("gradients", "weights"):
        mine, wanted = getattr(found, kind), getattr(expected, kind)
        assert mine.keys() == wanted.keys()
        for key, value in wanted.items():
            largest = max(float(value.abs().max()), 1e-3)
            assert float((mine[key] - value).abs().max()) <= 1e-10 * largest, f"{kind} of {key}"


@pytest.mark.parametrize(
    ("name", "nproc"),
    [*((name, 2) for name in NAMES), ("llama-tied", 4), ("gpt2", 4), ("t5", 4), ("bert", 4)],
)
def test_training_equals_one_process(name: str, nproc: int) -> None:
    """With two ranks for each layer, and with four, which share key-value heads."""
    pieces = (TensorParallel(degree=nproc),)

    ranks = run_ranks(train_on_ranks, nproc, name, pieces, "plain", timeout_seconds=100)

    for found in ranks:
        check(serial_outcome(name), found)


@pytest.mark.parametrize(
    ("name", "nproc"),
    [
        ("llama-tied", 4),
        ("vit", 2),
        ("t5", 2),
        *(pytest.param(name, 2, marks=pytest.mark.slow) for name in NAMES if name not in {"vit", "t5"}),
        *(pytest.param(name, 4, marks=pytest.mark.slow) for name in NAMES if name != "llama-tied"),
    ],
)
def test_training_with_divided_sequences_equals_one_process(name: str, nproc: int) -> None:
    """Six tokens, or five of an image, among ranks; norm weights are random and have shares of gradients."""
    pieces = (TensorParallel(degree=nproc, sequence=True),)

    ranks = run_ranks(train_on_ranks, nproc, name, pieces, "plain", timeout_seconds=100)

    for found in ranks:
        check(serial_outcome(name), found)


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", ["llama", "bert"])
@pytest.mark.parametrize("sequence", [False, True])
def test_three_ranks_share_six_heads(name: str, *, sequence: bool) -> None:
    """Neither 38 features nor 41 tokens divide by three."""
    changes = (
        {"num_attention_heads": 6, "num_key_value_heads": 3}
        if name == "llama"
        else {"num_attention_heads": 6}
    )
    pieces = (TensorParallel(degree=3, sequence=sequence),)

    ranks = run_ranks(train_changed, 3, name, pieces, changes, timeout_seconds=100)

    check(serial_outcome(name, **changes), ranks[2])


@pytest.mark.parametrize("name", ["llama-tied", "gpt2"])
def test_losses_inside_models_are_computed_of_pieces(name: str) -> None:
    """`forward_backward` has the same numbers with two data ranks whose labels weigh differently."""
    pieces = (TensorParallel(degree=2),)

    ranks = run_ranks(train_on_ranks, 4, name, pieces, "forward_backward", timeout_seconds=100)

    check(serial_outcome(name), ranks[3], loss_tolerance=1e-6)


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3"])
def test_traffic_is_that_of_the_formula(name: str) -> None:
    """Four sums of activations for each block, two for embedding and head, three words per token of loss."""
    nproc, tokens = 2, 4 * 6
    width = 12 if name == "gpt2" else 24
    pieces = (TensorParallel(degree=nproc),)

    ranks = run_ranks(train_on_ranks, nproc, name, pieces, "forward_backward", timeout_seconds=100)

    expected = all_reduce_words(2 * 4 * tokens * width + 2 * tokens * width + 3 * tokens, nproc)
    assert ranks[0].words == pytest.approx(expected)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_traffic_with_divided_sequences_is_that_of_the_formula(name: str) -> None:
    """Ten gathers and scatters of activations for each block, two for the embedding, three for the head."""
    nproc, tokens = 2, 4 * 6
    width = 12 if name == "gpt2" else 24
    pieces = (TensorParallel(degree=nproc, sequence=True),)

    ranks = run_ranks(train_on_ranks, nproc, name, pieces, "forward_backward", timeout_seconds=100)

    # The table of positions is whole, and its gradient, without a batch, is gathered once.
    positions = gather_words(6 * width, nproc) if name == "gpt2" else 0.0
    expected = gather_words((2 * 10 + 5) * tokens * width, nproc) + all_reduce_words(3 * tokens, nproc)
    assert ranks[0].words == pytest.approx(expected + positions)


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_ranks_hold_their_share(name: str) -> None:
    """Each of two ranks holds half of every matrix, stacked experts too; norms and routers are common."""
    common = {f"model.layers.{number}.mlp.gate.weight" for number in range(2)}
    pieces = (TensorParallel(degree=2),)

    found = run_ranks(train_on_ranks, 2, name, pieces, "plain", timeout_seconds=100)

    norms = sum(value.numel() for key, value in found[0].weights.items() if "norm" in key or key in common)
    whole = sum(value.numel() for value in found[0].weights.values())
    assert found[0].elements + found[1].elements == whole + norms
    assert abs(found[0].elements - norms - (whole - norms) / 2) < 0.01 * whole


def train_recomputed(name: str, changes: dict[str, Any]) -> Outcome:
    """Train a model with another configuration, and recompute its blocks."""
    return train_on_ranks(name, (Recompute(),), "plain", **changes)


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_recomputed_blocks_that_would_fill_a_cache_are_exact(name: str) -> None:
    """Models of the library get caches of keys and values in training, too, unless told otherwise."""
    changes: dict[str, Any] = {"attn_implementation": "eager"}
    ranks = run_ranks(train_recomputed, 1, name, changes, timeout_seconds=100)

    check(serial_outcome(name, **changes), ranks[0])
