"""The strategy ``recompute`` passes the contract of strategies on every reference model."""

from __future__ import annotations

from colossal_core import Recompute
from colossal_testkit.contracts import StrategyContract


class TestNamedBlocks(StrategyContract):
    """Every other module is recomputed: embeddings, tied heads, recurrent layers, branches that some skip."""

    def make_piece(self) -> object:
        """Return the options under test."""
        return Recompute(blocks="*", every=2)
