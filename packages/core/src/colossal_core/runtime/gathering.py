"""``gather``: what every data rank has, put together in the order of the dataset.

The one idea: shares are contiguous, so rows in rank order are the rows of a batch, and whoever kept the
outputs of several batches has their rows one after the other. The loaders' book says how many rows each batch
gave this rank, and which of them is a stand-in that does not count; so values of one batch, or of all batches
of a loop, are recognised by their length and put back in order.

Values travel as bytes, padded to the longest: any dtype, and ranks may bring different numbers of rows, which
gloo's gather does not allow.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from attrs import frozen

from colossal_core.errors import ColossalError, UsageError
from colossal_core.mesh import GroupSpec
from colossal_core.plugins.agreement import explain_disagreement
from colossal_core.runtime.draws import mix_seed
from colossal_core.runtime.trees import is_list_of_values, map_leaves

if TYPE_CHECKING:
    from colossal_core.runtime.agreement import Agreement
    from colossal_core.runtime.context import Context
    from colossal_core.runtime.mesh import Group
    from colossal_core.runtime.shares import Record, ShareBook

__all__ = ["gather"]

PHASE = "metrics"

FAILED = -1
"""In place of a digest: this rank cannot go on."""

Piece = tuple[int, int, int]
"""Some rows: data rank, first row, row behind the last."""


@frozen(kw_only=True)
class _Leaf:
    """One value to gather.

    Attributes:
        path: Where it stands in the tree.
        kind: What all ranks must agree on: dtype and shape of a row.
        content: 1-D ``uint8``, on the device of the run.
        rows: Its length.
        is_scalar: Whether it is a 0-d tensor.
        decode: Makes a value from a content.
        join: Puts values together.
    """

    path: str
    kind: str
    content: torch.Tensor
    rows: int
    is_scalar: bool
    decode: Callable[[torch.Tensor], Any]
    join: Callable[[Sequence[Any]], Any]


@frozen(kw_only=True)
class _Loop:
    """What one rank was given in a loop over a loader.

    Attributes:
        num_batches: Batches.
        last_rows: Rows of the last one; 0 for a stand-in.
        held_rows: Rows of all of them, stand-ins included.
        num_stand_ins: How many of them are stand-ins.
    """

    num_batches: int
    last_rows: int
    held_rows: int
    num_stand_ins: int

    @classmethod
    def of(cls, record: Record) -> _Loop:
        """Sum up a record."""
        return cls(
            num_batches=len(record.rows),
            last_rows=record.rows[-1],
            held_rows=sum(record.held_rows),
            num_stand_ins=record.rows.count(0),
        )


@frozen(kw_only=True)
class _Holding:
    """What one data rank brings.

    Attributes:
        leaves: For each leaf, its rows and its bytes.
        loops: For each record of the book.
        counts: Whether its 0-d values count.
    """

    leaves: Sequence[tuple[int, int]]
    loops: Sequence[_Loop]
    counts: bool


def gather(tree: Any, context: Context, book: ShareBook, agreement: Agreement) -> Any:
    """Return the rows of all data ranks in the order of the dataset; see ``Booster.gather``.

    Raises:
        UsageError: A leaf is no value that can be gathered, or rows cannot be told from stand-ins.
        RankMismatchError: Ranks bring different trees, dtypes or shapes.
    """
    leaves: list[_Leaf] = []
    records = book.records
    agreement.begin_exchange()
    try:
        map_leaves(_collector(leaves, context.mesh.device), tree, is_leaf=is_list_of_values)
    except ColossalError as err:
        agreement.note_failure(err)
        _is_same(FAILED, context)
        raise
    lines = [f"{leaf.path or 'value'}: {leaf.kind}" for leaf in leaves]
    loops = [f"{len(record.rows)} ({'running' if record.is_running else 'over'})" for record in records]
    lines.append(f"batches given by boosted loaders: {', '.join(loops) or 'none'}")
    if not _is_same(mix_seed(*lines), context):
        agreement.raise_noted_failure()
        agreement.compare("the values to gather", lines, explain_disagreement)
    if not leaves:
        return tree
    layout = context.mesh.layout
    group = context.mesh.group(GroupSpec(tuple(axis.name for axis in layout.axes if axis.divides_batch)))
    share = book.current
    holding = _Holding(
        leaves=[(leaf.rows, leaf.content.numel()) for leaf in leaves],
        loops=[_Loop.of(record) for record in records],
        counts=share is None or not share.is_empty,
    )
    holdings = _exchange_holdings(holding, group, context)

    # The batch of a loop that runs; all that was given in a loop which is over; and only then the rest.
    readings = sorted(
        ((index, takes_all) for index in range(len(records)) for takes_all in (False, True)),
        key=lambda reading: reading[1] == records[reading[0]].is_running,
    )

    def history(index: int) -> list[list[int]]:
        """Return the rows of every data rank in every batch of a loop; collective."""
        return _all_gather(records[index].rows, group, context)

    orders = [_order(number, leaf, holdings, readings, history) for number, leaf in enumerate(leaves)]
    parts = _exchange_content(leaves, holdings, group, context)
    results = iter(
        [
            leaf.join([part[rank][start:stop] for rank, start, stop in order])
            for leaf, order, part in zip(leaves, orders, parts, strict=True)
        ]
    )
    return map_leaves(
        lambda _, leaf: None if leaf is None else next(results), tree, is_leaf=is_list_of_values
    )


# --- leaves -------------------------------------------------------------------------------------------------


def _collector(leaves: list[_Leaf], device: torch.device) -> Callable[[str, Any], Any]:
    """Return a visitor that collects leaves.

    Raises:
        UsageError: From the visitor: a leaf is of a kind that cannot be gathered.
    """

    def visit(path: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_quantized:
            leaves.append(_tensor_leaf(path, value, device))
        elif is_list_of_values(value):
            leaves.append(_list_leaf(path, value, device))
        elif value is not None:
            is_tensor = isinstance(value, torch.Tensor)
            what = f"a {value.layout} tensor" if is_tensor else f"a {type(value).__name__}"
            raise UsageError(
                f"gather got {what}{path and f' at {path}'}, expected dense tensors or lists of numbers "
                "and texts with one item for each sample",
                hint="pass a tensor; booster.mean(value, weight) averages a number",
            )
        return value

    return visit


def _tensor_leaf(path: str, value: torch.Tensor, device: torch.device) -> _Leaf:
    """Return a tensor as a leaf."""
    flat = value.detach().resolve_conj().resolve_neg().contiguous()
    home, dtype, shape = value.device, value.dtype, tuple(value.shape[1:])

    def decode(content: torch.Tensor) -> torch.Tensor:
        return content.clone().view(dtype).reshape(-1, *shape).to(home)

    return _Leaf(
        path=path,
        kind=f"{dtype}, {'0-d' if not value.dim() else f'rows of shape {shape}'}",
        content=flat.reshape(-1).view(torch.uint8).to(device),
        rows=value.shape[0] if value.dim() else 1,
        is_scalar=value.dim() == 0,
        decode=decode,
        join=lambda found: torch.cat(list(found)),
    )


def _list_leaf(path: str, value: list[Any], device: torch.device) -> _Leaf:
    """Return a list of plain values as a leaf; it travels as JSON."""
    content = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    return _Leaf(
        path=path,
        kind="list",
        content=content.to(device),
        rows=len(value),
        is_scalar=False,
        decode=lambda found: json.loads(bytes(found.tolist())),
        join=lambda found: list(itertools.chain(*found)),
    )


# --- order --------------------------------------------------------------------------------------------------


def _order(
    number: int,
    leaf: _Leaf,
    holdings: Sequence[_Holding],
    readings: Sequence[tuple[int, bool]],
    history: Callable[[int], Sequence[Sequence[int]]],
) -> list[Piece]:
    """Return which rows of which rank follow each other; the same decision on all ranks.

    Args:
        number: Position of the leaf.
        leaf: The leaf.
        holdings: What every data rank brings.
        readings: What the rows may be, the likeliest first: a loop, and whether all of its batches.
        history: Returns the rows of every data rank in every batch of a loop.

    Raises:
        UsageError: The rows are neither of one batch nor of all batches, and stand-ins may be among them.
    """
    rows = [holding.leaves[number][0] for holding in holdings]
    if leaf.is_scalar:
        return [(rank, 0, 1) for rank, holding in enumerate(holdings) if holding.counts]
    for index, takes_all in readings:
        loops = [holding.loops[index] for holding in holdings]
        if takes_all and rows == [loop.held_rows for loop in loops]:
            return _order_of_loop(history(index))
        if not takes_all and rows == [max(loop.last_rows, 1) for loop in loops]:
            return [(rank, 0, loop.last_rows) for rank, loop in enumerate(loops)]
    for index, _ in readings:
        loops = [holding.loops[index] for holding in holdings]
        if any(loop.num_stand_ins for loop in loops):
            where = f" at {leaf.path}" if leaf.path else ""
            raise UsageError(
                f"the values{where} have {rows} rows on the data ranks; the last batch has "
                f"{[max(loop.last_rows, 1) for loop in loops]}, all batches of the loop have "
                f"{[loop.held_rows for loop in loops]}, and samples that do not count are among them",
                hint="gather the values of each batch, or of all batches of the loop",
            )
    return [(rank, 0, count) for rank, count in enumerate(rows)]


def _order_of_loop(histories: Sequence[Sequence[int]]) -> list[Piece]:
    """Return the rows of many batches, batch by batch, without stand-ins.

    Args:
        histories: For each data rank, its rows in each batch.
    """
    found: list[Piece] = []
    starts = [0] * len(histories)
    for batch in zip(*histories, strict=True):
        for rank, rows in enumerate(batch):
            if rows:
                found.append((rank, starts[rank], starts[rank] + rows))
            starts[rank] += max(rows, 1)
    return found


# --- messages -----------------------------------------------------------------------------------------------


def _is_same(value: int, context: Context) -> bool:
    """Whether all ranks have the same number; collective."""
    pair = torch.tensor([value, -value], device=context.mesh.device)
    context.collectives.all_reduce(pair, context.mesh.everyone(), phase=PHASE, op="max").wait()
    largest, negated = pair.tolist()
    return bool(largest == -negated)


def _all_gather(values: Sequence[int], group: Group, context: Context) -> list[list[int]]:
    """Return the integers of every data rank; as many on each."""
    mine = torch.tensor(list(values), dtype=torch.int64, device=context.mesh.device)
    everyone = mine.new_empty(group.size * len(values))
    context.collectives.all_gather(everyone, mine, group, phase=PHASE).wait()
    rows: list[list[int]] = everyone.view(group.size, -1).tolist()
    return rows


def _exchange_holdings(mine: _Holding, group: Group, context: Context) -> list[_Holding]:
    """Return what every data rank brings."""
    loops = [(loop.num_batches, loop.last_rows, loop.held_rows, loop.num_stand_ins) for loop in mine.loops]
    flat = [int(mine.counts), *itertools.chain(*mine.leaves), *itertools.chain(*loops)]
    found = []
    for row in _all_gather(flat, group, context):
        numbers = iter(row)
        counts = bool(next(numbers))
        leaves = [(next(numbers), next(numbers)) for _ in mine.leaves]
        theirs = [
            _Loop(
                num_batches=next(numbers),
                last_rows=next(numbers),
                held_rows=next(numbers),
                num_stand_ins=next(numbers),
            )
            for _ in loops
        ]
        found.append(_Holding(leaves=leaves, loops=theirs, counts=counts))
    return found


def _exchange_content(
    leaves: Sequence[_Leaf], holdings: Sequence[_Holding], group: Group, context: Context
) -> list[list[Any]]:
    """Return for each leaf the value of every data rank; one message for all leaves."""
    totals = [sum(count for _, count in holding.leaves) for holding in holdings]
    mine = torch.zeros(max(totals), dtype=torch.uint8, device=context.mesh.device)
    content = torch.cat([leaf.content for leaf in leaves])
    mine[: content.numel()].copy_(content)
    everyone = mine.new_empty(group.size * mine.numel())
    if mine.numel():
        context.collectives.all_gather(everyone, mine, group, phase=PHASE).wait()
    found: list[list[Any]] = [[] for _ in leaves]
    for rank, holding in enumerate(holdings):
        position = rank * mine.numel()
        for number, leaf in enumerate(leaves):
            count = holding.leaves[number][1]
            found[number].append(leaf.decode(everyone[position : position + count]))
            position += count
    return found
