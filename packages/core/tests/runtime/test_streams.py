"""Boosted loaders over streams: every rank reads all of it, and keeps its share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from colossal_core.errors import UsageError

from .loaders import (
    Batches,
    DividedStream,
    ShuffledStream,
    SizedStream,
    Stream,
    boost,
    boost_all,
    epoch_of,
    error_of,
    flat,
)


@pytest.mark.parametrize("degree", [1, 2, 3])
def test_stream_is_read_by_all_ranks_and_divided(degree: int) -> None:
    """Global batches are those of one process, by global sample index."""
    loaders = boost_all(lambda: DataLoader(Stream(), batch_size=5), degree)

    assert epoch_of(loaders) == [list(range(start, min(start + 5, 23))) for start in range(0, 23, 5)]
    with pytest.raises(TypeError):
        len(loaders[0])


def test_stream_with_a_length_has_one() -> None:
    """As in torch, in global batches."""
    loader = boost(DataLoader(SizedStream(), batch_size=5, drop_last=True), 2, 0)

    assert len(loader) == 4
    assert sum(1 for _ in loader) == 4


@pytest.mark.parametrize("workers", [0, 2])
def test_shuffling_stream_is_the_same_on_all_ranks_and_reorders(workers: int) -> None:
    """It draws from the global generators, which are put in one state on all ranks."""
    loaders = boost_all(lambda: DataLoader(ShuffledStream(), batch_size=5, num_workers=workers), 2)

    epochs = [flat(epoch_of(loaders)) for _ in range(2)]

    assert all(sorted(epoch) == list(range(23)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    plain = boost_all(lambda: DataLoader(ShuffledStream(), batch_size=5), 1)
    assert [flat(epoch_of(plain)) for _ in range(2)] == epochs


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_read_each_sample_of_a_plain_stream_once(workers: int) -> None:
    """Where plain torch would give every sample once for each worker; the order is that without workers."""
    loaders = boost_all(lambda: DataLoader(Stream(), batch_size=5, num_workers=workers), 2)

    assert epoch_of(loaders) == [list(range(start, min(start + 5, 23))) for start in range(0, 23, 5)]


def test_stream_that_divides_itself_among_workers_is_read_as_in_one_process() -> None:
    """Its batches are those of the plain loader with as many workers, each divided."""

    def make() -> DataLoader[Any]:
        return DataLoader(DividedStream(), batch_size=5, num_workers=2)

    loaders = boost_all(make, 2)

    assert epoch_of(loaders) == [batch.tolist() for batch in make()]


def configure(worker_id: int) -> None:
    """Divide a stream from outside, as torch documents."""
    worker = get_worker_info()
    assert worker is not None
    dataset: Any = worker.dataset
    assert type(dataset) is Ranged
    dataset.first, dataset.step = worker_id, worker.num_workers


class Ranged(Stream):
    """A stream that is divided from outside."""

    first, step = 0, 1

    def __iter__(self) -> Iterator[int]:
        yield from range(self.first, self.count, self.step)


def test_worker_init_fn_may_divide_a_stream() -> None:
    """It finds its own dataset in get_worker_info(), and what it does to it counts."""

    def make() -> DataLoader[Any]:
        return DataLoader(Ranged(), batch_size=5, num_workers=2, worker_init_fn=configure)

    assert epoch_of(boost_all(make, 2)) == [batch.tolist() for batch in make()]


def test_stream_of_batches_has_their_rows_divided() -> None:
    """With batch_size=None an item is a global batch."""
    loaders = boost_all(lambda: DataLoader(Batches(), batch_size=None), 2)

    assert epoch_of(loaders) == [[0, 1, 2, 3], [0], [0, 1, 2]]


def test_last_batch_of_a_stream_is_known_when_it_is_given() -> None:
    """So an accumulation window can close with it."""
    loader = boost(DataLoader(Stream(), batch_size=10), 1, 0)

    marks = [loader.last_share.is_last_of_epoch for _ in loader if loader.last_share]

    assert marks == [False, False, True]


def ask_late() -> Iterator[int]:
    """Yield a sample, then look at the worker."""
    yield 0
    worker = get_worker_info()
    yield 1 if worker is None else worker.id


class Late(IterableDataset[int]):
    """Divides itself too late."""

    def __iter__(self) -> Iterator[int]:
        return ask_late()


def test_stream_that_asks_for_its_worker_too_late_is_refused() -> None:
    """Nobody can tell any more who divides it."""
    loader = boost(DataLoader(Late(), batch_size=1, num_workers=1), 1, 0)

    error = error_of(loader)

    assert isinstance(error, UsageError)
    assert "asked for its worker's id after it had yielded its first sample" in str(error)
