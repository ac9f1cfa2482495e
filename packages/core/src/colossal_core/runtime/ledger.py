"""The ledger: what was communicated, by whom, how much, in which phase.

The one idea: bytes are counted where collectives are called, as the size of the full (gathered or unreduced)
tensor, and words received per rank follow from the formulas of bandwidth-optimal algorithms. That is exact on
every backend, whatever its algorithm moves on the wire. The ledger also keeps, for each group, a running
checksum over the sequence of operations: ranks that disagree on it have diverged.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from attrs import define, field, frozen

__all__ = ["Ledger", "Transfer"]

LAST_ENTRIES = 64
"""Entries kept for a report after a hang: enough to see one step of a small model, small enough to print."""


@frozen(kw_only=True)
class Transfer:
    """One collective operation of this rank.

    Attributes:
        op: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all``, ``broadcast``, ``send`` or
            ``receive``.
        group: Name of the group.
        num_ranks: Ranks in the group.
        dtype: Name of the element type, e.g. ``"float32"``.
        item_bytes: Bytes of one element.
        full_bytes: Bytes of the full tensor: the result of a gather, the operand of every other operation.
        phase: What it was for: ``gradients``, ``norm``, ``loss``, ``setup``, …
        by_messages: Whether a collective was made of messages between two ranks, which torch books nowhere.
    """

    op: str
    group: str
    num_ranks: int
    dtype: str
    item_bytes: int
    full_bytes: int
    phase: str
    by_messages: bool = False

    @property
    def received_words(self) -> float:
        """Elements received per rank by a bandwidth-optimal algorithm."""
        words, n = self.full_bytes / self.item_bytes, self.num_ranks
        if self.op == "all_reduce":
            return 2 * (n - 1) / n * words
        if self.op in {"all_gather", "reduce_scatter", "all_to_all"}:
            return (n - 1) / n * words
        return 0.0 if self.op == "send" else words


@define
class Ledger:
    """Collects the transfers of one rank by step, and checksums of the whole run.

    Attributes:
        records: Transfers of the step that is running, in order of issue.
        last_step: Transfers of the step before.
        last: The latest transfers of the whole run, for reports.
        checksums: For each group, a checksum over ``(op, dtype, phase)`` of all collectives issued so far.
        counts: For each group, how many collectives were issued so far.
        num_by_messages: How many of all of them were made of messages between two ranks.
    """

    records: list[Transfer] = field(factory=list)
    last_step: tuple[Transfer, ...] = ()
    last: deque[Transfer] = field(factory=lambda: deque(maxlen=LAST_ENTRIES))
    checksums: dict[str, int] = field(factory=dict)
    counts: dict[str, int] = field(factory=dict)
    num_by_messages: int = 0
    _listeners: list[list[Transfer]] = field(factory=list, init=False)

    def add(self, transfer: Transfer) -> None:
        """Book one transfer."""
        self.records.append(transfer)
        for listener in self._listeners:
            listener.append(transfer)
        self.last.append(transfer)
        if transfer.op in {"send", "receive"}:
            return  # between two ranks; the others of the group do not see it
        # Sizes are left out on purpose: they may differ between ranks, the sequence of operations may not.
        text = f"{transfer.op} {transfer.dtype} {transfer.phase}".encode()
        self.checksums[transfer.group] = zlib.crc32(text, self.checksums.get(transfer.group, 0))
        self.counts[transfer.group] = self.counts.get(transfer.group, 0) + 1
        self.num_by_messages += transfer.by_messages

    def end_step(self) -> None:
        """Close the running step: its transfers become :attr:`last_step`."""
        self.last_step = tuple(self.records)
        self.records.clear()

    @contextmanager
    def recording(self) -> Iterator[list[Transfer]]:
        """Collect the transfers of a ``with`` block in the list that it yields."""
        seen: list[Transfer] = []
        self._listeners.append(seen)
        try:
            yield seen
        finally:
            self._listeners = [listener for listener in self._listeners if listener is not seen]
