"""How units are cut into chunks, and what that wastes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossal_gemini.search import bound_waste, choose_chunk_bytes, cut_unit, pad_numel


def gpt(hidden: int, num_layers: int, vocabulary: int) -> list[list[int]]:
    """Return the sizes of the parameters of a GPT: the root unit, and blocks."""
    block = [hidden, hidden, 3 * hidden**2, 3 * hidden, hidden**2, hidden, hidden, hidden]
    block += [4 * hidden**2, 4 * hidden, 4 * hidden**2, hidden]
    return [[vocabulary * hidden, 1024 * hidden, hidden, hidden], *[block] * num_layers]


def llama(hidden: int, num_layers: int, vocabulary: int) -> list[list[int]]:
    """Return those of a Llama with grouped heads."""
    wide = 7 * hidden // 2
    block = [hidden**2, hidden**2 // 8, hidden**2 // 8, hidden**2, *[wide * hidden] * 3, hidden, hidden]
    return [[vocabulary * hidden, hidden, vocabulary * hidden], *[block] * num_layers]


def vit(hidden: int, num_layers: int) -> list[list[int]]:
    """Return those of a vision transformer."""
    return [[hidden, 197 * hidden, 768 * hidden, 1000 * hidden, 1000], *gpt(hidden, num_layers, 0)[1:]]


@given(sizes=st.lists(st.integers(1, 50), min_size=1), chunk_bytes=st.integers(1, 200))
def test_a_unit_is_cut_into_whole_parameters(sizes: list[int], chunk_bytes: int) -> None:
    """In their order; no chunk but one of a single parameter exceeds the size, and none could take more."""
    chunks = cut_unit(sizes, value_bytes=2, chunk_bytes=chunk_bytes)

    held = [2 * sum(sizes[index] for index in chunk) for chunk in chunks]
    assert [index for chunk in chunks for index in chunk] == list(range(len(sizes)))
    assert all(len(chunk) == 1 or size <= chunk_bytes for chunk, size in zip(chunks, held, strict=True))
    for chunk, size in zip(chunks[1:], held, strict=False):
        assert size + 2 * sizes[chunk[0]] > chunk_bytes


@given(numel=st.integers(1, 10**6), ranks=st.integers(1, 9), value_bytes=st.sampled_from([2, 4, 8]))
def test_padding_keeps_its_bound(numel: int, ranks: int, value_bytes: int) -> None:
    """Shards are equal and aligned, and one rank pads nothing."""
    padded = pad_numel(numel, ranks=ranks, value_bytes=value_bytes)

    assert padded - numel <= numel * bound_waste(numel, ranks=ranks, value_bytes=value_bytes)
    assert padded == numel if ranks == 1 else padded > numel and padded % ranks == 0
    assert ranks == 1 or padded // ranks * value_bytes % 16 == 0


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 64])
@pytest.mark.parametrize(
    "units",
    [gpt(768, 12, 50257), llama(4096, 32, 128256), vit(768, 12), gpt(64, 2, 1000)],
    ids=["gpt", "llama", "vit", "small"],
)
def test_waste_is_below_two_percent(units: list[list[int]], ranks: int) -> None:
    """Also of a model of 200 thousand parameters, on 64 ranks."""
    choice = choose_chunk_bytes(units, value_bytes=2, ranks=ranks)

    assert choice.waste <= 0.02


def test_small_units_are_one_chunk_each() -> None:
    """Since each transfer costs to begin."""
    choice = choose_chunk_bytes(gpt(256, 6, 1000), value_bytes=4)

    assert choice.num_chunks == 7


def test_large_units_are_cut() -> None:
    """Since buffers of optimizer state are as large as the largest chunk."""
    units = llama(8192, 80, 128256)

    choice = choose_chunk_bytes(units, value_bytes=2, ranks=8)

    assert choice.largest_bytes < 2.1 * 128256 * 8192
    assert choice.num_chunks > 81


def test_the_size_of_the_user_is_taken() -> None:
    """Whatever it costs."""
    choice = choose_chunk_bytes(gpt(64, 2, 100), value_bytes=4, bound=1000)

    assert choice.chunk_bytes == 1000
    assert choice.num_chunks > 20
