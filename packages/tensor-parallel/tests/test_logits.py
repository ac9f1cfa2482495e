"""Cut logits: losses of pieces are those of the whole, and whatever else touches them sees the whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from colossal_core.errors import UsageError
from colossal_core.mesh import Axis, GroupSpec, MeshLayout
from colossal_core.runtime.collectives import Collectives
from colossal_core.runtime.mesh import Mesh
from colossal_tensor_parallel.logits import SplitLogits, whole
from colossal_tensor_parallel.loss import cut_cross_entropy
from colossal_tensor_parallel.wires import Wire
from colossal_testkit.ranks import run_ranks, run_ranks_expecting_errors

SIZE = 11

USES: Mapping[str, tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], int]] = {
    "mean": (lambda z, t: F.cross_entropy(z.flatten(0, 1), t.flatten()), 0),
    "sum, shifted": (
        lambda z, t: F.cross_entropy(
            z[:, :-1].float().reshape(-1, z.shape[-1]), t[:, 1:].flatten(), reduction="sum"
        ),
        0,
    ),
    "module, capped": (
        lambda z, t: torch.nn.CrossEntropyLoss(ignore_index=2)(
            (torch.tanh(z / 3) * 3).view(-1, SIZE), t.view(-1)
        ),
        0,
    ),
    "smoothed": (
        lambda z, t: F.cross_entropy(z.view(-1, SIZE), t.flatten(), label_smoothing=0.2, ignore_index=3),
        0,
    ),
    "each token": (lambda z, t: F.cross_entropy(z.view(-1, SIZE), t.flatten(), reduction="none").sum(), 0),
    "z-loss": (
        lambda z, t: F.cross_entropy(z.flatten(0, 1), t.flatten()) + 0.1 * z.logsumexp(-1).square().mean(),
        0,
    ),
    "classes in dim 1": (lambda z, t: F.cross_entropy(z.transpose(1, 2), t), 1),
    "class weights": (
        lambda z, t: F.cross_entropy(z.flatten(0, 1), t.flatten(), weight=torch.arange(1.0, 12.0).double()),
        1,
    ),
    "log softmax": (lambda z, t: F.nll_loss(z.log_softmax(-1).flatten(0, 1), t.flatten()), 1),
    "chosen": (lambda z, t: z.gather(-1, t.unsqueeze(-1)).sum(), 1),
    "bias": (lambda z, t: ((z + torch.arange(11.0).double()) * t.unsqueeze(-1)).square().mean(), 1),
}
"""Uses of logits and targets, and how many gathers they cost."""


def make_wire() -> Wire:
    """Return the wire among all ranks."""
    world = torch.distributed.get_world_size()
    layout = MeshLayout((Axis(name="tensor", degree=world),))
    mesh = Mesh(layout, torch.distributed.get_rank(), torch.device("cpu"))
    return Wire(collectives=Collectives(), group=mesh.group(GroupSpec(("tensor",))))


def make_numbers() -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits and targets."""
    source = torch.Generator().manual_seed(3)
    logits = torch.randn(4, 5, SIZE, generator=source, dtype=torch.float64) * 3
    return logits, torch.randint(0, SIZE, (4, 5), generator=source)


def use_pieces() -> dict[str, tuple[float, torch.Tensor, list[str]]]:
    """Return value, gradient of this rank's piece, and operations, for each use."""
    wire, (logits, target) = make_wire(), make_numbers()
    found = {}
    for name, (use, _) in USES.items():
        piece = wire.own(logits, -1).clone().requires_grad_()
        with wire.collectives.ledger.recording() as transfers:
            value = whole(use(SplitLogits(piece, wire, SIZE), target))
            value.backward()
        assert piece.grad is not None
        found[name] = (float(value.detach()), wire.join(piece.grad, SIZE, -1), [t.op for t in transfers])
    return found


@pytest.mark.parametrize("nproc", [2, 3])
def test_uses_of_pieces_equal_those_of_the_whole(nproc: int) -> None:
    """Values and gradients agree; known losses gather nothing, and other code gathers once."""
    logits, target = make_numbers()

    ranks = run_ranks(use_pieces, nproc)

    for name, (use, num_gathers) in USES.items():
        serial = logits.clone().requires_grad_()
        expected = use(serial, target)
        expected.backward()
        for found in ranks:
            value, gradient, operations = found[name]
            tolerance = 1e-6 if "float" in name or name == "sum, shifted" else 1e-12
            assert value == pytest.approx(float(expected.detach()), rel=tolerance), name
            assert serial.grad is not None
            assert torch.allclose(gradient, serial.grad, rtol=tolerance, atol=tolerance), name
            assert operations.count("all_gather") == num_gathers, name
            num_sums = 4 if name == "z-loss" else 2
            assert num_gathers or operations.count("all_reduce") == num_sums, name


def ask_for_what_shapes_say() -> tuple[Any, ...]:
    """Return what cut logits answer without communication."""
    wire, (logits, _) = make_wire(), make_numbers()
    cut = SplitLogits(wire.own(logits, -1), wire, SIZE)
    with wire.collectives.ledger.recording() as transfers:
        answers = (cut.shape, cut.size(-1), cut.dim(), len(cut), cut.dtype, cut.requires_grad, cut.numel())
    return (*answers, len(transfers))


def test_shapes_are_those_of_the_whole() -> None:
    """Code that asks for the vocabulary gets it, and nothing is moved for that."""
    assert run_ranks(ask_for_what_shapes_say, 2)[1] == (
        (4, 5, SIZE), SIZE, 3, 4, torch.float64, False, 4 * 5 * SIZE, 0
    )  # fmt: skip


def aim_outside() -> None:
    """Compute a loss of a class that does not exist."""
    wire, (logits, target) = make_wire(), make_numbers()
    cut_cross_entropy(wire.own(logits[0], -1), target[0] + SIZE, wire, SIZE)


def test_targets_outside_are_refused() -> None:
    """The message says which classes there are, on every rank."""
    errors = run_ranks_expecting_errors(aim_outside, 2, error=UsageError)

    assert all(f"there are {SIZE} classes" in str(error) for error in errors)
