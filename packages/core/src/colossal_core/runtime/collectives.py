"""The one thin module through which everything communicates.

It picks the function that this version of torch has, bridges what a backend lacks, skips groups of one rank,
and books each call in the ledger. Every function returns a :class:`Pending`; a blocking call is
``....wait()``.

gloo's reduce-scatter is a loop of all-reduces. An all-to-all and a local sum move the same bytes, add in
rank order (so the result does not depend on timing), and were measured 1.4 to 3 times faster.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from attrs import define

from colossal_core.errors import RankMismatchError
from colossal_core.runtime.ledger import Ledger, Transfer

if TYPE_CHECKING:
    from colossal_core.runtime.mesh import Group
    from colossal_core.runtime.standstill import Standstill

__all__ = ["Collectives", "Pending"]

STRETCH_NUMEL = 1 << 16
"""Elements of 16-bit sums widened at a time: 256 KiB of fp32 stay in the second-level cache."""

Reduction = Literal["sum", "max"]

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
_REDUCE_SCATTER = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)  # renamed in torch 2.13


@define
class Pending:
    """A collective that was issued; its tensors may not be touched before :meth:`wait` returns."""

    _work: dist.Work | None = None
    _then: Callable[[], None] | None = None
    _wait: Callable[[dist.Work], None] | None = None

    def is_done(self) -> bool:
        """Whether :meth:`wait` would not block; communicates nothing."""
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
        wait = self._book("all_gather", output, group, phase)
        work = _ALL_GATHER(output.view(-1), shard.view(-1), group=group.handle, async_op=True)
        return Pending(work, wait=wait)

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
        received = torch.empty_like(full.view(-1))
        work = dist.all_to_all_single(received, full.view(-1), group=group.handle, async_op=True)
        return Pending(work, lambda: _sum_rows(output.view(-1), received.view(group.size, -1)), wait)

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
        self, op: str, tensor: torch.Tensor, group: Group, phase: str
    ) -> Callable[[dist.Work], None] | None:
        """Enter one operation into the ledger, and return how to wait for it where somebody watches."""
        self._enter(op, tensor, group, phase)
        watch = self._standstill
        if watch is None or group.backend != "gloo":
            return None
        number = self.ledger.counts[group.name]
        what = f"{op} of {phase} ({tensor.numel() * tensor.element_size()} bytes)"
        return lambda work: watch.wait(work, group, number, what)

    def _enter(self, op: str, tensor: torch.Tensor, group: Group, phase: str) -> None:
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
            )
        )


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor as bytes, which every backend sends."""
    return tensor.detach().view(-1).view(torch.uint8)


def _copy(output: torch.Tensor, source: torch.Tensor) -> None:
    """Copy with a cast."""
    output.view(-1).copy_(source.view(-1))


def _sum_rows(output: torch.Tensor, rows: torch.Tensor) -> None:
    """Add the rows in order into ``output``; row by row: a sum over dim 0 is ten times slower on CPU.

    More than two rows of a 16-bit type are added in fp32, stretch by stretch, and rounded once.
    """
    if output.dtype == rows.dtype and len(rows) == 2:
        torch.add(rows[0], rows[1], out=output)
        return
    if output.dtype.itemsize > 2 or len(rows) == 2:
        output.copy_(rows[0])
        for row in rows[1:]:
            output.add_(row)
        return
    for start in range(0, output.numel(), STRETCH_NUMEL):
        wide = rows[0, start : start + STRETCH_NUMEL].float()
        for row in rows[1:]:
            wide.add_(row[start : start + STRETCH_NUMEL])
        output[start : start + STRETCH_NUMEL].copy_(wide)
