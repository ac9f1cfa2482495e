"""The one thin module through which everything communicates.

It picks the function that this version of torch has, bridges what a backend lacks, skips groups of one rank,
and books each call in the ledger. Every function returns a :class:`Pending`; a blocking call is
``....wait()``.

gloo's reduce-scatter is a loop of all-reduces. An all-to-all and a local sum move the same bytes, add in
rank order (so the result does not depend on timing), and were measured 1.4 to 3 times faster.

Its all-gather goes around a ring in a buffer of its own, and copies that into the output. A message from each
rank to each other one moves the same bytes straight into their places: 8 gathers of 3.5 MB took 5.2 ms of
processor time instead of 12.3 on each of two ranks, and 16.5 ms instead of 31.9 on four ranks of two cores
(virtual machine, November 2026).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from attrs import define

from colossal_core.errors import RankMismatchError
from colossal_core.runtime.ledger import Ledger, Transfer
from colossal_core.runtime.standstill import Messages

if TYPE_CHECKING:
    from colossal_core.runtime.mesh import Group
    from colossal_core.runtime.standstill import Standstill

__all__ = ["Collectives", "Pending"]

STRETCH_NUMEL = 1 << 16
"""Elements of sums of many rows added at a time: 256 KiB of fp32 stay in the second-level cache."""

_GATHER_TAG = 1 << 30
"""From here on messages of gathers are numbered, by their bytes; gloo takes tags below 2 ** 31."""

Reduction = Literal["sum", "max"]

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
_REDUCE_SCATTER = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)  # renamed in torch 2.13


@define
class Pending:
    """A collective that was issued; its tensors may not be touched before :meth:`wait` returns."""

    _work: dist.Work | Messages | None = None
    _then: Callable[[], None] | None = None
    _wait: Callable[[Any], None] | None = None

    def is_done(self) -> bool:
        """Whether it is known that :meth:`wait` would not block; of gathers it may not be, over gloo."""
        return self._work is None or self._work.is_completed()

    def wait(self) -> None:
        """Block until the result is there; a second call does nothing."""
        work, self._work = self._work, None
        then, self._then = self._then, None
        if work is not None and self._wait is not None:
            self._wait(work)
        elif work is not None:
            work.wait()
        if then is not None:
            then()


class Collectives:
    """Collective operations on groups of a mesh, booked in a ledger."""

    def __init__(self, ledger: Ledger | None = None, *, standstill: Standstill | None = None) -> None:
        """Use the given ledger, or a new one.

        Args:
            ledger: Where operations are booked.
            standstill: Watches waits that block the host; None where nobody watches.
        """
        self.ledger = Ledger() if ledger is None else ledger
        self._standstill = standstill

    def all_reduce(self, tensor: torch.Tensor, group: Group, *, phase: str, op: Reduction = "sum") -> Pending:
        """Replace ``tensor`` by its sum (or maximum) over the group; the same bits on all members.

        Args:
            tensor: Contiguous, of the same shape and dtype on all members; changed in place.
            group: The members.
            phase: What it is for, for the ledger.
            op: ``"sum"`` or ``"max"``.
        """
        if group.size == 1:
            return Pending()
        wait = self._book("all_reduce", tensor, group, phase)
        return Pending(dist.all_reduce(tensor, _OPS[op], group=group.handle, async_op=True), wait=wait)

    def broadcast(self, tensor: torch.Tensor, group: Group, *, source: int, phase: str) -> Pending:
        """Replace ``tensor`` by that of the member at position ``source`` of the group."""
        if group.size == 1:
            return Pending()
        wait = self._book("broadcast", tensor, group, phase)
        work = dist.broadcast(tensor, group.ranks[source], group=group.handle, async_op=True)
        return Pending(work, wait=wait)

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor, group: Group, *, phase: str) -> Pending:
        """Fill ``output`` with the shards of all members, in group order.

        Args:
            output: Contiguous, ``group.size`` times as many elements as ``shard``.
            shard: This rank's piece; may be its own slice of ``output``.
            group: The members.
            phase: What it is for, for the ledger.
        """
        if group.size == 1:
            if output.is_meta or not output.view(-1).is_set_to(shard.view(-1)):
                output.view(-1).copy_(shard.view(-1))
            return Pending()
        if group.backend == "gloo" and output.device.type == "cpu":
            return self._gather_by_messages(output, shard, group, phase)
        wait = self._book("all_gather", output, group, phase)
        work = _ALL_GATHER(output.view(-1), shard.view(-1), group=group.handle, async_op=True)
        return Pending(work, wait=wait)

    def _gather_by_messages(
        self, output: torch.Tensor, shard: torch.Tensor, group: Group, phase: str
    ) -> Pending:
        """Send this rank's piece to each member, and receive each of theirs where it belongs."""
        wait = self._book("all_gather", output, group, phase, by_messages=True)
        mine = _as_bytes(shard)
        rows = _as_bytes(output).view(group.size, mine.numel())
        # Pieces of other sizes are never paired: gloo ends the process when they do not fit.
        tag = _GATHER_TAG + mine.numel() % _GATHER_TAG
        others = [(group.index + step) % group.size for step in range(1, group.size)]
        works = [dist.irecv(rows[other], group=group.handle, group_src=other, tag=tag) for other in others]
        works += [dist.isend(mine, group=group.handle, group_dst=other, tag=tag) for other in others]
        if rows[group.index].data_ptr() != mine.data_ptr():
            rows[group.index].copy_(mine)
        return Pending(Messages([work for work in works if work is not None]), wait=wait)

    def reduce_scatter(
        self, output: torch.Tensor, full: torch.Tensor, group: Group, *, phase: str
    ) -> Pending:
        """Sum ``full`` over the group and leave this rank's slice of the sum in ``output``.

        Args:
            output: Contiguous; receives slice ``group.index`` of the sum. It may have a wider dtype than
                ``full``: then, on backends that are bridged, the sum is accumulated in that dtype.
            full: Contiguous, ``group.size`` times as many elements as ``output``.
            group: The members.
            phase: What it is for, for the ledger.
        """
        if group.size == 1:
            output.view(-1).copy_(full.view(-1))
            return Pending()
        wait = self._book("reduce_scatter", full, group, phase)
        if group.backend != "gloo":
            target = output if output.dtype == full.dtype else torch.empty_like(output, dtype=full.dtype)
            work = _REDUCE_SCATTER(target.view(-1), full.view(-1), group=group.handle, async_op=True)
            return Pending(work, None if target is output else lambda: _copy(output, target), wait)
        pieces = list(full.view(group.size, -1))
        counts = [pieces[0].numel()] * group.size
        sent, own = full.view(-1), pieces[group.index]
        if group.index in {0, group.size - 1}:  # what lies behind or before its own slice lies together
            counts[group.index] = 0
            sent = sent[own.numel() :] if group.index == 0 else sent[: -own.numel() or None]
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received, sent, counts, counts, group=group.handle, async_op=True)
        rows = list(received.split(counts))
        rows[group.index] = own
        return Pending(work, lambda: _sum_rows(output.view(-1), rows), wait)

    def all_to_all(self, output: torch.Tensor, full: torch.Tensor, group: Group, *, phase: str) -> Pending:
        """Send slice ``i`` of ``full`` to member ``i`` and receive theirs into ``output``, equal slices."""
        if group.size == 1:
            output.view(-1).copy_(full.view(-1))
            return Pending()
        wait = self._book("all_to_all", full, group, phase)
        work = dist.all_to_all_single(output.view(-1), full.view(-1), group=group.handle, async_op=True)
        return Pending(work, wait=wait)

    def send(self, tensor: torch.Tensor, group: Group, *, destination: int, phase: str) -> Pending:
        """Send a tensor to the member at position ``destination``, which receives in the same order.

        Args:
            tensor: Contiguous, of any dtype; may not change before the message is done.
            group: The members.
            destination: Position of the receiver in the group, another one than this rank's.
            phase: What it is for, for the ledger.
        """
        self._enter("send", tensor, group, phase)
        raw = _as_bytes(tensor)
        return Pending(dist.isend(raw, group.ranks[destination], group=group.handle))

    def receive(self, tensor: torch.Tensor, group: Group, *, source: int, phase: str) -> Pending:
        """Fill a tensor with what the member at position ``source`` sends, in the order in which it sends.

        Args:
            tensor: Contiguous, of the same shape and dtype as what is sent.
            group: The members.
            source: Position of the sender in the group, another one than this rank's.
            phase: What it is for, for the ledger.
        """
        self._enter("receive", tensor, group, phase)
        raw = _as_bytes(tensor)
        return Pending(dist.irecv(raw, group.ranks[source], group=group.handle))

    def fail(self, reason: str) -> RankMismatchError:
        """Return the error to raise where ranks turn out to do different things; others raise, too."""
        if self._standstill is not None:
            return self._standstill.fail(reason)
        return RankMismatchError(f"ranks do different things: {reason}", hint="look at what each does")

    def _book(
        self, op: str, tensor: torch.Tensor, group: Group, phase: str, *, by_messages: bool = False
    ) -> Callable[[Any], None] | None:
        """Enter one operation into the ledger, and return how to wait for it where somebody watches."""
        self._enter(op, tensor, group, phase, by_messages=by_messages)
        watch = self._standstill
        if watch is None or group.backend != "gloo":
            return None
        watch.check()
        number = self.ledger.counts[group.name]
        what = f"{op} of {phase} ({tensor.numel() * tensor.element_size()} bytes)"
        wait = watch.wait_for_messages if by_messages else watch.wait
        return lambda work: wait(work, group, number, what)

    def _enter(
        self, op: str, tensor: torch.Tensor, group: Group, phase: str, *, by_messages: bool = False
    ) -> None:
        """Enter one operation into the ledger."""
        self.ledger.add(
            Transfer(
                op=op,
                group=group.name,
                num_ranks=group.size,
                dtype=str(tensor.dtype).removeprefix("torch."),
                item_bytes=tensor.element_size(),
                full_bytes=tensor.numel() * tensor.element_size(),
                phase=phase,
                by_messages=by_messages,
            )
        )


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor as bytes, which every backend sends."""
    return tensor.detach().view(-1).view(torch.uint8)


def _copy(output: torch.Tensor, source: torch.Tensor) -> None:
    """Copy with a cast."""
    output.view(-1).copy_(source.view(-1))


def _sum_rows(output: torch.Tensor, rows: Sequence[torch.Tensor]) -> None:
    """Add rows in order into ``output``, which may be one of them.

    A sum over dim 0 is ten times slower on CPU. More than two rows are added stretch by stretch, those of a
    16-bit type in fp32, and rounded once.
    """
    if len(rows) == 2 and output.dtype == rows[0].dtype:
        torch.add(rows[0], rows[1], out=output)
        return
    wide = torch.float32 if output.dtype.itemsize == 2 else output.dtype
    for start in range(0, output.numel(), STRETCH_NUMEL):
        total = rows[0][start : start + STRETCH_NUMEL].to(wide, copy=True)
        for row in rows[1:]:
            total.add_(row[start : start + STRETCH_NUMEL])
        output[start : start + STRETCH_NUMEL].copy_(total)
