"""Fixtures of the checkpoint tests: blocks of a few bytes, so that small tensors have many."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .layouts import PATCHED

SMALL_BLOCK_BYTES = 48
"""Three elements of the widest type."""


@pytest.fixture(scope="module")
def small_blocks() -> Iterator[int]:
    """Let blocks have 48 bytes in this file; for the whole file, since hypothesis runs a test many times."""
    with pytest.MonkeyPatch.context() as patch:
        for module in PATCHED:
            patch.setattr(module, "BLOCK_BYTES", SMALL_BLOCK_BYTES)
        yield SMALL_BLOCK_BYTES
