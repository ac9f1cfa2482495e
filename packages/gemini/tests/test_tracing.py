"""What a step is seen to use, before training and in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from colossal_core.errors import CapabilityError, UsageError
from colossal_core.runtime.batches import split_batch
from colossal_core.runtime.precision import Precision
from colossal_gemini.layout import Layout, lay_out
from colossal_gemini.recording import Recorder
from colossal_gemini.trace import Trace
from colossal_gemini.tracing import batch_key, run_step, trace_step
from colossal_testkit.models import GPT, MLP, TokenLoss

from .traces import make_chunk

CPU = torch.device("cpu")


def gpt_batch(rows: int = 2, vocabulary: int = 41) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and targets."""
    return torch.randint(0, vocabulary, (rows, 6)), torch.randint(0, vocabulary, (rows, 6))


def record(model: nn.Module, batch: Any, criterion: Callable[..., torch.Tensor], layout: Layout) -> Trace:
    """Return the trace of a step that really runs."""
    values = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    recorder = Recorder(
        layout.chunks,
        key=batch_key(batch, trains=True),
        excludes=lambda tensor: tensor.untyped_storage()._cdata in values,
    )
    return run_step(model, split_batch(batch, CPU), criterion, layout, recorder)


@pytest.mark.parametrize("is_tied", [False, True])
def test_fake_and_real_steps_are_traced_alike(*, is_tied: bool) -> None:
    """The same moments, and the same bytes of everything else: to the byte on the CPU."""
    model, batch = GPT(is_tied=is_tied), gpt_batch()
    layout = lay_out(model, Precision("fp32"), chunk_bytes=6000)

    before = trace_step(model, batch, TokenLoss(), layout=layout)
    after = record(model, batch, TokenLoss(), layout)

    assert before == after
    assert len(before.chunks) > 3


def test_a_step_goes_through_units_and_back() -> None:
    """Needs are units; the root unit's chunks stay, and gradients are held until they are complete."""
    model = GPT(num_blocks=3)

    trace = trace_step(model, gpt_batch(), TokenLoss())

    names = [(moment.name, moment.phase[0]) for moment in trace.moments]
    blocks = ["blocks.0", "blocks.1", "blocks.2"]
    assert names == [
        ("GPT", "f"),
        *((block, "f") for block in blocks),
        ("GPT", "f"),
        ("GPT", "b"),
        *((block, "b") for block in reversed(blocks)),
        ("update", "u"),
    ]
    root = next(chunk.index for chunk in trace.chunks if chunk.is_pinned)
    assert all(root in moment.gradients for moment in trace.moments if moment.phase == "backward")
    assert all(len(moment.gradients) <= 2 for moment in trace.moments)
    others = [moment.other for moment in trace.moments]
    assert others[:4] == sorted(others[:4])
    assert others[5:] == sorted(others[5:], reverse=True)


def test_tracing_changes_nothing() -> None:
    """Neither values, gradients, buffers, attributes nor random numbers."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state, parameters = torch.get_rng_state(), list(model.parameters())

    trace_step(model, (torch.ones(5, 3), torch.ones(5, 2)), nn.MSELoss())

    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert all(not module._forward_pre_hooks for module in model.modules())


def test_a_model_without_memory_is_traced_in_its_precision() -> None:
    """On the meta device, in 16 bits: half the bytes of values, and outputs that leave in fp32."""
    with torch.device("meta"):
        model = GPT()
        batch = gpt_batch()

    narrow = trace_step(model, batch, TokenLoss(), precision=Precision("bf16"))
    wide = trace_step(GPT(), gpt_batch(), TokenLoss())

    assert sum(c.whole_bytes for c in narrow.chunks) * 2 == sum(c.whole_bytes for c in wide.chunks)
    assert max(m.other for m in narrow.moments) < max(m.other for m in wide.moments)


def test_recomputation_needs_less_and_comes_back_to_blocks() -> None:
    """Blocks keep their inputs only, and are needed in backward as without it."""
    model, batch = GPT(num_blocks=4), gpt_batch(rows=8)

    kept = trace_step(model, batch, TokenLoss())
    again = trace_step(model, batch, TokenLoss(), recompute=True)

    assert [(m.name, m.phase) for m in again.moments] == [(m.name, m.phase) for m in kept.moments]
    assert max(m.other for m in again.moments) < 0.7 * max(m.other for m in kept.moments)


def test_frozen_and_unused_parameters_have_chunks() -> None:
    """A frozen one no gradient, and one that no loss depends on is held to no gradient either."""
    trace = trace_step(MLP(), (torch.ones(4, 7), torch.zeros(4, dtype=torch.long)), nn.CrossEntropyLoss())

    assert [chunk.is_trainable for chunk in trace.chunks] == [True, False]
    assert {chunk for moment in trace.moments for chunk in moment.gradients} == {0}


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_models_of_transformers_are_traced_from_their_labels() -> None:
    """With a batch of keyword arguments, and the loss inside the model."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=50,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    ids = torch.randint(0, 50, (2, 5))

    trace = trace_step(model, {"input_ids": ids, "labels": ids}, precision=Precision("bf16"))

    assert [m.name for m in trace.moments[:3]] == ["LlamaForCausalLM", "model.layers.0", "model.layers.1"]
    assert trace.moments[-1].phase == "update"


def test_a_mapping_is_the_arguments_of_a_model_that_brings_its_loss() -> None:
    """As for booster.forward_backward."""

    class Brings(nn.Module):
        """Returns its loss."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, samples: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            """Compare with the labels."""
            return {"loss": nn.functional.mse_loss(self.layer(samples), labels)}

    batch = {"samples": torch.ones(2, 3), "labels": torch.ones(2, 2)}

    trace = trace_step(Brings(), batch)

    assert [moment.phase for moment in trace.moments] == ["forward", "backward", "update"]
    assert "['labels']:(2, 2):float32" in trace.key


def test_models_that_look_at_values_are_refused_with_the_reason() -> None:
    """With what to do instead; a mistake in the batch stays what it is."""

    class Looks(nn.Linear):
        """Branches on a value."""

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            """Look at the sum."""
            return super().forward(inputs if inputs.sum() > 0 else -inputs)

    batch = (torch.ones(2, 3), torch.ones(2, 2))

    with pytest.raises(CapabilityError, match=r"Looks does not run .*: forward looks at values"):
        trace_step(Looks(3, 2), batch, nn.MSELoss())
    with pytest.raises(UsageError, match="without a criterion"):
        trace_step(nn.Linear(3, 2), batch)


def test_a_recorder_joins_needs_of_one_moment() -> None:
    """And counts what the last one held until it was given back."""
    recorder = Recorder((make_chunk(0), make_chunk(1)), key="k", excludes=lambda _: False)
    recorder.begin([torch.ones(2)])
    recorder.moment("a", "forward", (0,))
    recorder.moment("a", "forward", (0,))
    held = torch.ones(5)
    recorder.moment("a", "backward", (0,))
    recorder.hold_gradient(0)
    recorder.moment("b", "backward", (1,))
    recorder.drop_gradient(0)
    del held

    trace = recorder.finish()

    assert [(m.name, m.phase, m.gradients) for m in trace.moments] == [
        ("a", "forward", ()),
        ("a", "backward", (0,)),
        ("b", "backward", (0,)),
        ("update", "update", ()),
    ]
    assert [m.other for m in trace.moments] == [20, 20, 20, 0]
