"""The parameter table: serial entries, cuts, what is refused, and the comparison of all ranks' tables."""

from __future__ import annotations

import re

import pytest
import torch
from attrs import evolve
from torch import nn

from colossal_core.boxes import Box
from colossal_core.errors import ColossalError, UsageError
from colossal_core.mesh import Axis, GroupSpec, MeshLayout
from colossal_core.runtime.cover import HeldEntry, HeldPart, find_cover_problems, held_entries
from colossal_core.runtime.table import ParameterTable, Part, check_groups, whole_part

LAYOUT = MeshLayout(
    (
        Axis(name="data", degree=3, divides_batch=True, gradients="average"),
        Axis(name="sequence", degree=2, divides_batch=True, gradients="sum"),
        Axis(name="tensor", degree=2),
    )
)
"""12 ranks."""


class Tied(nn.Module):
    """An embedding whose weight is also the head's, a frozen layer, and buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.frozen = nn.Linear(4, 4, bias=False).requires_grad_(False)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7)
        self.head.weight = self.embedding.weight


class Blocks(nn.Module):
    """Two blocks that share one bias."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(2))
        self.last = nn.Linear(3, 2)
        first, second = (layer.get_submodule("0") for layer in self.layers)
        second.register_parameter("bias", first.get_parameter("bias"))


def make_table(**models: nn.Module) -> ParameterTable:
    """Return the serial table of some models on the layout of this file."""
    return ParameterTable.serial(models, LAYOUT)


