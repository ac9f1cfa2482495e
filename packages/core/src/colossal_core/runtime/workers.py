"""What runs where samples are read: in worker processes, or in this one.

The one idea: the loader that torch runs underneath reads *requests*: its dataset is one of the readers here,
which turn a request into the collated share of this rank. So the user's dataset and collate function are
called as torch would call them, and what they draw at random depends on the place of the batch in the epoch
only.

# Note [Streams]
Every rank reads the whole stream of an IterableDataset, and keeps its share of every global batch. With
workers, a dataset that does not look at ``get_worker_info()`` yields everything in each of them, and worker
``k`` of ``W`` keeps the batches ``k``, ``k + W``, …: each sample is used once, in the order of one process,
though each worker reads all. A dataset that asks for its worker's ``id`` or ``num_workers`` before it yields
its first sample (or is configured by ``worker_init_fn``) divides the stream itself, as torch documents; then
every batch counts, as it would in one process. What a dataset may not do is to divide the stream by rank: all
ranks have to read the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, final, runtime_checkable

import torch
from attrs import evolve, frozen
from torch.utils.data import Dataset, IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from colossal_core.errors import UsageError
from colossal_core.runtime.draws import PrivateDraws, attributes_of, mix_seed, seed_process
from colossal_core.runtime.sampling import HEAD, Portion, digest_of, set_epoch, share_range
from colossal_core.runtime.trees import cut_rows

__all__ = ["Answer", "Cursor", "MapReader", "Request", "StreamReader", "WorkerStart", "unchanged"]


@frozen(kw_only=True)
class Request:
    """What a rank reads for one step.

    Attributes:
        portion: Whose ``indices`` are read. Its rows are not known, and 0, when the dataset makes whole
            batches.
        seed: Of what dataset and collate function draw.
        is_last: Whether none follows in this epoch.
    """

    portion: Portion
    seed: int
    is_last: bool


@frozen(kw_only=True)
class Answer:
    """What was read, without the data.

    Attributes:
        rows: Samples of this rank that count.
        global_rows: Samples of the global batch.
        units: Elements of the order that it used up.
        is_last: Whether none follows in this epoch; None when that is not known.
        divides_itself: Whether the dataset divides its stream among workers.
        digest: Of the first samples of the stream, on the first answer.
    """

    rows: int
    global_rows: int
    units: int
    is_last: bool | None = None
    divides_itself: bool = False
    digest: str | None = None


@runtime_checkable
class _FetchesMany(Protocol):
    """A dataset that reads several samples at once."""

    def __getitems__(self, indices: Sequence[Any]) -> Any:
        """Return the samples."""


def unchanged(value: Any) -> Any:
    """Return the argument: the readers have collated already."""
    return value


@final
class MapReader(Dataset[Any]):
    """Reads requests from a dataset with keys."""

    def __init__(
        self, dataset: Any, collate: Callable[[Any], Any], *, reads: str, degree: int, index: int
    ) -> None:
        """Remember what to read.

        Args:
            dataset: The user's.
            collate: The user's collate function.
            reads: ``"samples"``: indices are read one by one and collated; ``"lists"``: the dataset takes a
                list of indices; ``"batches"``: it makes a whole batch of one index, which is then divided.
            degree: Data ranks.
            index: This data rank.
        """
        self.dataset = dataset
        self._collate = collate
        self._reads = reads
        self._degree = degree
        self._index = index

    def __getitem__(self, request: Request) -> tuple[Answer, Any]:
        """Read and collate."""
        if get_worker_info() is not None:
            seed_process(request.seed)  # nobody else draws in a worker
            return self._read(request)
        with PrivateDraws(request.seed):
            return self._read(request)

    def _read(self, request: Request) -> tuple[Answer, Any]:
        """Read and collate, with the generators as they are."""
        portion = request.portion
        rows, global_rows = portion.rows, portion.global_rows
        indices = list(portion.indices)
        if self._reads == "batches":
            data, rows, global_rows = _divide_rows(
                self._collate(self.dataset[indices[0]]), self._degree, self._index
            )
        elif self._reads == "lists":
            data = self._collate(self.dataset[indices])
        elif isinstance(self.dataset, _FetchesMany):
            data = self._collate(self.dataset.__getitems__(indices))
        else:
            data = self._collate([self.dataset[index] for index in indices])
        answer = Answer(rows=rows, global_rows=global_rows, units=portion.units, is_last=request.is_last)
        return answer, data


@frozen(kw_only=True)
class Cursor:
    """Where in a stream to start.

    Attributes:
        seed: Seed of the loader.
        epoch: Which epoch.
        samples: Samples to leave out, where the order of samples is that of one process.
        batches: Global batches to leave out, otherwise.
        num_compared: Samples whose digest is wanted; 0 for those of the first batch.
    """

    seed: int
    epoch: int
    samples: int
    batches: int
    num_compared: int

    def write(self, memory: torch.Tensor) -> None:
        """Leave it where workers that live on find it."""
        memory.copy_(torch.tensor([self.seed, self.epoch, self.samples, self.batches, self.num_compared]))

    @classmethod
    def read(cls, memory: torch.Tensor) -> Cursor:
        """Return what :meth:`write` left; ``memory`` holds five 64-bit integers."""
        seed, epoch, samples, batches, num_compared = (int(value) for value in memory.tolist())
        return cls(seed=seed, epoch=epoch, samples=samples, batches=batches, num_compared=num_compared)


@final
class StreamReader(IterableDataset[Any]):
    """Reads a stream and keeps the shares of one rank; see Note [Streams]."""

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[Any], Any],
        *,
        batch_rows: int | None,
        drop_last: bool,
        degree: int,
        index: int,
    ) -> None:
        """Remember what to read.

        Args:
            dataset: The user's.
            collate: The user's collate function.
            batch_rows: Samples in a global batch; None when the dataset yields whole batches, which are
                divided.
            drop_last: Whether to leave out a last batch that is smaller.
            degree: Data ranks.
            index: This data rank.
        """
        self.dataset = dataset
        self.memory = torch.zeros(5, dtype=torch.int64)
        self._collate = collate
        self._batch_rows = batch_rows
        self._drop_last = drop_last
        self._degree = degree
        self._index = index

    def __iter__(self) -> Iterator[tuple[Answer, Any]]:
        """Yield the shares from the cursor on, collated; None in place of a share that is to be left out."""
        cursor = Cursor.read(self.memory)
        worker = current_worker()
        stream = _Stream(self.dataset, cursor, worker)
        digest: str | None = stream.digest(cursor.num_compared or self._batch_rows or 1)
        if not stream.divides_itself:
            stream.skip(cursor.batches if self._batch_rows is None else cursor.samples)
        for number in itertools.count():
            block = stream.take(self._batch_rows or 1)
            if not block or (self._drop_last and len(block) < (self._batch_rows or 1)):
                return
            if stream.divides_itself and worker is not None:
                place = f"{worker.number}.{number}"
                is_wanted, is_gone = True, number < cursor.batches // worker.count
            else:
                place = str(cursor.batches + number if self._batch_rows is None else stream.num_taken)
                is_wanted, is_gone = worker is None or number % worker.count == worker.number, False
            if not is_wanted:
                continue
            answer, data = Answer(rows=0, global_rows=0, units=1), None
            if not is_gone:
                seed = mix_seed(cursor.seed, "batch", cursor.epoch, self._index, place)
                answer, data = self._share(block, seed)
            yield evolve(answer, divides_itself=stream.divides_itself, digest=digest), data
            digest = None

    def _share(self, block: list[Any], seed: int) -> tuple[Answer, Any]:
        """Collate this rank's share of a global batch."""
        with PrivateDraws(seed):
            if self._batch_rows is None:
                data, rows, global_rows = _divide_rows(self._collate(block[0]), self._degree, self._index)
                return Answer(rows=rows, global_rows=global_rows, units=1), data
            mine = share_range(len(block), self._degree, self._index)
            chosen = block[mine.start : mine.stop] or block[:1]
            return Answer(rows=len(mine), global_rows=len(block), units=len(block)), self._collate(chosen)


