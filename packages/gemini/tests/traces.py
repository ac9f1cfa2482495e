"""Traces for tests: small ones by hand and by chance."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hypothesis import strategies as st

from colossal_gemini.trace import Chunk, Moment, Trace

__all__ = ["make_chunk", "make_trace", "random_traces", "sweep"]


def make_chunk(
    index: int, numel: int = 1, *, is_trainable: bool = True, is_pinned: bool = False, value_bytes: int = 1
) -> Chunk:
    """Return a chunk without padding."""
    return Chunk(
        index=index,
        name=f"unit{index}",
        numel=numel,
        used=numel,
        value_bytes=value_bytes,
        is_trainable=is_trainable,
        is_pinned=is_pinned,
    )


def make_trace(
    sizes: Sequence[int],
    needs: Iterable[Iterable[int]],
    *,
    others: Sequence[int] | None = None,
    frozen: Iterable[int] = (),
    has_update: bool = True,
) -> Trace:
    """Return a trace of forward moments, and an update.

    Args:
        sizes: Bytes of each chunk.
        needs: Chunks of each moment.
        others: Bytes of everything else in each moment, the update last; nothing by default.
        frozen: Chunks without gradients.
        has_update: Whether the step updates.
    """
    rows = [tuple(row) for row in needs]
    others = others or [0] * (len(rows) + 1)
    moments = [
        Moment(name=f"m{index}", phase="forward", needs=row, other=other)
        for index, (row, other) in enumerate(zip(rows, others, strict=False))
    ]
    if has_update:
        moments.append(Moment(name="update", phase="update", needs=(), other=others[len(rows)]))
    chunks = (make_chunk(i, size, is_trainable=i not in set(frozen)) for i, size in enumerate(sizes))
    return Trace(key="test", chunks=tuple(chunks), moments=tuple(moments))


def sweep(
    num_units: int, size: int = 1, *, gradients: bool = False, other: int = 0, value_bytes: int = 1
) -> Trace:
    """Return a step through equal units, forward and back again, and an update."""
    units = range(num_units)
    forward = [Moment(name=f"u{i}", phase="forward", needs=(i,), other=other) for i in units]
    backward = [
        Moment(name=f"u{i}", phase="backward", needs=(i,), gradients=(i,) if gradients else (), other=other)
        for i in reversed(units)
    ]
    update = Moment(name="update", phase="update", needs=(), other=0)
    return Trace(
        key="sweep",
        chunks=tuple(make_chunk(i, size, value_bytes=value_bytes) for i in units),
        moments=(*forward, *backward, update),
    )


@st.composite
def random_traces(draw: st.DrawFn, *, are_equal: bool = False) -> Trace:
    """Draw a trace of a few chunks and moments; chunks of one size when they have to be equal."""
    number = draw(st.integers(2, 5))
    sizes = [1] * number if are_equal else draw(st.lists(st.integers(1, 9), min_size=number, max_size=number))
    row = st.sets(st.integers(0, number - 1), max_size=2)
    needs = draw(st.lists(row, min_size=2, max_size=8))
    others = draw(st.lists(st.integers(0, 3), min_size=len(needs) + 1, max_size=len(needs) + 1))
    frozen = draw(st.sets(st.integers(0, number - 1)))
    return make_trace(sizes, needs, others=others, frozen=frozen, has_update=draw(st.booleans()))
