"""Collectives: exact results on 2 and 3 ranks in every dtype, and a ledger that counts what they move."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from colossal_core.mesh import Axis, GroupSpec, MeshLayout
from colossal_core.runtime.collectives import Collectives
from colossal_core.runtime.ledger import Ledger, Transfer
from colossal_core.runtime.mesh import Group, Mesh
from colossal_testkit import run_ranks

CPU = torch.device("cpu")
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64]


def world_group() -> Group:
    """Return the group of all ranks."""
    layout = MeshLayout((Axis(name="data", degree=dist.get_world_size(), gradients="average"),))
    return Mesh(layout, dist.get_rank(), CPU).everyone()


def values_of(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return what a rank brings: numbers whose sum depends on the order in low precision."""
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(numel, generator=generator, dtype=torch.float64) * 10.0 ** (3 * rank)
    return values.to(dtype)


# --- results ---------------------------------------------------------------------------------------------


def run_all(numel: int, dtype: torch.dtype) -> dict[str, Any]:
    """Run every collective on this rank's values."""
    group, collectives = world_group(), Collectives()
    mine = values_of(dist.get_rank(), numel, dtype)
    found: dict[str, Any] = {}

    found["sum"] = mine.clone()
    collectives.all_reduce(found["sum"], group, phase="test").wait()
    found["max"] = mine.clone()
    collectives.all_reduce(found["max"], group, phase="test", op="max").wait()
    for source in range(group.size):
        found[f"from {source}"] = mine.clone()
        collectives.broadcast(found[f"from {source}"], group, source=source, phase="test").wait()
    found["gathered"] = torch.empty(numel * group.size, dtype=dtype)
    collectives.all_gather(found["gathered"], mine, group, phase="test").wait()
    found["in place"] = torch.zeros(numel * group.size, dtype=dtype)
    own = found["in place"][group.index * numel : (group.index + 1) * numel]
    own.copy_(mine)
    collectives.all_gather(found["in place"], own, group, phase="test").wait()
    found["scattered"] = torch.empty(numel, dtype=dtype)
    full = values_of(dist.get_rank(), numel * group.size, dtype)
    collectives.reduce_scatter(found["scattered"], full, group, phase="test").wait()
    if dtype.itemsize == 2:
        found["wide"] = torch.empty(numel, dtype=torch.float32)
        collectives.reduce_scatter(found["wide"], full, group, phase="test").wait()
    found["exchanged"] = torch.empty_like(full)
    collectives.all_to_all(found["exchanged"], full, group, phase="test").wait()
    assert torch.equal(full, values_of(dist.get_rank(), numel * group.size, dtype))
    return found


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("numel", [1, 7, 1000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_results_are_those_of_the_definition(dtype: torch.dtype, numel: int, world_size: int) -> None:
    """Sums, maxima, gathers and exchanges of all ranks' values, in rank order where order matters."""
    results = run_ranks(run_all, world_size, numel, dtype)

    parts = [values_of(rank, numel, dtype) for rank in range(world_size)]
    fulls = [values_of(rank, numel * world_size, dtype) for rank in range(world_size)]
    for rank, found in enumerate(results):
        total = torch.stack(parts).double().sum(0)
        scale = torch.stack(parts).double().abs().sum(0)
        tolerance = 0.0 if dtype == torch.int64 else torch.finfo(dtype).eps * world_size
        assert ((found["sum"].double() - total).abs() <= tolerance * scale).all()
        assert torch.equal(found["sum"], results[0]["sum"])
        assert torch.equal(found["max"], torch.stack(parts).amax(0))
        for source in range(world_size):
            assert torch.equal(found[f"from {source}"], parts[source])
        assert torch.equal(found["gathered"], torch.cat(parts))
        assert torch.equal(found["in place"], torch.cat(parts))
        slices = [full[rank * numel : (rank + 1) * numel] for full in fulls]
        wide = torch.float32 if dtype.itemsize == 2 else dtype
        assert torch.equal(found["scattered"], add_in_order(slices, wide).to(dtype))
        if "wide" in found:
            assert torch.equal(found["wide"], add_in_order(slices, torch.float32))
        assert torch.equal(found["exchanged"], torch.cat(slices))


def add_in_order(parts: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Add tensors one after the other in a dtype."""
    total = parts[0].to(dtype)
    for part in parts[1:]:
        total = total + part.to(dtype)
    return total


def run_empty() -> list[int]:
    """Run collectives on tensors without elements."""
    group, collectives = world_group(), Collectives()
    none = torch.empty(0)
    collectives.all_reduce(none, group, phase="test").wait()
    collectives.all_gather(torch.empty(0), none, group, phase="test").wait()
    collectives.reduce_scatter(torch.empty(0), none, group, phase="test").wait()
    collectives.all_to_all(torch.empty(0), none, group, phase="test").wait()
    value = torch.ones(1)
    collectives.all_reduce(value, group, phase="test").wait()
    return [int(value)]


def pass_around() -> list[list[float]]:
    """Send tensors of several dtypes and shapes to the next rank, and receive those of the one before."""
    group, collectives = world_group(), Collectives()
    after, before = (group.index + 1) % group.size, (group.index - 1) % group.size
    mine = [
        torch.full((), float(group.index), dtype=torch.float64),
        torch.full((2, 3), group.index == 0),
        torch.full((3,), group.index, dtype=torch.bfloat16),
        torch.full((2, 1), complex(group.index, 1)),
    ]
    buffers = [torch.empty_like(tensor) for tensor in mine]
    pending = [collectives.send(tensor, group, destination=after, phase="test") for tensor in mine]
    pending += [collectives.receive(buffer, group, source=before, phase="test") for buffer in buffers]
    for work in pending:
        work.wait()
    booked = [(entry.op, entry.dtype, entry.full_bytes) for entry in collectives.ledger.records]
    assert booked[:2] == [("send", "float64", 8), ("send", "bool", 6)]
    assert booked[-1] == ("receive", "complex64", 16)
    return [buffer.reshape(-1).real.double().tolist() for buffer in buffers]


@pytest.mark.parametrize("world_size", [2, 3])
def test_messages_between_two_ranks_arrive_in_order(world_size: int) -> None:
    """Whatever their dtype and shape; both ends are booked."""
    for rank, found in enumerate(run_ranks(pass_around, world_size)):
        before = (rank - 1) % world_size

        assert found == [[before], [float(before == 0)] * 6, [before] * 3, [before] * 2]


def test_tensors_without_elements_pass() -> None:
    """Empty shards and empty buffers are no special case, and nothing after them is out of step."""
    assert run_ranks(run_empty, 3) == [[3]] * 3


def overlap() -> list[torch.Tensor]:
    """Issue several collectives before waiting for any, and wait in another order, twice."""
    group, collectives = world_group(), Collectives()
    tensors = [torch.full((5,), float(dist.get_rank() + number)) for number in range(4)]
    pending = [collectives.all_reduce(tensor, group, phase="test") for tensor in tensors]
    for work in (*reversed(pending), *pending):
        work.wait()
    return tensors


def test_pending_collectives_can_be_awaited_in_any_order_and_twice() -> None:
    """A second wait does nothing, also where something has to be done after the first."""
    for tensors in run_ranks(overlap, 2):
        for number, tensor in enumerate(tensors):
            assert torch.equal(tensor, torch.full((5,), 2.0 * number + 1))


def add_twice() -> torch.Tensor:
    """Wait twice for a bridged reduce-scatter."""
    group = world_group()
    output = torch.empty(2)
    pending = Collectives().reduce_scatter(output, torch.ones(4), group, phase="test")
    pending.wait()
    pending.wait()
    return output


def test_bridged_reduce_scatter_adds_once() -> None:
    """The local sum of the bridge belongs to the first wait."""
    for output in run_ranks(add_twice, 2):
        assert output.tolist() == [2.0, 2.0]


def run_in_part() -> tuple[float, int]:
    """Reduce over two of three ranks; the third is alone."""
    layout = MeshLayout((Axis(name="tensor", degree=3),))
    mesh = Mesh(layout, dist.get_rank(), CPU)
    group = mesh.group(GroupSpec(("tensor",), (((0,), (2,)),)))
    collectives = Collectives()
    value = torch.tensor([float(dist.get_rank() + 1)])
    collectives.all_reduce(value, group, phase="test").wait()
    source = torch.tensor([float(dist.get_rank())])
    collectives.broadcast(source, group, source=group.size - 1, phase="test").wait()
    return float(value + 100 * source), len(collectives.ledger.records)


def test_groups_may_be_a_part_of_the_world() -> None:
    """Sources count within the group, and a group of one neither communicates nor counts."""
    assert run_ranks(run_in_part, 3) == [(204.0, 2), (102.0, 0), (204.0, 2)]


# --- a group of one --------------------------------------------------------------------------------------


def test_a_group_of_one_copies_and_books_nothing() -> None:
    """Every collective is what it means for one member."""
    group = Mesh(MeshLayout((Axis(name="data", degree=1),)), 0, CPU).everyone()
    collectives = Collectives()
    mine = torch.arange(4.0)

    total, gathered, scattered, exchanged = mine.clone(), torch.empty(4), torch.empty(4), torch.empty(4)
    collectives.all_reduce(total, group, phase="test").wait()
    collectives.broadcast(total, group, source=0, phase="test").wait()
    collectives.all_gather(gathered, mine, group, phase="test").wait()
    collectives.all_gather(gathered, gathered, group, phase="test").wait()
    collectives.reduce_scatter(scattered, mine, group, phase="test").wait()
    collectives.all_to_all(exchanged, mine, group, phase="test").wait()

    for found in (total, gathered, scattered, exchanged):
        assert torch.equal(found, mine)
    assert collectives.ledger.records == []


# --- the ledger ------------------------------------------------------------------------------------------


def transfer(op: str, num_ranks: int, full_bytes: int, **changes: Any) -> Transfer:
    """Return a transfer of fp32 elements."""
    settings: dict[str, Any] = {
        "group": "data",
        "dtype": "float32",
        "item_bytes": 4,
        "phase": "test",
    } | changes
    return Transfer(op=op, num_ranks=num_ranks, full_bytes=full_bytes, **settings)


@pytest.mark.parametrize(
    ("op", "words"),
    [
        ("all_reduce", 2 * 2 / 3 * 12),
        ("all_gather", 2 / 3 * 12),
        ("reduce_scatter", 2 / 3 * 12),
        ("all_to_all", 2 / 3 * 12),
        ("broadcast", 12),
        ("receive", 12),
        ("send", 0),
    ],
)
def test_received_words_follow_bandwidth_optimal_algorithms(op: str, words: float) -> None:
    """Of 12 elements over 3 ranks."""
    assert transfer(op, 3, 48).received_words == pytest.approx(words)


def book_everything() -> list[tuple[str, int, str, int, int]]:
    """Return what the ledger says of each collective."""
    group, collectives = world_group(), Collectives()
    mine, full = torch.ones(5, dtype=torch.float64), torch.ones(15, dtype=torch.bfloat16)
    collectives.all_reduce(mine, group, phase="norm").wait()
    collectives.broadcast(mine, group, source=1, phase="setup").wait()
    collectives.all_gather(torch.empty(15, dtype=torch.float64), mine, group, phase="gather").wait()
    collectives.reduce_scatter(torch.empty(5), full, group, phase="gradients").wait()
    collectives.all_to_all(torch.empty_like(full), full, group, phase="exchange").wait()
    return [
        (entry.op, entry.num_ranks, entry.dtype, entry.full_bytes, entry.item_bytes)
        for entry in collectives.ledger.records
    ]


def test_every_collective_is_booked_with_the_full_tensor() -> None:
    """The gathered result, or the operand of everything else, in its own dtype."""
    for records in run_ranks(book_everything, 3):
        assert records == [
            ("all_reduce", 3, "float64", 40, 8),
            ("broadcast", 3, "float64", 40, 8),
            ("all_gather", 3, "float64", 120, 8),
            ("reduce_scatter", 3, "bfloat16", 30, 2),
            ("all_to_all", 3, "bfloat16", 30, 2),
        ]


def test_steps_are_closed_and_the_last_one_stays() -> None:
    """``records`` is the running step, ``last_step`` the one before, ``last`` a window over the whole run."""
    ledger = Ledger()
    ledger.add(transfer("all_reduce", 2, 4))
    ledger.end_step()
    ledger.add(transfer("broadcast", 2, 8))

    assert [entry.op for entry in ledger.last_step] == ["all_reduce"]
    assert [entry.op for entry in ledger.records] == ["broadcast"]
    assert [entry.op for entry in ledger.last] == ["all_reduce", "broadcast"]
    for _ in range(100):
        ledger.add(transfer("send", 2, 4))
    assert len(ledger.last) == 64


def test_recording_sees_its_block_and_disturbs_nothing() -> None:
    """Blocks may be nested, and the running step keeps everything."""
    ledger = Ledger()
    with ledger.recording() as outer:
        ledger.add(transfer("all_reduce", 2, 4))
        with ledger.recording() as inner:
            ledger.add(transfer("broadcast", 2, 4))
    ledger.add(transfer("send", 2, 4))

    assert [entry.op for entry in outer] == ["all_reduce", "broadcast"]
    assert [entry.op for entry in inner] == ["broadcast"]
    assert len(ledger.records) == 3


def test_checksums_tell_sequences_apart_and_not_sizes() -> None:
    """Ranks that issue other operations, or in another order, have another checksum; sizes may differ."""
    ledgers = [Ledger() for _ in range(4)]
    sequences = [
        [("all_reduce", 4), ("broadcast", 4)],
        [("all_reduce", 400), ("broadcast", 8)],
        [("broadcast", 4), ("all_reduce", 4)],
        [("all_reduce", 4)],
    ]
    for ledger, sequence in zip(ledgers, sequences, strict=True):
        for op, size in sequence:
            ledger.add(transfer(op, 2, size))
            ledger.add(transfer("send", 2, size, group="other"))

    sums = [ledger.checksums["data"] for ledger in ledgers]
    assert sums[0] == sums[1]
    assert len(set(sums)) == 3
    assert ledgers[0].counts == {"data": 2}  # messages between two ranks are their own affair
