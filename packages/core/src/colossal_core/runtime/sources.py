"""Where a boosted loader's batches come from: a plain DataLoader over this rank's shares.

The one idea: the plain loader has the user's options, so workers, pinning and time limits are torch's; what
it is asked for, request by request, or how far a stream is skipped, is decided here.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, final

import torch
from attrs import evolve, frozen
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler

from colossal_core.errors import UsageError
from colossal_core.runtime.draws import mix_seed
from colossal_core.runtime.positions import OrderKind, Position
from colossal_core.runtime.sampling import (
    EpochOrder,
    Portion,
    cut_batches,
    digest_of,
    divide,
    divide_groups,
    divide_lists,
    mark_last,
)
from colossal_core.runtime.workers import (
    Answer,
    Cursor,
    MapReader,
    Request,
    StreamReader,
    WorkerStart,
    unchanged,
)

__all__ = ["AbstractSource", "MapSource", "Opening", "Place", "StreamSource"]

Answers = Iterator[tuple[Answer, Any]]


@frozen(kw_only=True)
class Place:
    """Which share of each global batch is read.

    Attributes:
        degree: Data ranks.
        index: This data rank.
    """

    degree: int
    index: int


@frozen(kw_only=True)
class Opening:
    """An epoch that has begun.

    Attributes:
        answers: What is read, in order; ``is_last`` is known.
        head: Number of elements at the beginning of the epoch and their digest; None when ranks agree anyway.
        workers: As in :class:`Position`.
    """

    answers: Answers
    head: tuple[int, str] | None = None
    workers: int = 0


class AbstractSource(ABC):
    """Reads the shares of one rank, epoch by epoch."""

    order: OrderKind
    batch_rows: int | None
    """Samples in a global batch; None where batches are made elsewhere."""

    @property
    @abstractmethod
    def settings(self) -> str:
        """What ranks must agree on, as text."""

    @abstractmethod
    def num_elements(self) -> int:
        """Return the elements of an epoch.

        Raises:
            TypeError: That is not known, in torch's words.
        """

    @abstractmethod
    def num_batches(self) -> int:
        """Return the global batches of an epoch.

        Raises:
            TypeError: That is not known, in torch's words.
        """

    @abstractmethod
    def open(self, start: Position) -> Opening:
        """Begin to read; what was opened before is over.

        Raises:
            UsageError: The position does not fit.
        """

    def _num_cut(self, count: int, *, drop_last: bool) -> int:
        """Return into how many global batches a number of samples is cut."""
        rows = self.batch_rows or 1
        return count // rows if drop_last else math.ceil(count / rows)


@final
class MapSource(AbstractSource):
    """Reads a dataset with keys, in the order of the user's sampler."""

    def __init__(self, user: DataLoader[Any], place: Place, *, is_per_rank: bool) -> None:
        """Take over the user's loader.

        Args:
            user: The loader.
            place: Which share to read.
            is_per_rank: Whether its batches are those of one rank.
        """
        keys: Iterable[Any] | None = user.batch_sampler
        reads = "samples"
        if keys is None:
            keys = user.sampler
            reads = "lists" if isinstance(keys, BatchSampler) else "batches"
        self.order = "batches" if reads == "batches" else "lists"
        self.batch_rows = None
        self._drop_last = False
        if isinstance(keys, BatchSampler) and type(keys).__iter__ is BatchSampler.__iter__:
            self.order = "samples"
            self.batch_rows = keys.batch_size * (place.degree if is_per_rank else 1)
            self._drop_last = keys.drop_last
            keys = keys.sampler
        self._is_grouped = self.order == "lists" and is_per_rank
        self._keys = EpochOrder(keys, is_lists=self.order == "lists")
        self._place = place
        self._requests = _Requests()
        self._generator = torch.Generator()
        reader = MapReader(user.dataset, user.collate_fn, reads=reads, degree=place.degree, index=place.index)
        self._inner = _plain_loader(user, reader, self._generator, self._requests)

    @property
    def settings(self) -> str:
        """What ranks must agree on, as text."""
        try:
            size = str(self.num_elements())
        except TypeError:
            size = "unknown number of"
        return f"{size} {self.order} of {self._keys.settings}, global batches of {self.batch_rows}"

    def num_elements(self) -> int:
        """Return the elements of an epoch."""
        return len(self._keys)

    def num_batches(self) -> int:
        """Return the global batches of an epoch."""
        count = len(self._keys)
        if self._is_grouped:
            return math.ceil(count / self._place.degree)
        return self._num_cut(count, drop_last=self._drop_last)

    def draw(self, seed: int, epoch: int) -> Iterable[Any]:
        """Return the elements of an epoch, for all ranks."""
        return self._keys.draw(seed, epoch)

    def open(self, start: Position) -> Opening:
        """Begin to read."""
        elements = iter(self._keys.draw(start.seed, start.epoch))
        head = None
        if self._keys.is_foreign:
            first = list(itertools.islice(elements, start.head[0] if start.head else self._keys.head))
            head = (len(first), digest_of(first))
            elements = itertools.chain(first, elements)
        gone = start.samples if self.order == "samples" else start.batches
        portions = self._divide(itertools.islice(elements, gone, None))
        self._requests.following = _ask(portions, start, self._place.index, gone)
        self._generator.manual_seed(mix_seed(start.seed, "workers", start.epoch, self._place.index))
        return Opening(answers=iter(self._inner), head=head)

    def _divide(self, elements: Iterator[Any]) -> Iterator[Portion]:
        """Yield this rank's portions of the global batches."""
        degree, index = self._place.degree, self._place.index
        if self.batch_rows is not None:
            return divide(cut_batches(elements, self.batch_rows, drop_last=self._drop_last), degree, index)
        if self.order == "batches":
            return (Portion(indices=[key], rows=0, global_rows=0, units=1) for key in elements)
        return (divide_groups if self._is_grouped else divide_lists)(elements, degree, index)