def _divide_rows(data: Any, degree: int, index: int) -> tuple[Any, int, int]:
    """Return this rank's rows of a collated batch, how many of them count, and those of the whole batch."""

    def pick(rows: int) -> slice:
        mine = share_range(rows, degree, index)
        return slice(mine.start, mine.stop) if mine else slice(0, 1)

    cut, rows = cut_rows(data, pick)
    if rows == 0:
        raise UsageError("the dataset made a batch of 0 rows", hint="leave out empty batches")
    return cut, len(share_range(rows, degree, index)), rows


@final
class _Stream:
    """One pass through the user's stream, with random numbers of its own.

    Attributes:
        divides_itself: Whether the dataset divides the stream among workers.
        num_taken: Samples taken so far.
    """

    def __init__(self, dataset: Any, cursor: Cursor, worker: WorkerView | None) -> None:
        """Start reading, and see what the dataset does until its first sample."""
        set_epoch(dataset, cursor.epoch)
        # Equal on all ranks and in all workers: until the first sample, nobody knows who divides the stream.
        self._draws = PrivateDraws(mix_seed(cursor.seed, "stream", cursor.epoch))
        with self._draws:
            self._samples = iter(dataset)
        self._worker = worker
        self._ahead: list[Any] = []
        self.divides_itself = False
        self.num_taken = 0
        self._look(1)
        if worker is not None and worker.was_asked:
            self.divides_itself = True
            self._draws = PrivateDraws(mix_seed(cursor.seed, "stream", cursor.epoch, worker.number))

    def digest(self, count: int) -> str:
        """Return the digest of the first ``count`` samples, which are read but not taken."""
        self._look(count)
        return digest_of(self._ahead[:count])

    def skip(self, count: int) -> None:
        """Take samples and drop them."""
        for start in range(0, count, HEAD):
            self.take(min(HEAD, count - start))

    def take(self, count: int) -> list[Any]:
        """Return the next samples; fewer at the end.

        Raises:
            UsageError: The dataset asked for its worker too late.
        """
        self._look(count)
        taken, self._ahead = self._ahead[:count], self._ahead[count:]
        self.num_taken += len(taken)
        if self._worker is not None and self._worker.was_asked and not self.divides_itself:
            raise UsageError(
                "the IterableDataset asked for its worker's id after it had yielded its first sample",
                hint="call get_worker_info() at the start of __iter__, or use num_workers=0",
            )
        return taken

    def _look(self, count: int) -> None:
        """Read ahead."""
        with self._draws:
            self._ahead.extend(itertools.islice(self._samples, max(count - len(self._ahead), 0)))