def cut_rows(table: ParameterTable, key: tuple[str, str], rank: int) -> None:
    """Cut dim 0 of a parameter over the two tensor ranks, unevenly, as a strategy would on ``rank``."""
    entry = table[key]
    rows, first = entry.shape[0], -(-entry.shape[0] // 2)
    start, stop = ((0, first), (first, rows))[LAYOUT.coordinates(rank)["tensor"]]
    tensor = table.tensor(entry)
    tensor.data = tensor.detach()[start:stop].clone()
    box = Box((start, *(0 for _ in entry.shape[1:])), (stop - start, *entry.shape[1:]))
    part = Part(box=box, local=(0,) * len(entry.shape), holders=LAYOUT.without("tensor"))
    table.cut(key, parts=[part])


# --- serial models ------------------------------------------------------------------------------------------


def test_serial_entries_are_whole_and_reduced_as_the_axes_say() -> None:
    """Before any cut all ranks hold everything; sums run over all axes that say so."""
    table = make_table(model=Tied())

    for entry in table:
        assert entry.parts == (whole_part(entry.shape, LAYOUT.everyone()),)
        assert entry.reduce == GroupSpec(("data", "sequence"))
        assert entry.divisor == 3


def test_entries_come_in_the_order_of_the_serial_model() -> None:
    """Parameters first and buffers behind them, as torch names them; a tie counts where it comes first."""
    entries = list(make_table(model=Tied()))

    assert [(entry.kind, entry.name) for entry in entries] == [
        ("parameter", "embedding.weight"),
        ("parameter", "frozen.weight"),
        ("parameter", "norm.weight"),
        ("parameter", "norm.bias"),
        ("parameter", "head.bias"),
        ("buffer", "norm.running_mean"),
        ("buffer", "norm.running_var"),
        ("buffer", "norm.num_batches_tracked"),
    ]
    assert [entry.name for entry in entries if entry.trainable] == [
        "embedding.weight",
        "norm.weight",
        "norm.bias",
        "head.bias",
    ]


def test_tied_names_lead_to_one_entry() -> None:
    """An alias finds the entry that owns the tensor, and so does the tensor itself."""
    model = Tied()
    table = make_table(model=model)

    entry = table["model", "head.weight"]

    assert entry is table["model", "embedding.weight"]
    assert entry.aliases == (("model", "head.weight"),)
    assert table.entry_of(model.head.weight) is entry
    assert table.tensor(entry) is model.embedding.weight


def test_parameter_of_two_models_is_one_entry_of_the_first() -> None:
    """Two models of one boost call may share a parameter; the second name is an alias in the other model."""
    one, other = Tied(), Tied()
    other.frozen.weight = one.frozen.weight
    table = make_table(one=one, other=other)

    entry = table["other", "frozen.weight"]

    assert entry.key == ("one", "frozen.weight")
    assert entry.aliases == (("other", "frozen.weight"),)
    assert len(table) == 2 * 8 - 1


def test_parameters_belong_to_the_block_that_needs_them() -> None:
    """A repeated block is a unit; what two blocks share belongs to the root, as does all outside of them."""
    table = make_table(model=Blocks())

    units = {entry.name: entry.unit for entry in table}

    assert units == {
        "layers.0.0.weight": "layers.0",
        "layers.0.0.bias": "",
        "layers.1.0.weight": "layers.1",
        "last.weight": "",
        "last.bias": "",
    }


def test_scalars_and_empty_parameters_have_an_entry() -> None:
    """A 0-d parameter has a box without dims, one without elements an empty box."""
    model = nn.ParameterDict({"scalar": torch.tensor(2.0), "empty": torch.empty(0, 3)})

    found = {entry.name: entry.parts[0].box for entry in make_table(model=model)}

    assert found == {"scalar": Box((), ()), "empty": Box((0, 0), (0, 3))}


@pytest.mark.parametrize("name", ["head.weights", "norm"])
def test_unknown_name_is_refused(name: str) -> None:
    """A strategy that asks for what is not there hears which model and name it was."""
    with pytest.raises(UsageError, match=f"'model' has no parameter or buffer named '{name}'"):
        make_table(model=Tied())["model", name]


def test_different_parameters_in_one_memory_are_refused() -> None:
    """A view registered as a parameter of its own would be untied silently by flat buffers."""
    model = nn.Module()
    whole = nn.Parameter(torch.zeros(6))
    model.register_parameter("whole", whole)
    model.register_parameter("view", nn.Parameter(whole.detach()[2:4]))

    with pytest.raises(UsageError, match="'whole' and 'view' share memory"):
        make_table(model=model)


def test_neighbours_in_one_memory_are_accepted() -> None:
    """Parameters may be stretches of one tensor as long as they have no element in common."""
    memory = torch.zeros(6)
    model = nn.ParameterDict({"first": memory[:2], "second": memory[2:]})

    assert len(make_table(model=model)) == 2


# --- agreement before anything is cut -----------------------------------------------------------------------


def test_agreement_lines_tell_everything_that_ranks_must_share() -> None:
    """Names, shapes, dtypes, what is trainable and what is tied stand in the lines that ranks compare."""
    lines = make_table(model=Tied()).agreement_lines()

    assert lines[0] == "parameter model.embedding.weight (7, 4) float32 trainable tied to model.head.weight"
    assert lines[1] == "parameter model.frozen.weight (4, 4) float32 frozen"
    assert lines[-1] == "buffer model.norm.num_batches_tracked () int64"


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.double(),
        lambda model: model.norm.requires_grad_(False),
        lambda model: setattr(model.head, "weight", nn.Parameter(torch.zeros(7, 4))),
        lambda model: setattr(model.head, "bias", nn.Parameter(torch.zeros(8))),
        lambda model: setattr(model, "extra", nn.Linear(1, 1)),
    ],
    ids=["dtype", "frozen", "untied", "shape", "name"],
)
def test_models_that_differ_have_different_lines(change: object) -> None:
    """Whatever differs between ranks is seen before anything is cut."""
    assert callable(change)
    changed = Tied()
    change(changed)

    assert make_table(model=changed).agreement_lines() != make_table(model=Tied()).agreement_lines()


# --- cuts ---------------------------------------------------------------------------------------------------


def test_cut_replaces_what_it_names_and_keeps_the_rest() -> None:
    """A cut changes parts, group and divisor only where it says so, and an alias names the same entry."""
    model = Tied()
    table = make_table(model=model)
    before = table["model", "embedding.weight"]

    cut_rows(table, ("model", "head.weight"), rank=1)
    after = table.cut(("model", "embedding.weight"), divisor=6)

    assert after == evolve(before, parts=after.parts, divisor=6)
    assert after.parts[0].box == Box((4, 0), (3, 4))
    assert table.entry_of(model.head.weight) is after


