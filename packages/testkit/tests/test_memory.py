"""Live bytes: each storage once, from its first use until nobody holds it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from colossal_testkit.memory import LiveBytes


def test_a_tensor_counts_while_it_lives() -> None:
    """Allocation and release are seen at once, and the peak stays."""
    with LiveBytes() as live:
        a = torch.zeros(100, dtype=torch.float32)
        b = torch.zeros(50, dtype=torch.float64)
        both = live.current().total_bytes
        del a
        one = live.current().total_bytes

    assert (both, one) == (800, 400)
    assert live.peak().total_bytes == 800
    assert b.numel() == 50


def test_views_and_shared_storages_count_once() -> None:
    """A view holds the whole storage behind it, and no more however many there are."""
    with LiveBytes() as live:
        whole = torch.zeros(64)
        views = [whole[:8], whole.view(8, 8).T, whole.detach(), nn.Parameter(whole[8:16])]
        with_views = live.current().total_bytes
        del whole
        views = views[:1]
        with_one = live.current().total_bytes
        views.clear()

    assert (with_views, with_one) == (256, 256)
    assert live.current().total_bytes == 0


def test_what_autograd_saves_is_alive_without_a_name() -> None:
    """The result of ``exp`` is saved for backward; it dies with the graph."""
    with LiveBytes() as live:
        weight = torch.ones(10, requires_grad=True)
        loss = (weight * 2).exp().sum()
        graph = live.current().total_bytes
        loss.backward()
        after = live.current().total_bytes

    # weight 40 and loss 4; exp's result 40 with the graph, the gradient 40 after it. ``weight * 2`` saves no
    # tensor.
    assert (graph, after) == (84, 84)
    assert weight.grad is not None


def test_a_resized_storage_counts_as_it_is() -> None:
    """Memory managers release by resizing to nothing, which no operation reports."""
    with LiveBytes() as live:
        tensor = torch.zeros(1000)
        tensor.untyped_storage().resize_(0)
        other = torch.zeros(10)
        released = live.current().total_bytes
        tensor.untyped_storage().resize_(400)

    assert released == other.numel() * 4
    assert live.current().total_bytes == 440
    assert live.peak().total_bytes == 4000


def test_an_expanded_scalar_holds_one_element() -> None:
    """A guard has the shape of a parameter and the memory of one number."""
    with LiveBytes() as live:
        guard = torch.tensor(float("nan")).expand(1000, 1000)
        total = live.current().total_bytes

    assert total == 4
    assert guard.shape == (1000, 1000)


def test_tensors_without_memory_count_nothing() -> None:
    """Meta tensors have shapes only."""
    with LiveBytes() as live:
        tensor = torch.empty(1000, device="meta")

    assert live.current().total_bytes == 0
    assert tensor.numel() == 1000


def test_training_is_counted_by_category() -> None:
    """A step of Adam on a linear layer holds what arithmetic says, at rest and at the peak of forward."""
    with LiveBytes() as live:
        model = nn.Sequential(nn.Linear(30, 20), nn.BatchNorm1d(20))
        optimizer = torch.optim.Adam(model.parameters())
        inputs = torch.zeros(7, 30)
        F.mse_loss(model(inputs), torch.zeros(7, 20)).backward()
        optimizer.step()
        live.label_training(model, optimizer)
        live.label("inputs", [inputs])
        report = live.current()

    numel = 30 * 20 + 20 + 20 + 20
    assert report.bytes_of("parameters") == 4 * numel
    assert report.bytes_of("gradients") == 4 * numel
    assert report.bytes_of("buffers") == 4 * (20 + 20) + 8
    # Two moments, and a step counter of four bytes for each of the four parameters.
    assert report.bytes_of("optimizer states") == 2 * 4 * numel + 4 * 4
    assert report.bytes_of("inputs") == 4 * 7 * 30
    assert report.total_bytes == sum(report.categories.values())


def test_the_peak_has_categories_too() -> None:
    """Labels that come later hold for the moment of the peak; what nobody labelled is other."""
    with LiveBytes() as live:
        kept = torch.zeros(10)
        temporary = torch.zeros(1000)
        del temporary
        live.label("kept", [kept])

    assert live.peak().categories == {"kept": 40, "other": 4000}
    assert live.current().categories == {"kept": 40}


def test_the_peak_can_start_anew() -> None:
    """A second phase is measured by itself."""
    with LiveBytes() as live:
        torch.zeros(1000)
        live.reset_peak()
        torch.zeros(10)

    assert live.peak().total_bytes == 40


def test_what_existed_before_counts_when_it_is_used() -> None:
    """An input from outside is held by its user, but it is there; it can also be counted from the start."""
    weight = nn.Parameter(torch.zeros(25))
    weight.grad = torch.zeros(25)
    with LiveBytes() as live:
        nothing = live.current().total_bytes
        weight.detach().add_(1)
        used = live.current().total_bytes
    with LiveBytes(include_existing=True) as everything:
        before_any_use = everything.current().total_bytes

    assert (nothing, used) == (0, 100)
    assert before_any_use >= 200


@pytest.mark.parametrize("width", [16, 33])
def test_activations_of_a_checkpointed_block_are_released(width: int) -> None:
    """Recomputation holds the inputs of a block only: what it saves is visible as bytes."""
    block = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
    inputs = torch.zeros(5, width, requires_grad=True)
    with LiveBytes() as plain:
        outputs = block(inputs)
        held = plain.current().total_bytes
    del outputs
    with LiveBytes() as recomputed:
        outputs = torch.utils.checkpoint.checkpoint(block, inputs, use_reentrant=False)
        less = recomputed.current().total_bytes

    # Two activations of the inner width, 4 bytes each, are what plain keeps in addition.
    assert held - less == 2 * 5 * 4 * width * 4
    assert outputs.shape == inputs.shape
