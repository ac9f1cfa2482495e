"""Orders, global batches and shares: integers and seeds, without processes."""

from __future__ import annotations

import itertools
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from colossal_core.errors import UsageError
from colossal_core.runtime.draws import PrivateDraws, mix_seed, own_generators, seed_process
from colossal_core.runtime.positions import Position
from colossal_core.runtime.sampling import (
    EpochOrder,
    Portion,
    cut_batches,
    digest_of,
    divide,
    divide_groups,
    divide_lists,
    mark_last,
    share_range,
)

# --- shares -------------------------------------------------------------------------------------------------


def test_shares_are_contiguous_and_differ_by_at_most_one() -> None:
    """For every small batch and degree, shares in rank order are the batch, the larger ones first."""
    for count, degree in itertools.product(range(30), range(1, 9)):
        shares = [share_range(count, degree, index) for index in range(degree)]

        assert list(itertools.chain(*shares)) == list(range(count))
        sizes = [len(share) for share in shares]
        assert sizes == sorted(sizes, reverse=True)
        assert max(sizes) - min(sizes) <= 1


def test_batches_cover_the_order_and_only_drop_last_drops() -> None:
    """Cutting loses nothing, unless the last batch is incomplete and not wanted."""
    for count, size in itertools.product(range(20), range(1, 7)):
        kept = list(cut_batches(range(count), size, drop_last=False))
        dropped = list(cut_batches(range(count), size, drop_last=True))

        assert list(itertools.chain(*kept)) == list(range(count))
        assert dropped == [batch for batch in kept if len(batch) == size]


def test_divided_batches_cover_everything_once_and_take_equal_steps() -> None:
    """Every rank has a portion of every batch; the rows that count are the samples, each once, in order."""
    for count, size, degree in itertools.product(range(1, 14), range(1, 6), range(1, 5)):
        batches = list(cut_batches(range(count), size, drop_last=False))
        portions = [list(divide(batches, degree, index)) for index in range(degree)]

        assert {len(mine) for mine in portions} == {len(batches)}
        for number, batch in enumerate(batches):
            step = [mine[number] for mine in portions]
            assert [key for portion in step for key in portion.indices[: portion.rows]] == batch
            assert sum(portion.rows for portion in step) == step[0].global_rows == len(batch)
            assert all(portion.units == len(batch) for portion in step)


def test_empty_share_reads_one_sample_that_does_not_count() -> None:
    """A rank without a sample reads the first one of the batch, with no row that counts."""
    portion = next(divide([[7, 8]], 3, 2))

    assert (list(portion.indices), portion.rows, portion.global_rows) == ([7], 0, 2)


def test_lists_of_a_batch_sampler_are_divided_one_by_one() -> None:
    """Each list is a global batch, whatever its length."""
    first, second = divide_lists([[1, 2, 3], [4]], 2, 0)

    assert (first.indices, first.units, second.indices, second.units) == ([1, 2], 1, [4], 1)


def test_groups_of_lists_give_each_rank_its_own_list() -> None:
    """With a batch for each rank, lists stay whole, and ranks without one in the last group stand in."""
    lists = [[1, 2], [3], [4, 5, 6]]

    portions = [list(divide_groups(lists, 2, index)) for index in range(2)]

    assert [[list(p.indices) for p in mine] for mine in portions] == [[[1, 2], [4, 5, 6]], [[3], [4]]]
    assert [[(p.rows, p.global_rows, p.units) for p in mine] for mine in portions] == [
        [(2, 3, 2), (3, 3, 1)],
        [(1, 3, 2), (0, 3, 1)],
    ]


@pytest.mark.parametrize("cut", [divide, divide_lists, divide_groups])
def test_empty_batch_is_refused(cut: Callable[..., Iterator[Portion]]) -> None:
    """A batch sampler that yields an empty list is told which one it was."""
    with pytest.raises(UsageError, match="batch 1 of the batch sampler is empty"):
        list(cut([[1], []], 2, 0))


@pytest.mark.parametrize("count", range(4))
def test_last_item_is_known_when_it_is_given(count: int) -> None:
    """Exactly the last item is marked."""
    assert list(mark_last(range(count))) == [(item, item == count - 1) for item in range(count)]


# --- random numbers -----------------------------------------------------------------------------------------


def test_seeds_depend_on_every_part_and_never_change() -> None:
    """The same seed on every machine and in every version: checkpoints rely on it."""
    assert mix_seed(1, "order", 2) == 1512032346046740884
    assert len({mix_seed(*parts) for parts in itertools.product(range(5), range(5), "ab")}) == 50
    assert mix_seed(1, 23) != mix_seed(12, 3)


def draw_everywhere() -> tuple[float, ...]:
    """Draw from every global generator; numpy's counts where numpy is installed and imported."""
    numpy = sys.modules.get("numpy")
    numbers = () if numpy is None else (float(numpy.random.rand()),)
    return torch.rand(()).item(), random.random(), *numbers  # noqa: S311 - what users draw


