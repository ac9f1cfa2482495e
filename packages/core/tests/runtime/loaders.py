"""Datasets, samplers, and the loaders of all ranks of a run in one process."""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, get_worker_info

from colossal_core.runtime.accumulation import LossWeights
from colossal_core.runtime.agreement import Agreement
from colossal_core.runtime.arrivals import Arrivals
from colossal_core.runtime.batchnorm import RowWeights
from colossal_core.runtime.loading import BatchMeaning, BoostedLoader, prepare_loaders
from colossal_core.runtime.shares import ShareBook
from colossal_core.runtime.sources import Place

__all__ = [
    "CPU",
    "Batches",
    "Buckets",
    "DividedStream",
    "Make",
    "Numbers",
    "Rows",
    "ShuffledStream",
    "SizedStream",
    "Stream",
    "book_of",
    "boost",
    "boost_all",
    "epoch_of",
    "error_of",
    "flat",
    "join",
    "read",
]

CPU = torch.device("cpu")


class Numbers(Dataset[int]):
    """The numbers from 0."""

    def __init__(self, count: int = 23) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.count:
            raise IndexError(index)
        return index


class Stream(IterableDataset[int]):
    """The numbers from 0, whoever reads them."""

    def __init__(self, count: int = 23) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        yield from range(self.count)


class SizedStream(Stream):
    """A stream that knows its length."""

    def __len__(self) -> int:
        return self.count


class ShuffledStream(Stream):
    """A stream that shuffles with the global generator."""

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(self.count).tolist()


class DividedStream(Stream):
    """A stream that divides itself among workers, as torch documents."""

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        yield from range(first, self.count, step)


def book_of(degree: int) -> ShareBook:
    """Return a book without a Booster."""
    return ShareBook(
        degree,
        arrivals=Arrivals(),
        row_weights=RowWeights(),
        loss_weights=LossWeights(num_optimizers=1, is_active=False),
    )


def boost(loader: DataLoader[Any], degree: int, index: int, batch: BatchMeaning = "global") -> BoostedLoader:
    """Return what the data rank ``index`` of ``degree`` gets."""
    alone = Agreement(None, 0, 1)
    (prepared,) = prepare_loaders(
        [loader], batch=batch, place=Place(degree=degree, index=index), agreement=alone
    )
    return BoostedLoader(prepared, device=CPU, book=book_of(degree), agreement=alone)


Make = Callable[[], DataLoader[Any]]


def boost_all(make: Make, degree: int, batch: BatchMeaning = "global") -> list[BoostedLoader]:
    """Return the loaders of all data ranks, each made anew with the same seed, as on ranks of their own."""
    loaders = []
    for index in range(degree):
        torch.manual_seed(1024)
        loaders.append(boost(make(), degree, index, batch))
    return loaders


def read(loader: BoostedLoader, count: int | None = None) -> list[tuple[list[int], int, int]]:
    """Return an epoch, or its next batches: the samples, how many of them count, and the global rows."""
    found = []
    for batch in itertools.islice(loader, count) if count is not None else loader:
        share = loader.last_share
        assert share is not None
        found.append((batch.tolist(), share.rows, share.global_rows))
    return found


def join(shares: Sequence[Sequence[tuple[list[int], int, int]]]) -> list[list[int]]:
    """Return the global batches from the shares of all ranks, checking what the ranks say about them."""
    assert len({len(mine) for mine in shares}) == 1
    batches = []
    for step in zip(*shares, strict=True):
        batch = [sample for samples, rows, _ in step for sample in samples[:rows]]
        assert all(len(samples) == max(rows, 1) for samples, rows, _ in step)
        assert {global_rows for _, _, global_rows in step} == {len(batch)}
        batches.append(batch)
    return batches


def epoch_of(loaders: Sequence[BoostedLoader]) -> list[list[int]]:
    """Return the global batches of the next epoch."""
    return join([read(loader) for loader in loaders])


def error_of(loader: BoostedLoader) -> Exception:
    """Return what an epoch raises, and let go of its workers, which the traceback would keep for a while."""
    try:
        for _ in loader:
            pass
    except Exception as error:  # noqa: BLE001 - returned for a closer look
        traceback.clear_frames(error.__traceback__)
        return error
    raise AssertionError


def flat(batches: Sequence[Sequence[int]]) -> list[int]:
    """Return all samples in order."""
    return list(itertools.chain(*batches))


class Buckets(Sampler[list[int]]):
    """A batch sampler with batches of several sizes."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = sizes

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Iterator[list[int]]:
        remaining = iter(range(sum(self.sizes)))
        for size in self.sizes:
            yield list(itertools.islice(remaining, size))


class Rows(Dataset[torch.Tensor]):
    """Takes many indices at once, or makes a whole batch of one."""

    def __getitem__(self, key: Any) -> torch.Tensor:
        return torch.tensor(key) if isinstance(key, list) else torch.arange(key * 10, key * 10 + key + 1)

    def __len__(self) -> int:
        return 5


class Batches(IterableDataset[torch.Tensor]):
    """Yields whole batches."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for size in (4, 1, 3):
            yield torch.arange(size)
