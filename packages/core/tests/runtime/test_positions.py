"""Positions: a loader goes on with exactly the next samples."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader, Sampler, WeightedRandomSampler

from colossal_core.errors import UsageError

from .loaders import (
    Batches,
    Buckets,
    DividedStream,
    Make,
    Numbers,
    Rows,
    ShuffledStream,
    Stream,
    boost,
    boost_all,
    epoch_of,
    flat,
    read,
)

KINDS: dict[str, Make] = {
    "shuffled": lambda: DataLoader(Numbers(), 4, shuffle=True),
    "workers": lambda: DataLoader(Numbers(), 4, shuffle=True, num_workers=2),
    "weighted": lambda: DataLoader(
        Numbers(),
        4,
        sampler=WeightedRandomSampler([1.0] * 23, 23, generator=torch.Generator().manual_seed(4)),
    ),
    "lists": lambda: DataLoader(Numbers(), batch_sampler=Buckets(5, 1, 8, 4, 4)),
    "whole batches": lambda: DataLoader(Rows(), batch_size=None, shuffle=True),
    "stream": lambda: DataLoader(ShuffledStream(), 4),
    "stream with workers": lambda: DataLoader(ShuffledStream(), 4, num_workers=2),
    "divided stream": lambda: DataLoader(DividedStream(), 4, num_workers=2),
    "stream of batches": lambda: DataLoader(Batches(), batch_size=None),
}


@pytest.mark.parametrize("kind", KINDS)
def test_position_goes_on_with_exactly_the_next_samples(kind: str) -> None:
    """In the middle of the second epoch, in a new process, on another number of ranks."""
    given = boost_all(KINDS[kind], 2)
    (whole,) = boost_all(KINDS[kind], 1)
    for loader in [*given, whole]:
        loader.set_epoch(1)
    for loader in given:
        read(loader, 2)
    position = json.loads(json.dumps(given[0].position()))

    resumed = boost_all(KINDS[kind], 3)
    for loader in resumed:
        loader.seek(position)

    assert given[1].position() == position
    assert position["epoch"] == resumed[0].epoch == 1
    assert epoch_of(resumed) == epoch_of([whole])[2:]
    assert [loader.epoch for loader in resumed] == [2, 2, 2]


@pytest.mark.parametrize("kind", ["shuffled", "workers", "weighted", "stream", "stream with workers"])
def test_position_in_samples_fits_another_global_batch(kind: str) -> None:
    """With the per-rank habit, the global batch changes with the number of ranks, the order does not."""
    before = boost_all(KINDS[kind], 2, "per-rank")
    order = flat(epoch_of(boost_all(KINDS[kind], 1)))
    for loader in before:
        read(loader, 1)

    after = boost_all(KINDS[kind], 3, "per-rank")
    for loader in after:
        loader.seek(before[0].position())

    assert before[0].position()["samples"] == 8
    assert flat(epoch_of(after)) == order[8:]


def test_what_workers_have_read_ahead_does_not_count() -> None:
    """The position moves when a batch is given, whatever is under way."""
    loader = boost(DataLoader(Numbers(), 2, num_workers=2, prefetch_factor=4), 1, 0)
    iterator = iter(loader)

    next(iterator)

    assert loader.position()["samples"] == 2


def test_next_epoch_comes_when_the_loop_has_ended() -> None:
    """In the body of the last batch the epoch still goes on, and what comes at its end is still to come."""
    loader = boost(DataLoader(Numbers(), 10, shuffle=True), 1, 0)

    places = [(loader.position()["epoch"], loader.position()["samples"]) for _ in loader]

    assert places == [(0, 10), (0, 20), (0, 23)]
    assert (loader.position()["epoch"], loader.position()["samples"], loader.epoch) == (1, 0, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_position_in_the_body_of_the_last_batch_is_before_the_end_of_the_epoch(kind: str) -> None:
    """No batch comes twice, and a loop that goes on from there ends the epoch before the next one."""
    loader = boost(KINDS[kind](), 1, 0)
    position = [json.loads(json.dumps(loader.position())) for _ in loader][-1]
    resumed = boost(KINDS[kind](), 1, 0)
    resumed.seek(position)

    assert resumed.epoch == 0
    assert read(resumed) == []
    assert resumed.epoch == 1
    assert epoch_of([resumed]) == epoch_of([loader])


def test_loop_left_in_the_body_of_the_last_batch_has_ended() -> None:
    """A loop that breaks by itself there is over, as one that is asked in vain for another batch."""
    loader = boost(DataLoader(Numbers(), 10), 1, 0)

    read(loader, 3)

    assert (loader.position()["epoch"], loader.position()["samples"]) == (1, 0)
    assert len(read(loader)) == 3
    assert loader.epoch == 2


def test_position_of_an_earlier_version_is_read() -> None:
    """It did not say whether the epoch was over."""
    loader = boost(DataLoader(Numbers(), 10), 1, 0)
    read(loader, 2)
    position = loader.position()
    del position["is_over"]

    loader.seek(position)

    assert len(read(loader)) == 1
    with pytest.raises(UsageError, match="'is_over' is missing, unknown or wrong"):
        loader.seek({**position, "is_over": 1})


def test_loop_left_early_keeps_its_position_until_the_next_one_begins() -> None:
    """Training for a number of steps, then saving, resumes in the middle; iterating again is a new epoch."""
    loader = boost(DataLoader(Numbers(), 10, shuffle=True), 1, 0)
    read(loader, 1)

    assert loader.position()["samples"] == 10
    assert loader.epoch == 0
    read(loader, 1)
    assert (loader.position()["epoch"], loader.position()["samples"]) == (1, 10)


def test_set_epoch_keeps_a_position_in_that_epoch() -> None:
    """A resumed script that calls set_epoch(epoch) every epoch goes on where it was."""
    loader = boost(DataLoader(Numbers(), 10), 1, 0)
    read(loader, 1)
    position = loader.position()
    resumed = boost(DataLoader(Numbers(), 10), 1, 0)
    resumed.seek(position)

    resumed.set_epoch(0)

    assert [samples[0] for samples, _, _ in read(resumed)] == [10, 20]
    resumed.set_epoch(1)
    assert len(read(resumed)) == 3


def test_position_remembers_the_seed() -> None:
    """A script started with another seed goes on with the order that it had."""
    torch.manual_seed(1)
    first = boost(DataLoader(Numbers(), 5, shuffle=True), 1, 0)
    order = flat(epoch_of([first]))
    first.set_epoch(0)
    read(first, 2)
    torch.manual_seed(2)
    second = boost(DataLoader(Numbers(), 5, shuffle=True), 1, 0)

    second.seek(first.position())

    assert flat(epoch_of([second])) == order[10:]


def test_position_in_another_dataset_is_refused() -> None:
    """By its length, and by what an epoch consists of."""
    position = boost(DataLoader(Numbers(23), 4), 1, 0).position()

    with pytest.raises(UsageError, match="one in 23 samples, this loader has 24 samples"):
        boost(DataLoader(Numbers(24), 4), 1, 0).seek(position)
    with pytest.raises(UsageError, match="this loader has None stream"):
        boost(DataLoader(Stream(), 4), 1, 0).seek(position)
    with pytest.raises(UsageError, match="no position of a loader: 'epoch'"):
        boost(DataLoader(Numbers(23), 4), 1, 0).seek({**position, "epoch": -1})


class Hidden(Sampler[int]):
    """Keeps its state where nobody finds it."""

    def __init__(self) -> None:
        self.passes = [0]

    def __len__(self) -> int:
        return 23

    def __iter__(self) -> Iterator[int]:
        self.passes[0] += 1
        yield from ((index + self.passes[0]) % 23 for index in range(23))


def test_order_that_cannot_be_repeated_is_refused() -> None:
    """A sampler with a state of its own would silently repeat some samples and leave out others."""
    loader = boost(DataLoader(Numbers(), 4, sampler=Hidden()), 1, 0)
    read(loader)
    read(loader, 1)
    resumed = boost(DataLoader(Numbers(), 4, sampler=Hidden()), 1, 0)
    resumed.seek(loader.position())

    with pytest.raises(UsageError, match="epoch 1 now has another order than when the position was stored"):
        iter(resumed)


def test_divided_stream_resumes_only_with_its_workers_and_batches() -> None:
    """The order of such a stream depends on both."""
    loader = boost(DataLoader(DividedStream(), 4, num_workers=2), 1, 0)
    read(loader, 3)
    position = loader.position()

    for other in (
        DataLoader(DividedStream(), 4, num_workers=1),
        DataLoader(DividedStream(), 3, num_workers=2),
    ):
        resumed = boost(other, 1, 0)
        resumed.seek(position)
        with pytest.raises(UsageError, match="divides among 2 workers in global batches of 4"):
            iter(resumed)