def seed_everywhere(seed: int) -> None:
    """Seed every global generator."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed)


def test_private_draws_leave_the_global_generators_alone() -> None:
    """What is drawn inside changes nothing outside, and goes on when entered again."""
    seed_everywhere(3)
    expected = [draw_everywhere() for _ in range(2)]
    seed_everywhere(3)
    draws, other = PrivateDraws(5), PrivateDraws(5)

    with draws:
        inside = [draw_everywhere()]
    outside = [draw_everywhere()]
    with draws:
        inside.append(draw_everywhere())
    outside.append(draw_everywhere())

    assert outside == expected
    with other:
        assert [draw_everywhere(), draw_everywhere()] == inside
    assert inside[0] != inside[1]


def test_seeding_a_process_equals_private_draws() -> None:
    """So a sample looks the same whether a worker reads it or not."""
    with PrivateDraws(9):
        wanted = draw_everywhere()
    with PrivateDraws(0):
        seed_process(9)

        assert draw_everywhere() == wanted


def test_generators_among_attributes_are_set_privately() -> None:
    """They go back to where they were, and start from the seed inside."""

    class Owner:
        """Holds one of each kind that is installed."""

        def __init__(self) -> None:
            self.torch = torch.Generator().manual_seed(1)
            self.python = random.Random(1)  # noqa: S311 - what users have
            numpy = sys.modules.get("numpy")
            self.old = self.python if numpy is None else numpy.random.RandomState(1)
            self.new = self.python if numpy is None else numpy.random.default_rng(1)

        def draw(self) -> tuple[float, ...]:
            """Draw from each."""
            numbers = [generator.uniform(0, 1) for generator in (self.python, self.old, self.new)]
            return torch.rand((), generator=self.torch).item(), *numbers

    owner, twin = Owner(), Owner()
    draws = PrivateDraws(4, own_generators(owner))

    with draws:
        inside = owner.draw()

    assert owner.draw() == twin.draw()
    with PrivateDraws(4, own_generators(owner)):
        assert owner.draw() == inside


# --- orders -------------------------------------------------------------------------------------------------

DATA = TensorDataset(torch.arange(23))


def order_of(sampler: Sampler[int], seed: int = 1, epoch: int = 0) -> list[int]:
    """Return an epoch as a list."""
    return list(EpochOrder(sampler, is_lists=False).draw(seed, epoch))


def test_sequential_order_is_the_dataset() -> None:
    """Nothing is drawn and nothing is stored."""
    assert order_of(SequentialSampler(DATA)) == list(range(23))


def test_random_order_depends_on_seed_and_epoch_only() -> None:
    """The same on every rank and in every run, another one in every epoch, the global generator untouched."""
    order = EpochOrder(RandomSampler(DATA), is_lists=False)
    torch.manual_seed(1)
    before = torch.get_rng_state()

    drawn = [list(order.draw(7, epoch)) for epoch in range(3)]

    torch.manual_seed(2)
    assert drawn == [list(order.draw(7, epoch)) for epoch in range(3)]
    assert all(sorted(epoch) == list(range(23)) for epoch in drawn)
    assert drawn[0] != drawn[1] != drawn[2]
    assert drawn[0] != list(order.draw(8, 0))
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), before)


def test_random_sampler_keeps_its_options() -> None:
    """Drawing with replacement and another number of samples stay what they were."""
    with_replacement = order_of(RandomSampler(DATA, replacement=True, num_samples=200))
    longer = order_of(RandomSampler(DATA, num_samples=46))

    assert len(with_replacement) == 200
    assert set(Counter(longer).values()) == {2}


def test_generators_of_a_random_sampler_do_not_matter_and_stay() -> None:
    """Ranks may have given it different states; the order comes from the seed of the loader."""
    orders = []
    for number in range(2):
        generator = torch.Generator().manual_seed(number)
        orders.append(order_of(RandomSampler(DATA, generator=generator)))
        assert torch.equal(generator.get_state(), torch.Generator().manual_seed(number).get_state())

    assert orders[0] == orders[1]


@pytest.mark.parametrize("shuffle", [True, False])
def test_distributed_sampler_gives_the_order_that_it_would_divide(*, shuffle: bool) -> None:
    """A script that moves from DDP sees the same samples in the same epochs, without the padding."""
    samplers: list[DistributedSampler[Any]] = [
        DistributedSampler(DATA, 4, rank, shuffle=shuffle, seed=5) for rank in range(4)
    ]
    for sampler in samplers:
        sampler.set_epoch(2)
    theirs = [key for step in zip(*samplers, strict=True) for key in step][:23]

    assert order_of(samplers[3], epoch=2) == theirs
    assert len(EpochOrder(samplers[3], is_lists=False)) == 23


def test_other_samplers_begin_with_their_own_draw() -> None:
    """The first epoch is what the user's sampler, with its seeded generator, yields; later ones differ."""
    weights = [0.1, 0.7, 0.2]

    def make() -> WeightedRandomSampler:
        return WeightedRandomSampler(weights, 50, generator=torch.Generator().manual_seed(11))

    order = EpochOrder(make(), is_lists=False)

    assert order.is_foreign
    assert list(order.draw(1, 0)) == list(make())
    assert list(order.draw(1, 0)) == list(order.draw(1, 0))
    assert list(order.draw(1, 1)) == list(EpochOrder(make(), is_lists=False).draw(1, 1))
    assert list(order.draw(1, 1)) != list(order.draw(1, 0))


