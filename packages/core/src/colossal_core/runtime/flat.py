"""Flat buffers: parameters and gradients of one kind as views of one piece of memory.

The one idea: what is reduced, gathered, updated or moved together lies together, so each of these is one
call without copies. ZeRO shards these buffers, and Gemini's chunks are these buffers with a place to live.

# Note [Layout of a gradient buffer]
The gradient buffer of ``n`` slots is ``[gradients of slot 0 | slot 1 | ... | n flags | m notes]``. A flag is
1 where this rank touched the parameter; after a sum over the ranks it is positive where any rank did. Notes
belong to the last buffer of a lane and carry which of the lane's buffers are stale (see
:mod:`colossal_core.runtime.lanes`). Flags and notes travel inside the same message as the gradients, so
agreeing costs no message of its own.

# Note [Shards of a buffer]
A buffer that is divided among ``k`` ranks is padded to ``k`` equal spans, so a reduce-scatter or a gather
needs no sizes; it has no flags and notes, which every span would need. The last element belongs to no
parameter, so that who gathers it can tell whose buffer it is. Spans cut through parameters wherever
they end, unless the parameters have to stay whole: then each span is dealt whole ones, largest first, to the
span that holds least.

# Note [Order in a buffer]
Members lie in the given order, but those that fill whole vectors come first, then those that fill halves,
and so on. So each begins at a multiple of what its own size is a multiple of, without any padding: matrix
products of accelerators are fast from 16 bytes on, and a view of pairs as complex numbers begins at a pair.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from attrs import define, frozen
from torch import nn

from colossal_core.errors import UsageError
from colossal_core.mesh import GroupSpec
from colossal_core.runtime.materialise import take_meta
from colossal_core.runtime.table import Entry

__all__ = ["ALIGNMENT_BYTES", "BufferKind", "FlatBuffer", "Memory", "Slot", "deal_whole", "fill_buffers"]

ALIGNMENT_BYTES = 64
"""To a multiple of this the spans of a divided buffer are padded: the widest vectors of processors.