def test_cut_writes_groups_in_their_normal_form() -> None:
    """However a strategy writes a group, buffers are dealt by what it means."""
    table = make_table(model=Tied())
    key = ("model", "norm.weight")
    part = evolve(
        table[key].parts[0],
        holders=GroupSpec(("tensor", "sequence", "data", "pipeline")),
        sum_over=GroupSpec(("tensor",), (((1,), (0,)),)),
    )

    entry = table.cut(key, parts=[part], reduce=GroupSpec(("sequence", "data")))

    assert entry.parts[0].holders == LAYOUT.everyone()
    assert entry.parts[0].sum_over == GroupSpec(("tensor",))
    assert entry.reduce == GroupSpec(("data", "sequence"))


def test_tensor_that_takes_the_place_of_another_is_found() -> None:
    """Where identity cannot be kept, as for buffers, the table follows the new object."""
    model = Tied()
    table = make_table(model=model)
    old, new = model.norm.running_mean, torch.zeros(2)
    part = Part(box=Box((0,), (2,)), local=(0,), holders=LAYOUT.without("tensor"))

    entry = table.cut(("model", "norm.running_mean"), parts=[part], tensor=new)

    assert old is not None
    assert table.entry_of(new) is entry
    assert table.entry_of(old) is None
    assert table.tensor(entry) is new


def test_rank_may_hold_nothing() -> None:
    """A stage that a parameter does not belong to has no part of it."""
    assert make_table(model=Tied()).cut(("model", "head.bias"), parts=[]).parts == ()


def test_closed_table_refuses_cuts() -> None:
    """The memory manager relies on the table, so nothing changes afterwards."""
    table = make_table(model=Tied())
    table.close()

    with pytest.raises(ColossalError, match=r"'head\.bias' is cut after the table was closed"):
        table.cut(("model", "head.bias"), parts=[])


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([((5, 0), (2, 4), (0, 0)), ((6, 0), (1, 4), (2, 0))], "overlaps another part in its global shape"),
        ([((0, 0), (2, 4), (0, 0)), ((4, 0), (2, 4), (1, 0))], "overlaps another part in the local tensor"),
        ([((6, 0), (2, 4), (0, 0))], r"reaches outside its global shape \(7, 4\)"),
        ([((0, -1), (2, 2), (0, 0))], r"reaches outside its global shape \(7, 4\)"),
        ([((0, 0), (4, 4), (0, 0))], r"reaches outside the local tensor \(3, 4\)"),
        ([((0,), (4,), (0,))], "reaches outside its global shape"),
    ],
    ids=["same elements", "same memory", "end", "start", "local", "dims"],
)
def test_parts_that_cannot_be_are_refused(parts: list[tuple[tuple[int, ...], ...]], message: str) -> None:
    """Each element lies in the parameter and in the local tensor, and a rank holds none twice."""
    table = make_table(model=Tied())
    tensor = table.tensor(table["model", "head.weight"])
    tensor.data = tensor.detach()[:3].clone()
    cuts = [
        Part(box=Box(offset, size), local=local, holders=LAYOUT.everyone()) for offset, size, local in parts
    ]

    with pytest.raises(UsageError, match=message) as caught:
        table.cut(("model", "head.weight"), parts=cuts)

    assert "'embedding.weight'" in str(caught.value)


def test_divisor_below_one_is_refused() -> None:
    """A divisor counts ranks."""
    with pytest.raises(UsageError, match=r"divisor of parameter 'head\.bias' is 0"):
        make_table(model=Tied()).cut(("model", "head.bias"), divisor=0)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (
            (GroupSpec(("data",)), GroupSpec()),
            r"reduced over ranks \(0, 2, 4, 6, 8, 10\), but .* held by \(0, 4, 8\)",
        ),
        (
            (LAYOUT.without("tensor"), GroupSpec(("tensor",))),
            r"summed over ranks \(0, 1\), but .* held by \(0, 2, 4, 6, 8, 10\)",
        ),
        ((LAYOUT.everyone(), GroupSpec(("sequence", "tensor"))), "count some of it twice"),
    ],
    ids=["reduce", "sum_over", "both"],
)
def test_groups_that_contradict_each_other_are_refused(
    groups: tuple[GroupSpec, GroupSpec], message: str
) -> None:
    """Who takes part in a sum holds the part, and a gradient is not summed twice over the same ranks."""
    table = make_table(model=Tied())
    key = ("model", "norm.weight")
    holders, sum_over = groups
    entry = table.cut(key, parts=[evolve(table[key].parts[0], holders=holders, sum_over=sum_over)])

    with pytest.raises(UsageError, match=message):
        check_groups(entry, LAYOUT, rank=0)


