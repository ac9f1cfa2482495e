"""Which samples make a global batch, and which of them are whose: arithmetic on indices, without processes.

The one idea: the order of an epoch is one sequence, the same on every rank, since it is drawn from the user's
sampler with random numbers that depend on nothing but a seed and the epoch. Global batches are cut from it,
and each is divided into contiguous shares that differ by at most one sample, so that shares put together in
rank order are the batch again. A position is then one number, how many samples of the epoch are gone, and
means the same for any number of ranks.
"""

from __future__ import annotations

import hashlib
import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar, final, runtime_checkable

import torch
from attrs import frozen
from torch.utils.data import DistributedSampler, RandomSampler, Sampler, SequentialSampler

from colossal_core.errors import UsageError
from colossal_core.runtime.draws import PrivateDraws, attributes_of, mix_seed, own_generators

__all__ = [
    "EpochOrder",
    "Portion",
    "cut_batches",
    "digest_of",
    "divide",
    "divide_groups",
    "divide_lists",
    "mark_last",
    "set_epoch",
    "share_range",
]

T = TypeVar("T")

HEAD = 1024
"""Elements of an order that are compared between ranks: enough to tell any two orders apart."""

HEAD_OF_LISTS = 32
"""The same where the elements are whole batches, which may be slow to make."""


@runtime_checkable
class _CountsEpochs(Protocol):
    """A sampler or dataset that is told which epoch comes."""

    def set_epoch(self, epoch: int) -> None:
        """Prepare for an epoch."""


@frozen(kw_only=True)
class Portion:
    """What one rank reads of one global batch.

    Attributes:
        indices: Keys of its samples, at least one: an empty share reads one sample that does not count.
        rows: How many of them count.
        global_rows: Samples of the whole batch.
        units: Elements of the order that the batch used up.
    """

    indices: Sequence[Any]
    rows: int
    global_rows: int
    units: int


def share_range(count: int, degree: int, index: int) -> range:
    """Return the positions that a data rank holds of ``count`` samples: contiguous, larger shares first.

    Args:
        count: Samples in the global batch.
        degree: Data ranks, at least 1.
        index: Data rank, in ``[0, degree)``.
    """
    base, extra = divmod(count, degree)
    start = index * base + min(index, extra)
    return range(start, start + base + (index < extra))


def cut_batches(order: Iterable[T], size: int, *, drop_last: bool) -> Iterator[list[T]]:
    """Cut an order into batches.

    Args:
        order: The samples; read lazily.
        size: Samples in a batch, at least 1.
        drop_last: Whether to leave out a last batch that is smaller.
    """
    remaining = iter(order)
    while batch := list(itertools.islice(remaining, size)):
        if len(batch) == size or not drop_last:
            yield batch


def divide(batches: Iterable[Sequence[T]], degree: int, index: int) -> Iterator[Portion]:
    """Yield what one data rank reads of each global batch.

    Args:
        batches: Global batches, none of them empty.
        degree: Data ranks.
        index: Data rank.

    Raises:
        UsageError: A batch is empty.
    """
    for number, batch in enumerate(batches):
        _check_batch(batch, number)
        mine = share_range(len(batch), degree, index)
        yield Portion(
            indices=batch[mine.start : mine.stop] if mine else batch[:1],
            rows=len(mine),
            global_rows=len(batch),
            units=len(batch),
        )


def divide_lists(batches: Iterable[Sequence[T]], degree: int, index: int) -> Iterator[Portion]:
    """Yield what one data rank reads of each batch of a batch sampler: :func:`divide`, one unit a batch."""
    for portion in divide(batches, degree, index):
        yield Portion(indices=portion.indices, rows=portion.rows, global_rows=portion.global_rows, units=1)


def divide_groups(batches: Iterable[Sequence[T]], degree: int, index: int) -> Iterator[Portion]:
    """Yield what one data rank reads when ``degree`` batches in a row, one for each rank, are a global batch.

    Where the last group lacks batches, ranks without one read one sample that does not count.

    Raises:
        UsageError: A batch is empty.
    """
    remaining = iter(enumerate(batches))
    while group := list(itertools.islice(remaining, degree)):
        for number, batch in group:
            _check_batch(batch, number)
        mine = group[index][1] if index < len(group) else []
        yield Portion(
            indices=mine or group[0][1][:1],
            rows=len(mine),
            global_rows=sum(len(batch) for _, batch in group),
            units=len(group),
        )


def mark_last(items: Iterable[T]) -> Iterator[tuple[T, bool]]:
    """Yield each item with whether it is the last one, which takes looking one ahead."""
    remaining = iter(items)
    ahead = list(itertools.islice(remaining, 1))
    while ahead:
        item, ahead = ahead[0], list(itertools.islice(remaining, 1))
        yield item, not ahead


def digest_of(items: Iterable[Any]) -> str:
    """Return a short hash of some values, which tells apart numbers, text, tensors, arrays and trees of them.

    Of anything else only the type counts, so equal values always have equal hashes.
    """
    found = hashlib.sha256()
    for item in items:
        found.update(_bytes_of(item))
        found.update(b";")
    return found.hexdigest()[:16]


def set_epoch(target: object, epoch: int) -> None:
    """Tell a sampler or dataset which epoch comes, if it wants to know."""
    if isinstance(target, _CountsEpochs):
        target.set_epoch(epoch)


