"""Models of transformers under a pipeline: their own forward, cut, has the numbers of one process."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from colossal_core.plugins import Registry
from colossal_core.runtime.booster import Booster
from colossal_pipeline import Pipeline, plugin
from colossal_testkit.models import randomise
from colossal_testkit.ranks import run_ranks

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.timeout(120)

SIZES = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 4, "num_attention_heads": 2}
CALM = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

KINDS: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            "vocab_size": 31,
            "n_embd": 8,
            "n_layer": 4,
            "n_head": 2,
            "n_positions": 16,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
    ),
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**SIZES, "vocab_size": 31, "num_key_value_heads": 1}),
    "mixtral": (
        "MixtralForCausalLM",
        "MixtralConfig",
        {
            **SIZES,
            "vocab_size": 31,
            "num_key_value_heads": 1,
            "num_local_experts": 3,
            "num_experts_per_tok": 2,
            "experts_implementation": "eager",  # the others take no fp64
        },
    ),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": 31,
            "d_model": 8,
            "d_kv": 4,
            "d_ff": 12,
            "num_layers": 2,
            "num_heads": 2,
            "dropout_rate": 0.0,
            "decoder_start_token_id": 0,
        },
    ),
    "bert": (
        "BertForMaskedLM",
        "BertConfig",
        {**SIZES, **CALM, "vocab_size": 31, "max_position_embeddings": 16},
    ),
    "vit": ("ViTForImageClassification", "ViTConfig", {**SIZES, "image_size": 8, "patch_size": 4}),
}

DEEP: Mapping[str, Mapping[str, Any]] = {
    "gpt2": {"n_layer": 10},
    "llama": {"num_hidden_layers": 10},
    "t5": {"num_layers": 5},
}
"""Changes that give a model as many modules as the largest number of stages here, which is 12."""

CASES = [
    ("gpt2", Pipeline(degree=3, microbatches=4, schedule="zbh1")),
    ("gpt2", Pipeline(degree=2, microbatches=2, schedule="interleaved", chunks=2)),
    ("llama", Pipeline(degree=2, microbatches=3, schedule="zbv", chunks=2)),
    ("mixtral", Pipeline(degree=3, microbatches=2)),
    ("t5", Pipeline(degree=4, microbatches=3)),
    ("t5", Pipeline(degree=3, microbatches=3, schedule="zbh1")),
    ("bert", Pipeline(degree=2, microbatches=2)),
    ("vit", Pipeline(degree=3, microbatches=2, schedule="gpipe")),
]


def build(
    kind: str, rows: int = 5, changes: Mapping[str, Any] | None = None
) -> tuple[nn.Module, list[dict[str, torch.Tensor]]]:
    """Return a small model in fp64 and the batches of three steps, all as keyword arguments."""
    model_class, config_class, fields = KINDS[kind]
    fields = {**fields, **(changes or {})}
    library = importlib.import_module("transformers")
    model = getattr(library, model_class)(getattr(library, config_class)(**fields)).double().train()
    randomise(model, seed=3)
    source = torch.Generator().manual_seed(5)
    batches = []
    for _ in range(3):
        if kind == "vit":
            images = torch.randn(5, 3, 8, 8, generator=source, dtype=torch.float64)
            batches.append({"pixel_values": images, "labels": torch.tensor([0, 1, 1, 0, 1])})
            continue
        ids = torch.randint(3, 31, (rows, 7), generator=source)
        mask = torch.ones_like(ids)
        mask[1, 5:] = 0
        labels = ids.masked_fill(mask == 0, -100)
        batches.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return model, batches


def train(
    kind: str, piece: Pipeline, rows: int = 5, changes: Mapping[str, Any] | None = None
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train three clipped steps."""
    model, batches = build(kind, rows, changes)
    registry = Registry.isolated({"pipeline": plugin})
    booster = Booster(piece, precision="fp64", max_grad_norm=0.5, registry=registry)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    model, optimizer = booster.boost(model, optimizer)
    losses = []
    for batch in batches:
        losses.append(float(booster.forward_backward(model, batch)))
        optimizer.step()
        optimizer.zero_grad()
    with booster.full_parameters(model) as found:
        return losses, {name: value.detach().clone() for name, value in found.items()}


@pytest.mark.parametrize(("kind", "piece"), CASES, ids=lambda value: getattr(value, "schedule", value))
def test_numbers_are_those_of_one_rank(kind: str, piece: Pipeline) -> None:
    """Losses that models compute themselves, masks and labels of -100 included."""
    alone = Pipeline(degree=1, microbatches=piece.microbatches)
    (expected,) = run_ranks(train, 1, kind, alone, timeout_seconds=60)

    for losses, weights in run_ranks(train, piece.degree, kind, piece, timeout_seconds=60):
        assert losses == pytest.approx(expected[0], rel=1e-6)
        for name, value in weights.items():
            assert torch.allclose(value, expected[1][name], rtol=0, atol=1e-10), name


def train_often(
    kind: str, degree: int, schedule: str, chunks: int, numbers: tuple[int, ...]
) -> list[tuple[list[float], dict[str, torch.Tensor]]]:
    """Train a deep model anew with each number of micro-batches."""
    pieces = [
        Pipeline(degree=degree, microbatches=number, schedule=schedule, chunks=chunks) for number in numbers
    ]
    return [train(kind, piece, 9, DEEP[kind]) for piece in pieces]


@functools.cache
def deep_reference(kind: str, number: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the run of one stage."""
    return run_ranks(train_often, 1, kind, 1, "1f1b", 1, (number,), timeout_seconds=100)[0][0]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("degree", [2, 3, 4])
@pytest.mark.parametrize(
    ("schedule", "chunks"),
    [
        ("gpipe", 1),
        ("1f1b", 1),
        ("interleaved", 1),
        ("interleaved", 2),
        ("interleaved", 3),
        ("zbh1", 1),
        ("zbv", 2),
    ],
)
@pytest.mark.parametrize("kind", list(DEEP))
def test_numbers_are_those_of_one_rank_with_any_number_of_micro_batches(
    kind: str, schedule: str, chunks: int, degree: int
) -> None:
    """Every schedule on 2, 3 and 4 ranks, with 1 to 3 stages on each, and 1 to 2p + 1 micro-batches."""
    numbers = tuple(range(1, 2 * degree + 2))
    ranks = run_ranks(train_often, degree, kind, degree, schedule, chunks, numbers, timeout_seconds=300)
    for runs in ranks:
        for number, (losses, weights) in zip(numbers, runs, strict=True):
            expected = deep_reference(kind, number)
            assert losses == pytest.approx(expected[0], rel=1e-6), number
            for name, value in weights.items():
                assert torch.allclose(value, expected[1][name], rtol=0, atol=1e-10), (number, name)


def test_one_rank_has_the_numbers_of_plain_torch() -> None:
    """The reference of the other tests: a pipeline of one stage, against the library by itself.

    The library computes losses in fp32 whatever the model is in, so micro-batches round otherwise.
    """
    for kind in KINDS:
        model, batches = build(kind)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
        losses = []
        for batch in batches:
            loss = model(**batch).loss
            loss.backward()
            losses.append(float(loss.detach()))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()

        alone = Pipeline(degree=1, microbatches=2)
        ((found, weights),) = run_ranks(train, 1, kind, alone, timeout_seconds=60)

        assert found == pytest.approx(losses, rel=1e-6), kind
        for name, value in model.named_parameters():
            assert torch.allclose(weights[name], value, rtol=0, atol=1e-5), (kind, name)