Fused optimizers of torch update what is left at the end of a tensor one by one, which rounds the second
moment of AdamW differently (a fifth of such elements after five steps, torch 2.13 with AVX-512). So
parameters that each fill whole vectors have the same bits wherever borders between shards lie. Links of
accelerators are slower below 16 bytes.
"""


@frozen(kw_only=True)
class BufferKind:
    """What all parameters of one buffer have in common.

    Attributes:
        dtype: Element type of values and gradients.
        reduce: Ranks over which gradients are summed.
        divisor: What that sum is divided by.
        unit: Module unit, ``""`` for the root unit or when units do not matter.
    """

    dtype: torch.dtype
    reduce: GroupSpec
    divisor: int
    unit: str = ""


@define(eq=False)
class Slot:
    """The place of one parameter in a flat buffer.

    Attributes:
        entry: Its entry in the table.
        parameter: The Parameter object inside the model.
        start: First element in the buffer.
        stop: One past its last element.
        index: Position among the slots of the buffer, which is the position of its flag.
    """

    entry: Entry
    parameter: nn.Parameter
    start: int
    stop: int
    index: int

    @property
    def name(self) -> str:
        """Name for messages."""
        return self.entry.title

    def within(self, start: int, stop: int) -> tuple[int, int]:
        """Return which part of the slot lies in a range of the buffer; an empty range when none does."""
        first = min(max(self.start, start), stop)
        return first, max(first, min(self.stop, stop))


class Memory(Protocol):
    """Memory that comes and goes while the tensor over it, and views of that, stay valid objects."""

    @property
    def tensor(self) -> torch.Tensor:
        """The memory, 1-D; may be read while it is there."""

    def acquire(self) -> None:
        """Have memory, with undefined content; nothing happens while there is some."""

    def release(self) -> None:
        """Give the memory back; nothing happens while there is none."""


class FlatBuffer:
    """Values and gradients of some parameters, each contiguous in one piece of memory.

    Owns ``values`` (``padded_numel`` elements) and ``gradients`` (as many, and flags and notes in a buffer
    that is not divided) for as long as the model is boosted. The parameters of the model are views of
    ``values``.

    Attributes:
        kind: What the members have in common.
        slots: The members, in the order in which they lie.
        numel: Elements up to the end of the last member.
        num_shards: Among how many ranks the buffer is divided; see Note [Shards of a buffer].
        span_numel: Elements of each shard.
        num_notes: Elements reserved behind the flags.
        is_divided: Whether shards are kept apart from the buffer.
        has_gradients: Whether there is memory for gradients.
        value_memory: Where values are; None for memory of torch. Set before :meth:`take_values`.
        gradient_memory: The same for gradients, before :meth:`allocate_gradients`.
    """

    def __init__(
        self,
        members: Iterable[tuple[Entry, nn.Parameter]],
        kind: BufferKind,
        *,
        num_notes: int = 0,
        num_shards: int = 1,
        is_divided: bool | None = None,
        keeps_whole: bool = False,
        device: torch.device | None = None,
    ) -> None:
        """Lay out the members; allocates nothing before :meth:`take_values` and :meth:`allocate_gradients`.

        Args:
            members: Entries with their local Parameters; see Note [Order in a buffer].
            kind: What the members have in common.
            num_notes: Elements reserved behind the flags.
            num_shards: Among how many ranks the buffer is divided.
            is_divided: Whether its shards are kept apart from it; by default when there are several.
            keeps_whole: Whether no member may be cut by a border between shards.
            device: Where it is; by default where its first member is.
        """
        self.kind = kind
        self.is_divided = num_shards > 1 if is_divided is None else is_divided
        pairs = sorted(members, key=lambda member: -_fold(member[1].numel() * kind.dtype.itemsize))
        sizes = [parameter.numel() for _, parameter in pairs]
        if num_shards > 1 and keeps_whole:
            starts, self.span_numel = deal_whole(sizes, num_shards, item_bytes=kind.dtype.itemsize)
        else:
            starts = [0, *itertools.accumulate(sizes)][:-1]
            self.span_numel = sum(sizes)
            if num_shards > 1:
                self.span_numel = _align(-(-(sum(sizes) + 1) // num_shards), kind.dtype.itemsize)
        self.slots: list[Slot] = [
            Slot(entry, parameter, start, start + size, index)
            for index, ((entry, parameter), start, size) in enumerate(zip(pairs, starts, sizes, strict=True))
        ]
        self.numel = max(slot.stop for slot in self.slots)
        self.num_shards = num_shards
        self.num_notes = num_notes
        self.device = self.slots[0].parameter.device if device is None else device
        self.values = torch.empty(0, dtype=kind.dtype, device=self.device)
        self.gradients = torch.empty(0, dtype=kind.dtype, device=self.device)
        self.value_memory: Memory | None = None
        self.gradient_memory: Memory | None = None
        self._own_gradients = self.gradients
        self._gradient_views: list[torch.Tensor] = []
        self.has_gradients = False
        self._versions: list[int] = []

    def take_values(self, *, master: torch.Tensor | None = None, start: int = 0) -> None:
        """Move the parameters into the buffer; afterwards each Parameter object is a view of it.

        The old memory of each parameter is released before the next one is copied.

        Args:
            master: 1-D, of a wider type: also receives a range of the values, before they are narrowed.
            start: First element of that range.
        """
        if self.value_memory is not None:
            self.value_memory.acquire()
            self.values = self.value_memory.tensor
        else:
            self.values = torch.empty(self.padded_numel, dtype=self.kind.dtype, device=self.device)
        if self.num_shards > 1:
            self.values.zero_()  # padding is sent to other ranks, too
        for slot in self.slots:
            if slot.parameter.is_meta:  # has no values yet
                take_meta(slot.parameter, self.value_view(slot))
                continue
            flat = slot.parameter.detach().reshape(-1)
            if master is not None:
                first, last = slot.within(start, start + master.numel())
                master[first - start : last - start].copy_(flat[first - slot.start : last - slot.start])
            self.values[slot.start : slot.stop].copy_(flat)
            slot.parameter.data = self.value_view(slot)
        self.note_versions()

    def note_versions(self) -> None:
        """Remember how often each parameter was written, for :meth:`take_edits`."""
        self._versions = [slot.parameter._version for slot in self.slots]

    def take_edits(self, master: torch.Tensor | None, start: int = 0, *, suspects_all: bool = False) -> bool:
        """Bring the buffer and the masters in line with what the user did to parameters meanwhile.

        That is what ``load_state_dict``, initialisers and code under ``torch.no_grad`` have written since
        :meth:`note_versions`, and tensors assigned to ``.data``, by ``vector_to_parameters`` for example,
        which are copied into the buffer. torch does not count writes in place through ``.data``: where there
        are masters, those are lost with the next update.

        Args:
            master: Flat masters of a range of the buffer, or None.
            start: First element of that range.
            suspects_all: Whether to compare values that torch did not count as written, too.

        Returns:
            Whether anything may have changed.

        Raises:
            UsageError: A parameter was converted or moved.
        """
        found = suspects_all
        if not (found or self.has_edits()):
            return False
        origin, item_bytes = self.values.data_ptr(), self.kind.dtype.itemsize
        for slot, version in zip(self.slots, self._versions, strict=True):
            is_elsewhere = (
                slot.parameter.numel() > 0 and slot.parameter.data_ptr() != origin + slot.start * item_bytes
            )
            if is_elsewhere:
                self._take_back(slot)
            is_written = is_elsewhere or slot.parameter._version != version
            found = found or is_written
            if master is not None and (is_written or suspects_all):
                first, last = slot.within(start, start + master.numel())
                wide, values = master[first - start : last - start], self.values[first:last]
                # Elsewhere the master keeps the bits that the narrow value does not have.
                here = wide.to(values.device)
                differs = here.to(values.dtype) != values
                if bool(differs.any()):  # otherwise its version would say that it was written
                    wide.copy_(torch.where(differs, values.to(here.dtype), here))
        self.note_versions()
        return found

    def has_edits(self) -> bool:
        """Whether :meth:`take_edits` would find something; values have to be there."""
        origin, item_bytes = self.values.data_ptr(), self.kind.dtype.itemsize
        if [slot.parameter._version for slot in self.slots] != self._versions:
            return True
        return any(
            slot.parameter.data_ptr() != origin + slot.start * item_bytes
            for slot in self.slots
            if slot.start < slot.stop
        )

    def _take_back(self, slot: Slot) -> None:
        """Copy a parameter whose memory the user has replaced into the buffer, and make it a view again.

        Raises:
            UsageError: It does not fit.
        """
        found = slot.parameter.detach()
        fits = found.dtype == self.kind.dtype and found.device == self.device
        if not fits or found.numel() != slot.stop - slot.start:
            raise UsageError(
                f"parameter {slot.name!r} was made a {str(found.dtype).removeprefix('torch.')} tensor of "
                f"shape {tuple(found.shape)} on {found.device} after boost, where it is "
                f"{str(self.kind.dtype).removeprefix('torch.')} on {self.device}",
                hint="convert, move and resize models before boost, or release() them first",
            )
        view = self.value_view(slot)
        view.copy_(found)
        slot.parameter.data = view

    def give_back(self, slot: Slot) -> None:
        """Give one parameter memory of its own again."""
        slot.parameter.data = slot.parameter.detach().clone()

    def allocate_gradients(self) -> None:
        """Allocate the gradient buffer; flags and notes start at 0, gradients are undefined until touched."""
        if self.gradient_memory is not None:
            self.gradient_memory.acquire()
            self.gradients = self.gradient_memory.tensor
        else:
            self.gradients = torch.empty(self.message_numel, dtype=self.kind.dtype, device=self.device)
        self._own_gradients = self.gradients
        self.has_gradients = True
        # On accelerators none can be taken while the memory is not there.
        self._gradient_views = [self._view_gradient(slot) for slot in self.slots]
        self.tail.zero_()

    def release_values(self) -> None:
        """Give the memory of the values back; views of them stay valid objects that may not be read."""
        if self.value_memory is not None:
            self.value_memory.release()
        else:
            self.values.untyped_storage().resize_(0)

    def restore_values(self) -> None:
        """Have memory for the values again, with undefined content."""
        storage = self.values.untyped_storage()
        if self.value_memory is not None:
            self.value_memory.acquire()
        elif storage.nbytes() == 0:
            storage.resize_(self.padded_numel * self.kind.dtype.itemsize)

    def release_gradients(self) -> None:
        """Give the memory of the gradients back; views of them stay valid objects that may not be read."""
        if not self.has_gradients:
            return
        self.has_gradients = False
        if self.gradient_memory is not None:
            self.gradient_memory.release()
        else:
            self._own_gradients.untyped_storage().resize_(0)

    def restore_gradients(self) -> None:
        """Have memory for the gradients again, with undefined content."""
        if self.has_gradients:
            return
        self.has_gradients = True
        if self.gradient_memory is not None:
            self.gradient_memory.acquire()
        else:
            self._own_gradients.untyped_storage().resize_(self.message_numel * self.kind.dtype.itemsize)

    @property
    def early_divisor(self) -> int:
        """What gradients are divided by when they arrive: all of it where that costs no digits."""
        return self.kind.divisor if self.kind.dtype.itemsize > 2 else 1

    @property
    def late_divisor(self) -> int:
        """What sums are divided by in the update, which computes in fp32: all of it for 16-bit gradients."""
        return self.kind.divisor // self.early_divisor

    @property
    def padded_numel(self) -> int:
        """Elements of all shards."""
        return self.span_numel * self.num_shards

    @property
    def message_numel(self) -> int:
        """Elements of the gradient buffer with its flags and notes."""
        return self.padded_numel if self.is_divided else self.numel + len(self.slots) + self.num_notes

    @property
    def tail(self) -> torch.Tensor:
        """Flags and notes, as a view; of a buffer that is not divided."""
        return self.gradients[self.padded_numel :]

    def value_view(self, slot: Slot) -> torch.Tensor:
        """Return the values of a slot in the parameter's shape."""
        return self.values[slot.start : slot.stop].view(slot.parameter.shape)

    def gradient_view(self, slot: Slot) -> torch.Tensor:
        """Return the gradient of a slot in the parameter's shape."""
        if self.gradients is self._own_gradients and self._gradient_views:
            return self._gradient_views[slot.index].detach()
        return self._view_gradient(slot)

    def _view_gradient(self, slot: Slot) -> torch.Tensor:
        """Take a view of the gradients, which are there."""
        return self.gradients[slot.start : slot.stop].view(slot.parameter.shape)


