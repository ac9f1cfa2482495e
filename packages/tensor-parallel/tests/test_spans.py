"""Which elements of a dim a rank has, for all small cases."""

from __future__ import annotations

import itertools

import pytest
import torch

from colossal_core.errors import UsageError
from colossal_tensor_parallel.spans import Split, legal_degrees, split_evenly


@pytest.mark.parametrize("degree", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("count", [1, 5, 8, 41])
def test_runs_are_those_of_tensor_split(count: int, degree: int) -> None:
    """Ranks get as many as the others or one fewer, larger runs first."""
    expected = [piece.tolist() for piece in torch.arange(count).tensor_split(degree)]

    assert [list(range(*span)) for span in split_evenly(count, degree)] == expected


@pytest.mark.parametrize("degree", [2, 3, 4])
@pytest.mark.parametrize("num_parts", [1, 2, 3])
def test_fused_parts_are_cut_one_by_one(num_parts: int, degree: int) -> None:
    """Every element is on exactly one rank, and each rank has the same units of each part."""
    split = Split.whole(num_parts * 6 * 4, 6, num_parts)

    spans = [split.spans(rank, degree) for rank in range(degree)]

    held = sorted(index for mine in spans for span in mine for index in range(*span))
    assert held == list(range(split.size))
    for mine in spans:
        assert len({(start % 24, stop - start) for start, stop in mine}) == 1


@pytest.mark.parametrize(("degree", "count"), [(4, 2), (4, 1), (6, 3)])
def test_ranks_share_key_value_heads_when_there_are_more_ranks(degree: int, count: int) -> None:
    """Ranks that follow each other hold the same head, and say so."""
    split = Split.whole(count * 5, count)

    holders = {
        span: [rank for rank in range(degree) if split.spans(rank, degree) == (span,)]
        for (span,) in (split.spans(rank, degree) for rank in range(degree))
    }

    assert sorted(map(tuple, holders.values())) == sorted(split.sharers(0, degree))
    assert set(itertools.chain(*split.sharers(0, degree))) == set(range(degree))


def test_units_of_their_own_are_shared_by_nobody() -> None:
    """With at least as many units as ranks there are no sharers, and what is left over goes to the first."""
    split = Split.whole(15, 5)

    assert split.sharers(0, 3) == ()
    assert [split.local_size(rank, 3) for rank in range(3)] == [6, 6, 3]


def test_legal_degrees_divide_heads_and_divide_or_multiply_kv_heads() -> None:
    """12 heads with 4 KV heads: 3 ranks would share no head evenly, 8 do not divide the heads."""
    assert legal_degrees(12, 4) == (1, 2, 4, 12)
    assert legal_degrees(3) == (1, 3)
    with pytest.raises(UsageError, match="0 heads"):
        legal_degrees(0)
