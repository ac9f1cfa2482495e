"""Boosted loaders over datasets with keys, read for every rank of a run in this one process."""

from __future__ import annotations

import pickle
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from colossal_core.errors import UsageError

from .loaders import (
    Buckets,
    DividedStream,
    Numbers,
    Rows,
    Stream,
    boost,
    boost_all,
    epoch_of,
    flat,
    join,
    read,
)


@pytest.mark.parametrize("degree", [1, 2, 3, 4])
@pytest.mark.parametrize("batch_size", [1, 2, 6, 7, 40])
def test_global_batches_are_those_of_one_process(degree: int, batch_size: int) -> None:
    """Shares put together are what the plain loader gives, for any degree and batch size."""

    def make() -> DataLoader[Any]:
        return DataLoader(Numbers(), batch_size=batch_size)

    loaders = boost_all(make, degree)

    assert epoch_of(loaders) == [batch.tolist() for batch in make()]
    assert {len(loader) for loader in loaders} == {len(make())}
    assert {loader.batch_size for loader in loaders} == {batch_size}
    assert all(isinstance(loader, DataLoader) for loader in loaders)


def test_drop_last_drops_the_incomplete_global_batch_only() -> None:
    """23 samples in batches of 5 are four batches."""
    loaders = boost_all(lambda: DataLoader(Numbers(), batch_size=5, drop_last=True), 3)

    assert flat(epoch_of(loaders)) == list(range(20))
    assert len(loaders[0]) == 4


def test_batch_per_rank_counts_for_each_rank() -> None:
    """With the other habit the global batch is as many times larger as there are ranks."""
    loaders = boost_all(lambda: DataLoader(Numbers(), batch_size=3), 4, "per-rank")

    batches = epoch_of(loaders)

    assert [len(batch) for batch in batches] == [12, 11]
    assert {len(loader) for loader in loaders} == {2}