def deal_whole(sizes: Sequence[int], num_shards: int, *, item_bytes: int) -> tuple[list[int], int]:
    """Deal tensors whole to equal shards, largest first, each to the shard that holds least.

    Args:
        sizes: Elements of each tensor.
        num_shards: Number of shards.
        item_bytes: Bytes of one element.

    Returns:
        The first element of each tensor in the buffer, and the elements of one shard.
    """
    held = [0] * num_shards
    shards = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        shards[index] = held.index(min(held))
        held[shards[index]] += sizes[index]
    span = _align(max(held) + 1, item_bytes)
    ends = [shard * span for shard in range(num_shards)]
    starts = []
    for shard, size in zip(shards, sizes, strict=True):
        starts.append(ends[shard])
        ends[shard] += size
    return starts, span


def _fold(num_bytes: int) -> int:
    """Return the largest power of two, up to the alignment, that a size is a multiple of."""
    return math.gcd(num_bytes, ALIGNMENT_BYTES)


def _align(numel: int, item_bytes: int) -> int:
    """Round up to the alignment."""
    alignment = max(ALIGNMENT_BYTES // item_bytes, 1)
    return -(-numel // alignment) * alignment


def fill_buffers(
    sizes: Sequence[int], *, item_bytes: int, buffer_bytes: int, last_bytes: int
) -> tuple[tuple[int, ...], ...]:
    """Deal tensors into consecutive buffers, in the given order.

    A buffer is closed once it holds at least ``buffer_bytes``; a tensor is never split, so one larger than
    that gets a buffer that it ends. The last buffer is kept small where the sizes allow it, because its
    reduction cannot hide behind backward.

    Args:
        sizes: Elements of each tensor.
        item_bytes: Bytes of one element.
        buffer_bytes: Size at which a buffer is closed.
        last_bytes: Wanted upper bound for the last buffer.

    Returns:
        Indices into ``sizes``, one tuple per buffer.
    """
    tail: list[int] = []
    room = last_bytes // item_bytes
    for index in reversed(range(len(sizes))):
        if tail and sizes[index] > room:
            break
        tail.insert(0, index)
        room -= sizes[index]
    buffers: list[tuple[int, ...]] = []
    current: list[int] = []
    held = 0
    for index in range(len(sizes) - len(tail)):
        current.append(index)
        held += sizes[index] * item_bytes
        if held >= buffer_bytes:
            buffers.append(tuple(current))
            current, held = [], 0
    if current:
        buffers.append(tuple(current))
    if tail:
        buffers.append(tuple(tail))
    return tuple(buffers)