def test_samplers_that_draw_globally_are_equal_everywhere() -> None:
    """Without a generator of its own, a sampler draws the same whatever was drawn before."""
    drawn = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        drawn.append(order_of(SubsetRandomSampler(range(9))))

    assert drawn[0] == drawn[1]
    assert sorted(drawn[0]) == list(range(9))


class Curriculum(Sampler[int]):
    """Yields more in every epoch that it is told of, and has no length."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Remember the epoch."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.epoch + 1))


def test_samplers_are_told_the_epoch() -> None:
    """Also one inside a batch sampler."""
    sampler = Curriculum()

    assert order_of(sampler, epoch=4) == [0, 1, 2, 3, 4]
    assert list(EpochOrder(_Pairs(sampler), is_lists=True).draw(0, 2)) == [[0, 0], [1, 1], [2, 2]]
    with pytest.raises(TypeError, match="Curriculum"):
        len(EpochOrder(sampler, is_lists=False))


class _Pairs(Sampler[list[int]]):
    """A batch sampler over a sampler."""

    def __init__(self, inner: Sampler[int]) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[list[int]]:
        return ([index, index] for index in self.inner)


class Endless(Sampler[int]):
    """Never ends."""

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from torch.randperm(5).tolist()


def test_sampler_without_an_end_is_drawn_as_it_is_read() -> None:
    """A block at a time, with the same numbers however far it is read."""
    order = EpochOrder(Endless(), is_lists=False)

    first, second = iter(order.draw(3, 0)), iter(order.draw(3, 0))
    torch.manual_seed(99)

    assert list(itertools.islice(first, 3000)) == [next(second) for _ in range(3000)]


def test_subclass_that_iterates_otherwise_is_run_as_it_is() -> None:
    """Only what torch's own sampler does may be replaced."""

    class Reversed(SequentialSampler):
        """Goes backwards."""

        def __iter__(self) -> Iterator[int]:
            return iter(reversed(range(len(self))))

    order = EpochOrder(Reversed(DATA), is_lists=False)

    assert order.is_foreign
    assert list(order.draw(0, 0)) == list(reversed(range(23)))


def test_custom_batch_sampler_is_an_order_of_lists() -> None:
    """Its lists are kept whole."""
    sampler = BatchSampler(SequentialSampler(DATA), 10, drop_last=False)

    assert [len(batch) for batch in EpochOrder(sampler, is_lists=True).draw(0, 0)] == [10, 10, 3]


# --- digests ------------------------------------------------------------------------------------------------


def test_digests_tell_values_apart_and_not_objects() -> None:
    """Equal samples have equal digests in every process; other samples have others."""
    samples = [
        1,
        1.5,
        "text",
        b"bytes",
        None,
        torch.arange(3),
        torch.arange(3).double(),
        {"x": torch.ones(2), "y": [1, "a"]},
        (1, 2),
    ]
    digests = [digest_of([sample]) for sample in samples]

    assert len(set(digests)) == len(samples)
    assert digest_of([object()]) == digest_of([object()])
    assert digest_of([{"x": torch.ones(2)}]) == digest_of([{"x": torch.ones(2)}])
    assert digest_of([1, 2]) != digest_of([2, 1])


def test_arrays_are_told_apart() -> None:
    """By their content."""
    numpy: Any = pytest.importorskip("numpy")

    assert digest_of([numpy.arange(3)]) == digest_of([numpy.arange(3)]) != digest_of([numpy.arange(1, 4)])


# --- positions ----------------------------------------------------------------------------------------------


def test_position_survives_a_dict() -> None:
    """Checkpoints store positions as JSON."""
    position = Position(order="samples", epoch=2, samples=8, length=23, head=(3, "abc"))

    assert Position.from_dict(position.to_dict()) == position
    assert position.to_dict()["head"] == [3, "abc"]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"epoch": -1}, "epoch"),
        ({"samples": 1.5}, "samples"),
        ({"order": "heap"}, "order"),
        ({"head": [1]}, "head"),
        ({"surprise": 1}, "surprise"),
        ({"length": "23"}, "length"),
    ],
)
def test_damaged_position_is_refused_by_name(change: dict[str, object], name: str) -> None:
    """Whatever is wrong with it is named."""
    with pytest.raises(UsageError, match=name):
        Position.from_dict({**Position(order="samples").to_dict(), **change})