# --- the tables of all ranks --------------------------------------------------------------------------------


def collect_books() -> list[dict[tuple[str, str], HeldEntry]]:
    """Return what the tables of all ranks say about a model with one cut and one tied weight."""
    books = []
    for rank in range(LAYOUT.world_size):
        table = make_table(model=Tied())
        cut_rows(table, ("model", "embedding.weight"), rank)
        key = ("model", "norm.weight")
        table.cut(key, parts=[evolve(table[key].parts[0], sum_over=GroupSpec(("tensor",)))])
        books.append(held_entries(table, rank))
    return books


UPPER, MOVED, NORM = Box((0, 0), (4, 4)), Box((0, 0), (3, 4)), Box((0,), (4,))
ALL, EVEN = tuple(range(12)), tuple(range(0, 12, 2))


def test_tables_that_fit_together_have_no_problems() -> None:
    """Uneven cuts, whole parameters, buffers and partial sums are covered once by what the ranks say."""
    assert find_cover_problems(collect_books()) == []


@pytest.mark.parametrize(
    ("name", "part", "message"),
    [
        ("embedding.weight", HeldPart(box=MOVED, holders=EVEN, sum_over=(0,)), "overlaps"),
        (
            "embedding.weight",
            HeldPart(box=MOVED, holders=EVEN, sum_over=(0,)),
            r"rank 0 says that .* held by \(0, 2, 4, 6, 8, 10\)",
        ),
        (
            "embedding.weight",
            HeldPart(box=UPPER, holders=(0, 2), sum_over=(0,)),
            r"held by \(0, 2\), and it is held by \(0, 2, 4, 6, 8, 10\)",
        ),
        (
            "norm.weight",
            HeldPart(box=NORM, holders=ALL, sum_over=(0,)),
            r"rank 1 sums .* over \(0, 1\), rank 0 over \(0,\)",
        ),
    ],
    ids=["overlap", "missing holder", "wrong holders", "sum"],
)
def test_table_that_differs_on_one_rank_is_found(name: str, part: HeldPart, message: str) -> None:
    """What one rank says about others is held against what they say themselves."""
    books = collect_books()
    books[0]["model", name] = evolve(books[0]["model", name], parts=(part,))

    assert re.search(f"model.{name}: .*{message}", "\n".join(find_cover_problems(books)))


def test_elements_that_nobody_holds_are_found() -> None:
    """A parameter is covered completely."""
    books = collect_books()
    for rank in range(1, LAYOUT.world_size, 2):
        books[rank]["model", "embedding.weight"] = evolve(books[rank]["model", "embedding.weight"], parts=())

    assert "model.embedding.weight: its boxes have 16 elements of 28" in find_cover_problems(books)


def test_reductions_that_do_not_fit_are_found() -> None:
    """Ranks that sum a gradient hold the same boxes of it and divide by the same number."""
    books = collect_books()
    key = ("model", "head.bias")
    books[4][key] = evolve(books[4][key], divisor=7)
    books[6][key] = evolve(books[6][key], parts=())

    problems = "\n".join(find_cover_problems(books))

    assert "rank 0 sums over (0, 2, 4, 6, 8, 10) and divides by 3, rank 4 over" in problems
    assert "ranks 0 and 6 reduce its gradient together, and hold different boxes" in problems


def test_rank_that_does_not_know_a_parameter_is_found() -> None:
    """All ranks have an entry for everything, also for what they hold nothing of."""
    books = collect_books()
    del books[3]["model", "head.bias"]

    assert find_cover_problems(books) == ["model.head.bias: ranks [3] do not know it"]
