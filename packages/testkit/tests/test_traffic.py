"""Words received: the formulas, and what is made of a ledger."""

from __future__ import annotations

import pytest

from colossal_core.runtime.ledger import Transfer
from colossal_testkit.traffic import (
    TrafficError,
    all_reduce_words,
    check_words,
    gather_words,
    measure_traffic,
)


def _transfer(op: str, *, num_words: int, phase: str = "gradients", item_bytes: int = 4) -> Transfer:
    """Return an entry of a group of four ranks."""
    return Transfer(
        op=op,
        group="data",
        num_ranks=4,
        dtype="float32",
        item_bytes=item_bytes,
        full_bytes=num_words * item_bytes,
        phase=phase,
    )


@pytest.mark.parametrize(
    ("op", "words"),
    [
        ("all_reduce", 150.0),
        ("all_gather", 75.0),
        ("reduce_scatter", 75.0),
        ("all_to_all", 75.0),
        ("broadcast", 100.0),
        ("receive", 100.0),
        ("send", 0.0),
    ],
)
def test_each_operation_has_its_formula(op: str, words: float) -> None:
    """A hundred words among four ranks, whatever the size of a word; the ledger's own count agrees."""
    transfer = _transfer(op, num_words=100, item_bytes=2)

    assert measure_traffic([transfer]).phase("gradients").words == words
    assert transfer.received_words == words


def test_formulas_of_one_rank_are_zero() -> None:
    """Nothing is received by a group of one."""
    assert (all_reduce_words(100, 1), gather_words(100, 1)) == (0.0, 0.0)


def test_phases_are_summed_apart() -> None:
    """Words, bytes and calls by purpose."""
    traffic = measure_traffic(
        [
            _transfer("all_reduce", num_words=100),
            _transfer("all_reduce", num_words=50),
            _transfer("all_reduce", num_words=1, phase="norm", item_bytes=8),
        ]
    )

    assert traffic.phase("gradients").operations == {"all_reduce": 2}
    assert traffic.phase("gradients").message_bytes == 600
    assert traffic.phase("norm").message_bytes == 8
    assert traffic.words_except("norm") == 225.0
    assert traffic.phase("parameters").words == 0.0


@pytest.mark.parametrize("num_words", [99, 102])
def test_more_or_less_than_the_formula_is_an_error(num_words: int) -> None:
    """A hundredth more was allowed; less never is."""
    traffic = measure_traffic([_transfer("all_gather", num_words=num_words)])

    with pytest.raises(TrafficError, match=r"expected 75\.0 and at most 1\.00% more"):
        check_words(traffic, gather_words(100, 4), excess=0.01)


def test_flags_within_the_excess_pass() -> None:
    """Norm and loss are not part of the formula."""
    traffic = measure_traffic(
        [_transfer("all_gather", num_words=101), _transfer("all_reduce", num_words=999, phase="norm")]
    )

    check_words(traffic, gather_words(100, 4), excess=0.01)


def test_an_unknown_operation_is_an_error() -> None:
    """What has no formula cannot be counted as nothing."""
    with pytest.raises(TrafficError, match="'barrier'"):
        measure_traffic([_transfer("barrier", num_words=1)])