def test_shuffled_epochs_differ_and_are_the_same_on_all_ranks() -> None:
    """No set_epoch is needed; every epoch covers the dataset in an order of its own."""
    loaders = boost_all(lambda: DataLoader(Numbers(), batch_size=4, shuffle=True), 3)

    epochs = [flat(epoch_of(loaders)) for _ in range(3)]

    assert all(sorted(epoch) == list(range(23)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert [
        flat(epoch_of(boost_all(lambda: DataLoader(Numbers(), batch_size=4, shuffle=True), 3)))
    ] == epochs[:1]


def test_order_does_not_depend_on_the_number_of_ranks() -> None:
    """One rank and four train on the same batches."""
    epochs = [
        epoch_of(boost_all(lambda: DataLoader(Numbers(), batch_size=4, shuffle=True), degree))
        for degree in (1, 2, 4)
    ]

    assert epochs[0] == epochs[1] == epochs[2]


def test_order_follows_the_generator_of_the_loader() -> None:
    """A loader seeded by its own generator does not depend on the global seed."""

    def epoch(own: int, seed: int) -> list[int]:
        torch.manual_seed(seed)
        generator = torch.Generator().manual_seed(own)
        return flat(epoch_of([boost(DataLoader(Numbers(), shuffle=True, generator=generator), 1, 0)]))

    assert epoch(1, 2) == epoch(1, 3) != epoch(2, 2)


def test_set_epoch_repeats_an_epoch() -> None:
    """Of the loader and of its sampler, as scripts with a DistributedSampler call it."""
    loader = boost(DataLoader(Numbers(), batch_size=4, shuffle=True), 1, 0)
    first, second = read(loader), read(loader)

    loader.set_epoch(0)
    assert loader.epoch == 0
    assert read(loader) == first
    sampler: Any = loader.sampler
    sampler.set_epoch(1)
    assert read(loader) == second
    with pytest.raises(UsageError, match="epoch is -1"):
        loader.set_epoch(-1)


def test_distributed_sampler_is_replaced() -> None:
    """The whole dataset is divided by us, in the order that the sampler would have padded and divided."""
    sampler: DistributedSampler[int] = DistributedSampler(Numbers(), 4, 2, seed=9)

    loaders = boost_all(lambda: DataLoader(Numbers(), batch_size=4, sampler=sampler), 2)

    assert sorted(flat(epoch_of(loaders))) == list(range(23))


def test_other_samplers_are_drawn_alike_and_divided() -> None:
    """A WeightedRandomSampler gives what it gives in one process, each draw to one rank."""

    def make() -> DataLoader[Any]:
        sampler = WeightedRandomSampler([1.0] * 23, 30, generator=torch.Generator().manual_seed(4))
        return DataLoader(Numbers(), batch_size=4, sampler=sampler)

    loaders = boost_all(make, 3)

    plain = make().sampler
    assert flat(epoch_of(loaders)) == list(plain)
    second = flat(epoch_of(loaders))
    assert second != list(plain)
    assert len(second) == 30
    assert len(loaders[0]) == 8


def test_custom_batch_sampler_has_each_batch_divided() -> None:
    """Its batches are the global ones."""
    loaders = boost_all(lambda: DataLoader(Numbers(), batch_sampler=Buckets(5, 1, 8)), 3)

    assert epoch_of(loaders) == list(Buckets(5, 1, 8))
    assert {len(loader) for loader in loaders} == {3}
    assert list(loaders[0].batch_sampler or ()) == list(Buckets(5, 1, 8))


def test_custom_batch_sampler_per_rank_keeps_its_batches_whole() -> None:
    """With the other habit every list is a rank's batch, and the last group may lack some."""
    loaders = boost_all(lambda: DataLoader(Numbers(), batch_sampler=Buckets(5, 1, 8)), 2, "per-rank")

    shares = [read(loader) for loader in loaders]

    assert [[rows for _, rows, _ in mine] for mine in shares] == [[5, 8], [1, 0]]
    assert flat(join(shares)) == list(range(14))
    assert {len(loader) for loader in loaders} == {2}


def test_torch_batch_sampler_given_by_hand_is_like_a_batch_size() -> None:
    """So that a per-rank habit and a position mean the same for both spellings."""

    def make() -> DataLoader[Any]:
        return DataLoader(
            Numbers(), batch_sampler=BatchSampler(SequentialSampler(Numbers()), 4, drop_last=True)
        )

    loaders = boost_all(make, 2, "per-rank")

    assert [len(batch) for batch in epoch_of(loaders)] == [8, 8]


def test_dataset_that_takes_lists_gets_this_ranks_list() -> None:
    """As torch documents for datasets that read in bulk."""

    def make() -> DataLoader[Any]:
        return DataLoader(Rows(), sampler=BatchSampler(range(9), 4, drop_last=False), batch_size=None)

    assert epoch_of(boost_all(make, 3)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]


def test_whole_batches_have_their_rows_divided() -> None:
    """With batch_size=None an item is a global batch."""
    loaders = boost_all(lambda: DataLoader(Rows(), batch_size=None), 3)

    assert epoch_of(loaders) == [list(range(key * 10, key * 10 + key + 1)) for key in range(5)]
    with pytest.raises(UsageError, match="batch='per-rank' with a loader that has batch_size=None"):
        boost(DataLoader(Rows(), batch_size=None), 2, 0, "per-rank")


class Ragged(Dataset[dict[str, torch.Tensor]]):
    """Makes batches whose tensors disagree about rows."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"ids": torch.zeros(4, 2), "lengths": torch.zeros(3)}

    def __len__(self) -> int:
        return 1


def test_whole_batch_without_common_rows_is_refused() -> None:
    """Nobody can tell what its rows are."""
    loader = boost(DataLoader(Ragged(), batch_size=None), 2, 0)

    with pytest.raises(UsageError, match=r"4 in \['ids'\], 3 in \['lengths'\]"):
        list(loader)


def test_random_sampler_with_replacement_keeps_its_length() -> None:
    """Its options survive in the boosted loader."""
    sampler = RandomSampler(Numbers(), replacement=True, num_samples=50)

    loaders = boost_all(lambda: DataLoader(Numbers(), 8, sampler=sampler), 2)

    assert len(loaders[0]) == 7
    assert sum(Counter(flat(epoch_of(loaders))).values()) == 50


# --- workers and options ----------------------------------------------------------------------------------


class Noisy(Dataset[tuple[int, float, int, int]]):
    """Draws at random for every sample, and tells who read it."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[int, float, int, int]:
        worker = get_worker_info()
        number, seed = (-1, 0) if worker is None else (worker.id, worker.seed % 2**31)
        return index, torch.rand(()).item(), number, seed


def read_noise(workers: int, index: int, *, start: int = 0, **options: Any) -> list[list[list[float]]]:
    """Return what a data rank of two reads of a shuffled dataset that draws."""
    torch.manual_seed(1024)
    loader = boost(DataLoader(Noisy(), 4, shuffle=True, num_workers=workers, **options), 2, index)
    if start:
        loader.seek({**loader.position(), "samples": start})
    torch.rand(index + workers)  # what a model draws does not matter
    return [[column.tolist() for column in batch] for batch in loader]


def test_samples_look_the_same_whoever_reads_them() -> None:
    """Random augmentation depends on seed, epoch, place and data rank, not on workers or on a restart."""
    alone, with_workers = read_noise(0, 0), read_noise(2, 0)

    assert [batch[:2] for batch in with_workers] == [batch[:2] for batch in alone]
    assert [batch[:2] for batch in read_noise(2, 0, start=4)] == [batch[:2] for batch in alone][1:]
    other = [noise for batch in read_noise(0, 1) for noise in batch[1]]
    assert not set(other) & {noise for batch in alone for noise in batch[1]}


def test_workers_have_seeds_of_their_own_by_data_rank() -> None:
    """What get_worker_info() says differs by rank and worker, and is the same in every run."""
    first, again, other = read_noise(2, 0), read_noise(2, 0), read_noise(2, 1)

    seeds = [
        {(w, s) for batch in run for w, s in zip(*batch[2:], strict=True)} for run in (first, again, other)
    ]
    assert seeds[0] == seeds[1]
    assert len(seeds[0] | seeds[2]) == 4
    assert len({seed for _, seed in seeds[0] | seeds[2]}) == 4


def mark_worker(worker_id: int) -> None:
    """Leave a trace in the dataset."""
    worker = get_worker_info()
    assert worker is not None
    dataset: Any = worker.dataset
    dataset.count += 1000 * worker_id


def collate_sum(samples: list[int]) -> torch.Tensor:
    """Return the samples with their sum."""
    return torch.tensor([*samples, sum(samples)])


def test_options_of_the_users_loader_survive() -> None:
    """Whatever it was built with, the boosted loader shows and uses."""
    generator = torch.Generator()
    user = DataLoader(
        Numbers(),
        batch_size=4,
        num_workers=1,
        collate_fn=collate_sum,
        timeout=20,
        worker_init_fn=mark_worker,
        multiprocessing_context="fork",
        generator=generator,
        prefetch_factor=3,
        persistent_workers=True,
    )

    loader = boost(user, 2, 1)

    names = ("num_workers", "collate_fn", "timeout", "worker_init_fn", "generator", "prefetch_factor")
    for name in (
        *names,
        "persistent_workers",
        "multiprocessing_context",
        "pin_memory",
        "dataset",
        "drop_last",
    ):
        assert getattr(loader, name) is getattr(user, name) or getattr(loader, name) == getattr(user, name)
    assert next(iter(loader)).tolist() == [2, 3, 5]
    inner: Any = loader._source
    assert inner._inner.prefetch_factor == 3
    assert inner._inner.timeout == 20


@pytest.mark.parametrize("kind", [Numbers, Stream])
def test_persistent_workers_read_every_epoch(kind: type[Any]) -> None:
    """Workers that live on are told where the next epoch starts, also after a loop was left early."""
    loader = boost(DataLoader(kind(), 5, num_workers=2, persistent_workers=True), 1, 0)
    first = read(loader)

    read(loader, 2)

    assert read(loader) == first
    loader.seek({**loader.position(), "samples": 10, "batches": 2 if kind is Stream else 0})
    assert read(loader) == first[2:]


def test_what_workers_are_given_can_be_pickled() -> None:
    """So workers can start by spawn or forkserver, where the user's dataset and functions allow it."""
    for dataset in (Numbers(), DividedStream()):
        inner: Any = boost(DataLoader(dataset, 8, worker_init_fn=mark_worker), 2, 1)._source
        sent = pickle.dumps((inner._inner.dataset, inner._inner.worker_init_fn))
        reader, start = pickle.loads(sent)  # noqa: S301 - written in the line above

        assert type(reader.dataset) is type(dataset)
        assert start._user is mark_worker


def test_error_in_a_worker_arrives() -> None:
    """With the worker's traceback, as in torch."""
    loader = boost(DataLoader(Numbers(), sampler=[0, 99], num_workers=1), 1, 0)

    with pytest.raises(IndexError, match="in DataLoader worker process 0"):
        list(loader)


# --- what is refused --------------------------------------------------------------------------------------


class Own(DataLoader[Any]):
    """A loader with its own way to iterate."""

    def __iter__(self) -> Any:
        return iter([1])


def test_loaders_that_would_lose_something_are_refused() -> None:
    """With the reason and what to do instead."""
    loader = boost(DataLoader(Numbers()), 1, 0)
    with pytest.raises(UsageError, match="boosted already"):
        boost(loader, 1, 0)
    with pytest.raises(UsageError, match="Own overrides DataLoader"):
        boost(Own(Numbers()), 1, 0)
    with pytest.raises(UsageError, match="in_order=False"):
        boost(DataLoader(Numbers(), num_workers=1, in_order=False), 1, 0)
    with pytest.raises(UsageError, match="batch is 'local'"):
        boost(DataLoader(Numbers()), 1, 0, "local")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="0 rows"):
        list(boost(DataLoader([torch.zeros(0)], batch_size=None), 2, 0))  # type: ignore[arg-type]
