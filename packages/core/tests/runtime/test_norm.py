"""The one routine for the gradient norm: weights from the table, any order, infinities, one message."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import nn

from colossal_core.boxes import Box
from colossal_core.errors import UsageError
from colossal_core.mesh import Axis, GroupSpec, MeshLayout
from colossal_core.runtime.collectives import Collectives
from colossal_core.runtime.mesh import Mesh
from colossal_core.runtime.norm import EarlySums, clip_factor, gradient_norm, non_finite_names, norm_pieces
from colossal_core.runtime.table import ParameterTable, Part, Place
from colossal_testkit.ranks import run_ranks

CPU = torch.device("cpu")
ALONE = MeshLayout((Axis(name="data", degree=1),))
GRID = MeshLayout(
    (Axis(name="data", degree=2, divides_batch=True, gradients="average"), Axis(name="tensor", degree=2))
)

ORDERS = (1.0, 2.0, 3.0, math.inf)


class Weights(nn.Module):
    """Three parameters, two of which are cut in the tests with ranks."""

    def __init__(self) -> None:
        super().__init__()
        source = torch.Generator().manual_seed(1)
        for name, shape in (("rows", (5, 4)), ("columns", (3, 6)), ("whole", (7,))):
            value = torch.randn(shape, generator=source, dtype=torch.float64)
            self.register_parameter(name, nn.Parameter(value))


def make_gradients() -> dict[str, torch.Tensor]:
    """Return the averaged gradients of the serial model."""
    source = torch.Generator().manual_seed(2)
    return {
        name: torch.randn(parameter.shape, generator=source, dtype=torch.float64)
        for name, parameter in Weights().named_parameters()
    }


def expected_norm(order: float) -> float:
    """Return torch's norm of the serial gradients."""
    flat = torch.cat([gradient.flatten() for gradient in make_gradients().values()])
    return float(torch.linalg.vector_norm(flat, order))


def place_of(name: str, tensor: torch.Tensor, start: int = 0, over: GroupSpec = GroupSpec()) -> Place:
    """Return the place of a gradient."""
    return Place(key=("model", name), state="gradient", tensor=tensor, start=start, sharded_over=over)


def norm_here(places: Sequence[Place], order: float = 2.0) -> float:
    """Return the norm of gradients of the serial model in a world of one rank."""
    table = ParameterTable.serial({"model": Weights()}, ALONE)
    pieces = norm_pieces(table, places, 0)
    everyone = Mesh(ALONE, 0, CPU).everyone()
    return gradient_norm(pieces, everyone, Collectives(), norm_type=order)


# --- one rank -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
def test_norm_is_that_of_torch(order: float) -> None:
    """Any positive order, and the largest element."""
    places = [place_of(name, gradient) for name, gradient in make_gradients().items()]

    assert norm_here(places, order) == pytest.approx(expected_norm(order), rel=1e-14)


def test_neighbours_in_memory_are_one_piece() -> None:
    """Gradients that lie behind each other and count alike are squared in one go."""
    table = ParameterTable.serial({"model": Weights()}, ALONE)
    gradients = make_gradients()
    flat = torch.cat([gradient.flatten() for gradient in gradients.values()])
    views = flat.split([gradient.numel() for gradient in gradients.values()])

    pieces = norm_pieces(table, [place_of(name, v) for name, v in zip(gradients, views, strict=True)], 0)

    assert [piece.names for piece in pieces] == [("model.rows", "model.columns", "model.whole")]
    assert pieces[0].tensor.data_ptr() == flat.data_ptr()
    assert pieces[0].tensor.numel() == flat.numel()