def _ask(portions: Iterator[Portion], start: Position, index: int, gone: int) -> Iterator[Request]:
    """Yield the requests for what is left of an epoch.

    No method of the source: a generator that is left early would keep it, and its workers, in a cycle.

    Args:
        portions: What to read.
        start: Where the epoch begins.
        index: Data rank.
        gone: Elements given before.
    """
    for portion, is_last in mark_last(portions):
        seed = mix_seed(start.seed, "batch", start.epoch, index, gone)
        gone += portion.units
        yield Request(portion=portion, seed=seed, is_last=is_last)


@final
class StreamSource(AbstractSource):
    """Reads an IterableDataset; see Note [Streams]."""

    def __init__(self, user: DataLoader[Any], place: Place, *, is_per_rank: bool) -> None:
        """Take over the user's loader; see :class:`MapSource`."""
        self.order = "stream of batches" if user.batch_size is None else "stream"
        self.batch_rows = None
        if user.batch_size is not None:
            self.batch_rows = user.batch_size * (place.degree if is_per_rank else 1)
        self._drop_last = user.drop_last
        self._dataset: Any = user.dataset
        self._num_workers = user.num_workers
        self._place = place
        self._generator = torch.Generator()
        self._reader = StreamReader(
            user.dataset,
            user.collate_fn,
            batch_rows=self.batch_rows,
            drop_last=user.drop_last,
            degree=place.degree,
            index=place.index,
        )
        if user.persistent_workers:
            self._reader.memory.share_memory_()
        self._inner = _plain_loader(user, self._reader, self._generator, None)

    @property
    def settings(self) -> str:
        """What ranks must agree on, as text; the number of workers may decide the order of the stream."""
        kind = type(self._dataset).__name__
        return f"{self.order} of {kind}, global batches of {self.batch_rows}, {self._num_workers} workers"

    def num_elements(self) -> int:
        """Return the elements of an epoch."""
        return len(self._dataset)

    def num_batches(self) -> int:
        """Return the global batches of an epoch."""
        return self._num_cut(len(self._dataset), drop_last=self._drop_last)

    def open(self, start: Position) -> Opening:
        """Begin to read."""
        if start.workers and (start.workers, start.batch_rows) != (self._num_workers, self.batch_rows or 0):
            raise UsageError(
                f"the position is of a stream that its dataset divides among {start.workers} workers in "
                f"global batches of {start.batch_rows}; this loader has {self._num_workers} workers and "
                f"batches of {self.batch_rows or 0}, which gives another order",
                hint="use the same num_workers and the same global batch, or start the epoch anew",
            )
        num_compared = start.head[0] if start.head else self.batch_rows or 1
        cursor = Cursor(
            seed=start.seed,
            epoch=start.epoch,
            samples=start.samples,
            batches=start.batches,
            num_compared=num_compared,
        )
        cursor.write(self._reader.memory)
        # Equal on all ranks: a dataset may seed its stream with what its worker was seeded with.
        self._generator.manual_seed(mix_seed(start.seed, "workers", start.epoch))
        answers: Answers = iter(self._inner)
        first = list(itertools.islice(answers, 1))
        answers = itertools.chain(first, answers)
        head, workers = (num_compared, "end of stream"), 0
        if first:
            head = (num_compared, first[0][0].digest or "")
        if first and first[0][0].divides_itself:
            workers = self._num_workers
            answers = itertools.islice(answers, start.batches, None)
        if workers != start.workers and (start.samples or start.batches):
            raise UsageError(
                f"the position is of a stream read by {start.workers} dividing workers, now it is {workers}",
                hint="use the same num_workers as when the position was stored, or start the epoch anew",
            )
        marked = ((evolve(answer, is_last=last), data) for (answer, data), last in mark_last(answers))
        return Opening(answers=marked, head=head, workers=workers)


@final
class _Requests(Sampler[Request]):
    """The sampler of the plain loader: whatever was prepared for this epoch."""

    def __init__(self) -> None:
        self.following: Iterator[Request] = iter(())

    def __iter__(self) -> Iterator[Request]:
        return self.following


def _plain_loader(
    user: DataLoader[Any], reader: Dataset[Any], generator: torch.Generator, requests: _Requests | None
) -> DataLoader[Any]:
    """Return a loader with the user's options that reads through one of our readers."""
    return DataLoader(
        reader,
        batch_size=None,
        sampler=requests,
        num_workers=user.num_workers,
        collate_fn=unchanged,
        pin_memory=user.pin_memory,
        timeout=user.timeout,
        worker_init_fn=WorkerStart(user.worker_init_fn),
        multiprocessing_context=user.multiprocessing_context,
        generator=generator,
        prefetch_factor=user.prefetch_factor,
        persistent_workers=user.persistent_workers,
        pin_memory_device=user.pin_memory_device,
    )