@final
class WorkerView:
    """What ``get_worker_info()`` returns in our workers: torch's answer, with the user's dataset.

    Attributes:
        number: Worker, for us.
        count: Workers, for us.
        dataset: The user's dataset in this worker.
        was_asked: Whether the user's code has asked for ``id`` or ``num_workers``, to divide a stream by.
        was_asked_for_dataset: Whether it has asked for ``dataset``.
    """

    def __init__(self, info: Any, dataset: Any) -> None:
        """Look at torch's answer."""
        self.number: int = info.id
        self.count: int = info.num_workers
        self.was_asked = False
        self.was_asked_for_dataset = False
        self._info = info
        self._dataset = dataset

    @property
    def id(self) -> int:
        """Worker, for the user."""
        self.was_asked = True
        return self.number

    @property
    def num_workers(self) -> int:
        """Workers, for the user."""
        self.was_asked = True
        return self.count

    @property
    def dataset(self) -> Any:
        """The user's dataset."""
        self.was_asked_for_dataset = True
        return self._dataset

    def __getattr__(self, name: str) -> Any:
        """Return everything else from torch's answer."""
        return getattr(self._info, name)


@final
class WorkerStart:
    """The ``worker_init_fn`` of our workers: shows the user's code its own dataset, then runs the user's."""

    def __init__(self, user: Callable[[int], None] | None) -> None:
        """Remember the user's function."""
        self._user = user

    def __call__(self, worker_id: int) -> None:
        """Prepare this worker process."""
        info: Any = get_worker_info()
        dataset = info.dataset.dataset
        view: Any = WorkerView(info, dataset)
        # torch offers no way to say what get_worker_info() returns; this process is ours alone.
        torch_worker._worker_info = view  # noqa: SLF001
        if self._user is None:
            return
        before = attributes_of(dataset)
        self._user(worker_id)
        after = attributes_of(dataset)
        changed = len(before) != len(after) or any(
            one is not two for one, two in zip(before, after, strict=True)
        )
        # Many functions look at the id to seed something. Only one that reaches for the dataset divides it.
        view.was_asked = changed or (view.was_asked and view.was_asked_for_dataset)


def current_worker() -> WorkerView | None:
    """Return the view of the worker that this process is, or None in the process of the loop."""
    info: object = get_worker_info()
    return info if isinstance(info, WorkerView) else None