def _bytes_of(item: Any) -> bytes:
    """Return bytes that are equal for equal values."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(item, numpy.ndarray | numpy.generic):
        return bytes(item.tobytes())
    if isinstance(item, torch.Tensor):
        item = item.detach().cpu().tolist()
    elif isinstance(item, Mapping):
        item = digest_of([*item.keys(), *item.values()])
    elif isinstance(item, Sequence) and not isinstance(item, str | bytes):
        item = digest_of(item)
    is_plain = item is None or isinstance(item, str | bytes | int | float | complex | list)
    return (repr(item) if is_plain else type(item).__name__).encode()


def _check_batch(batch: Sequence[Any], number: int) -> None:
    """Refuse an empty batch.

    Raises:
        UsageError: It is one.
    """
    if not len(batch):
        raise UsageError(
            f"batch {number} of the batch sampler is empty", hint="yield at least one index in every batch"
        )


@final
class EpochOrder:
    """The orders of one epoch after another, drawn from the user's sampler alike on all ranks.

    torch's RandomSampler and SequentialSampler are drawn as torch does, from a seed; a DistributedSampler
    gives the order that it would divide, before padding. Any other sampler, or batch sampler, is run as it
    is, with the global generators, and those among its attributes, set privately: in the first epoch its own
    generators start from where the user left them, later from the seed. A sampler with ``set_epoch`` is told
    the epoch.

    Attributes:
        is_foreign: Whether the sampler is none of torch's that are replaced, so that its order is only known
            to be equal on all ranks once the first ``head`` elements were compared.
        head: How many elements to compare.
    """

    def __init__(self, sampler: Iterable[Any], *, is_lists: bool) -> None:
        """Look at a sampler; nothing is drawn.

        Args:
            sampler: Yields keys of samples, or lists of them.
            is_lists: Whether it yields lists, each a batch.
        """
        self.is_foreign = _kind_of(sampler) == "foreign"
        self.head = HEAD_OF_LISTS if is_lists else HEAD
        self._sampler = sampler
        self._samplers = list(_nested_samplers(sampler))
        self._generators = own_generators(*self._samplers)
        self._states = [generator.get() for generator in self._generators]

    def __len__(self) -> int:
        """Return the number of elements of an epoch.

        Raises:
            TypeError: The sampler has no length, as in torch.
        """
        return _length_of(_distributed_dataset(self._sampler) or self._sampler)

    @property
    def settings(self) -> str:
        """What ranks must agree on besides the length, as text."""
        name = type(self._sampler).__name__
        if isinstance(self._sampler, DistributedSampler) and not self.is_foreign:
            return f"{name}(shuffle={self._sampler.shuffle}, seed={self._sampler.seed})"
        return name

    def draw(self, seed: int, epoch: int) -> Iterable[Any]:
        """Return the order of an epoch; that of a foreign sampler is drawn block by block while it is read.

        Args:
            seed: Seed of the loader.
            epoch: From 0.
        """
        if self.is_foreign:
            return self._draw_foreign(seed, epoch)
        sampler = self._sampler
        if isinstance(sampler, RandomSampler):
            with PrivateDraws(mix_seed(seed, "order", epoch), self._generators):
                return _Compact(torch.tensor(list(sampler)))
        if isinstance(sampler, DistributedSampler) and sampler.shuffle:
            generator = torch.Generator().manual_seed(sampler.seed + epoch)
            return _Compact(torch.randperm(len(self), generator=generator))
        return range(len(self))

    def _draw_foreign(self, seed: int, epoch: int) -> Iterator[Any]:
        """Yield what the user's sampler yields, which may never end."""
        for sampler in self._samplers:
            set_epoch(sampler, epoch)
        states = self._states if epoch == 0 else None
        draws = PrivateDraws(mix_seed(seed, "order", epoch), self._generators, states)
        with draws:
            remaining = iter(self._sampler)
        while True:
            with draws:
                block = list(itertools.islice(remaining, self.head))
            if not block:
                return
            yield from block


@final
class _Compact(Sequence[int]):
    """Integers in 8 bytes each, where a list takes 40."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, key: Any) -> Any:
        found = self._values[key]
        return found.tolist() if isinstance(key, slice) else int(found)

    def __iter__(self) -> Iterator[int]:
        for block in self._values.split(HEAD):
            yield from block.tolist()


def _kind_of(sampler: object) -> str:
    """Return which of the replaced samplers it is; a subclass that iterates otherwise is foreign."""
    for kind, name in (
        (SequentialSampler, "sequential"),
        (RandomSampler, "random"),
        (DistributedSampler, "distributed"),
    ):
        if isinstance(sampler, kind) and type(sampler).__iter__ is kind.__iter__:
            return name
    return "foreign"


def _nested_samplers(sampler: object) -> Iterator[object]:
    """Yield a sampler and those among its attributes, at any depth."""
    yield sampler
    for value in attributes_of(sampler):
        if isinstance(value, Sampler):
            yield from _nested_samplers(value)


def _distributed_dataset(sampler: object) -> object:
    """Return what a DistributedSampler draws from, or None for any other."""
    return (
        sampler.dataset
        if _kind_of(sampler) == "distributed" and isinstance(sampler, DistributedSampler)
        else None
    )


def _length_of(thing: Any) -> int:
    """Return the length.

    Raises:
        TypeError: It has none, in Python's words.
    """
    return len(thing)