def test_ranges_of_a_gradient_add_up() -> None:
    """A manager may hold a gradient in ranges that cut through rows."""
    gradient = make_gradients()["rows"].flatten()
    places = [place_of("rows", gradient[at:end], at) for at, end in ((0, 3), (3, 3), (3, 17), (17, 20))]

    assert norm_here(places) == pytest.approx(float(gradient.norm()), rel=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_of_narrow_gradients_is_accumulated_in_fp64(dtype: torch.dtype) -> None:
    """Squares that would overflow fp32, and small ones beside large ones, count in full."""
    gradient = torch.full((5, 4), 2.0**100, dtype=dtype)
    gradient[0] = 1.0

    norm = norm_here([place_of("rows", gradient)])

    assert norm == pytest.approx(4 * 2.0**100, rel=1e-14)


def test_many_elements_are_squared_in_chunks() -> None:
    """More elements than a chunk holds give the sum of all of them, in fp32 and in fp64."""
    model = nn.ParameterDict({"long": torch.empty((1 << 17) + 3)})
    table = ParameterTable.serial({"model": model}, ALONE)
    everyone = Mesh(ALONE, 0, CPU).everyone()
    for dtype in (torch.float32, torch.float64):
        gradient = torch.full(((1 << 17) + 3,), 0.5, dtype=dtype)

        norm = gradient_norm(norm_pieces(table, [place_of("long", gradient)], 0), everyone, Collectives())

        assert norm == pytest.approx(0.5 * math.sqrt((1 << 17) + 3), rel=1e-14)


def test_sums_made_early_count_unless_gradients_were_written_since() -> None:
    """The bits are those of a later sum; other orders do not use them."""
    gradients = make_gradients()
    table = ParameterTable.serial({"model": Weights()}, ALONE)
    pieces = norm_pieces(table, [place_of(name, value) for name, value in gradients.items()], 0)
    everyone = Mesh(ALONE, 0, CPU).everyone()
    early = EarlySums()
    for order in (2.0, 3.0):
        measure = early.begin(pieces)
        for gradient in gradients.values():
            measure(gradient)
        gradients["rows"].mul_(3.0)

        found = gradient_norm(pieces, everyone, Collectives(), norm_type=order, early=early)

        assert found == gradient_norm(pieces, everyone, Collectives(), norm_type=order)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_gradient_that_is_not_finite_makes_no_finite_norm(order: float, bad: float) -> None:
    """Whatever the order, one element decides; the parameter is named."""
    gradients = make_gradients()
    gradients["columns"][1, 2] = bad
    places = [place_of(name, gradient) for name, gradient in gradients.items()]
    table = ParameterTable.serial({"model": Weights()}, ALONE)

    assert not math.isfinite(norm_here(places, order))
    assert non_finite_names(norm_pieces(table, places, 0), places) == ["model.columns"]


def test_finite_gradients_have_no_names() -> None:
    """Nothing is blamed when nothing is wrong."""
    places = [place_of(name, gradient) for name, gradient in make_gradients().items()]
    table = ParameterTable.serial({"model": Weights()}, ALONE)

    assert non_finite_names(norm_pieces(table, places, 0), places) == []


def test_norm_of_nothing_is_zero() -> None:
    """A rank without gradients, and a model without any, have a norm."""
    empty = nn.ParameterDict({"empty": torch.empty(0, 3)})
    table = ParameterTable.serial({"model": empty}, ALONE)

    assert norm_pieces(table, [place_of("empty", torch.empty(0, 3))], 0) == []
    assert norm_here([]) == 0.0
    assert norm_here([], math.inf) == 0.0


@pytest.mark.parametrize("order", [0.0, -1.0, math.nan])
def test_order_that_is_not_positive_is_refused(order: float) -> None:
    """Torch's other orders are no norms of a gradient."""
    with pytest.raises(UsageError, match="norm_type is"):
        norm_here([], order)


@pytest.mark.parametrize(
    ("norm", "bound", "factor"),
    [(2.0, None, 1.0), (2.0, 4.0, 1.0), (2.0, 1.0, 1.0 / (2.0 + 1e-6)), (0.0, 1.0, 1.0)],
)
def test_clipping_shrinks_as_torch_does_and_never_grows(
    norm: float, bound: float | None, factor: float
) -> None:
    """The factor is torch's, with its epsilon, and 1 below the bound or without one."""
    assert clip_factor(norm, bound) == factor


# --- ranks --------------------------------------------------------------------------------------------------


def cut_weights(rank: int) -> tuple[ParameterTable, list[tuple[str, torch.Tensor]]]:
    """Return the table and the local gradients of one rank of `GRID`, with padding that holds NaN.

    ``rows`` is cut over tensor unevenly, the second rank padding a row; ``columns`` is cut into two column
    blocks of which both ranks hold the middle two columns; ``whole`` is held by all.
    """
    model, gradients = Weights(), make_gradients()
    table = ParameterTable.serial({"model": model}, GRID)
    index, alone = GRID.coordinates(rank)["tensor"], GRID.without("tensor")
    first, num_rows = ((0, 3), (3, 2))[index]
    rows = torch.full((3, 4), math.nan, dtype=torch.float64)
    rows[:num_rows] = gradients["rows"][first : first + num_rows]
    model.get_parameter("rows").data = torch.zeros(3, 4, dtype=torch.float64)
    table.cut(
        ("model", "rows"),
        parts=[Part(box=Box((first, 0), (num_rows, 4)), local=(0, 0), holders=alone)],
    )
    start = (0, 2)[index]
    columns = gradients["columns"][:, start : start + 4].contiguous()
    own, shared = Box((0, (0, 4)[index]), (3, 2)), Box((0, 2), (3, 2))
    model.get_parameter("columns").data = torch.zeros(3, 4, dtype=torch.float64)
    table.cut(
        ("model", "columns"),
        parts=[
            Part(box=own, local=(0, own.offset[1] - start), holders=alone),
            Part(box=shared, local=(0, shared.offset[1] - start), holders=GRID.everyone()),
        ],
    )
    return table, [("rows", rows), ("columns", columns), ("whole", gradients["whole"])]


def norms_of_cut_gradients(poisoned_rank: int | None) -> tuple[dict[float, float], int, list[str]]:
    """Return norms of all orders, the bytes that one costs, and the parameters at fault on this rank.

    Gradients are sums over the two data ranks, twice the average; each rank holds half of ``whole`` only.
    """
    rank = dist.get_rank()
    table, gradients = cut_weights(rank)
    if rank == poisoned_rank:
        gradients[1][1][0, 0] = math.nan
    places = []
    for name, gradient in gradients:
        flat = 2 * gradient.reshape(-1)
        if name == "whole":
            start, stop = ((0, 4), (4, 7))[GRID.coordinates(rank)["data"]]
            places.append(place_of(name, flat[start:stop], start, GroupSpec(("data",))))
        else:
            places.append(place_of(name, flat))
    everyone = Mesh(GRID, rank, CPU).everyone()
    collectives = Collectives()
    pieces = norm_pieces(table, places, rank)
    found = {order: gradient_norm(pieces, everyone, collectives, norm_type=order) for order in ORDERS}
    num_bytes = sum(transfer.full_bytes for transfer in collectives.ledger.records)
    return found, num_bytes, non_finite_names(pieces, places)


def test_each_element_counts_once_however_many_ranks_hold_it() -> None:
    """Cut, shared, padded and sharded gradients have the serial model's norm, the same bits on all ranks."""
    found = run_ranks(norms_of_cut_gradients, 4, None)

    for order in ORDERS:
        assert {norms[order] for norms, _, _ in found} == {found[0][0][order]}
        assert found[0][0][order] == pytest.approx(expected_norm(order), rel=1e-13)


def test_norm_costs_eight_bytes() -> None:
    """One number travels, whatever the model."""
    assert [num_bytes for _, num_bytes, _ in run_ranks(norms_of_cut_gradients, 4, None)] == [32] * 4


def test_all_ranks_see_what_is_not_finite_on_one() -> None:
    """No rank can decide alone; the one that holds the element can name it, and blames no padding."""
    found = run_ranks(norms_of_cut_gradients, 4, 2)

    assert not any(math.isfinite(norm) for norms, _, _ in found for norm in norms.values())
    assert [names for _, _, names in found] == [[], [], ["model.columns"], []]
