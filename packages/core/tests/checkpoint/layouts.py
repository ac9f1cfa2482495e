"""Random tensors in random layouts, and the plain way to say what their elements are."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from hypothesis import strategies as st

from colossal_core.boxes import Box
from colossal_core.checkpoint import manifest, reading, streaming, verifying
from colossal_core.checkpoint.safetensors_format import ITEM_BYTES
from colossal_testkit.checkpoints import SampleTensor, cut_at_random

__all__ = ["PATCHED", "boxes_in", "flat_indexes", "shapes", "tensors"]

PATCHED = (manifest, reading, streaming, verifying)
"""Modules that know the number of bytes that share a checksum."""

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
"""Also 0-d and empty ones."""


@st.composite
def tensors(draw: st.DrawFn) -> SampleTensor:
    """Draw a tensor of any type, shape and layout."""
    shape, dtype = draw(shapes), draw(st.sampled_from(sorted(ITEM_BYTES)))
    seed = draw(st.integers(0, 2**20))
    boxes = cut_at_random(shape, draw(st.integers(0, 9)), seed)
    return SampleTensor.make(shape, dtype=dtype, seed=seed, boxes=boxes)


def boxes_in(shape: Sequence[int]) -> st.SearchStrategy[Box]:
    """Return a strategy of boxes in a shape without empty dims."""
    ranges = [
        st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)).map(
            lambda ends: (min(ends), abs(ends[1] - ends[0]) + 1)
        )
        for n in shape
    ]
    return st.tuples(*ranges).map(
        lambda found: Box(tuple(start for start, _ in found), tuple(length for _, length in found))
    )


def flat_indexes(shape: Sequence[int], box: Box) -> Iterator[int]:
    """Yield the position of each element of a box in the row-major order of a shape, one by one."""
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    for index in itertools.product(
        *(range(start, start + n) for start, n in zip(box.offset, box.size, strict=True))
    ):
        yield sum(i * step for i, step in zip(index, strides, strict=True))
