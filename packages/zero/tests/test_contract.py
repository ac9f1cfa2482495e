"""The contract of memory managers, for each stage."""

from __future__ import annotations

from colossal_testkit.contracts import MemoryManagerContract
from colossal_zero import Zero


class TestZero1(MemoryManagerContract):
    """Optimizer state is divided."""

    def make_piece(self) -> Zero:
        """Return the options."""
        return Zero(stage=1)

    def words_per_step(self, num_elements: int, num_ranks: int) -> float:
        """Reduce-scatter of gradients, gather of values."""
        return 2 * (num_ranks - 1) / num_ranks * num_elements

    def live_bytes(self, num_elements: int, num_ranks: int) -> float:
        """Values and gradients whole, two moments divided, all in fp32."""
        return 4 * num_elements * (2 + 2 / num_ranks)


class TestZero2(MemoryManagerContract):
    """Gradients are divided, too."""

    def make_piece(self) -> Zero:
        """Return the options."""
        return Zero(stage=2)

    def words_per_step(self, num_elements: int, num_ranks: int) -> float:
        """As in stage 1."""
        return 2 * (num_ranks - 1) / num_ranks * num_elements

    def live_bytes(self, num_elements: int, num_ranks: int) -> float:
        """Values whole; gradients and two moments divided, all in fp32."""
        return 4 * num_elements * (1 + 3 / num_ranks)


class TestZero3(MemoryManagerContract):
    """Parameters are divided, too."""

    gathers_in_forward = True

    def make_piece(self) -> Zero:
        """Return the options."""
        return Zero(stage=3)

    def words_per_step(self, num_elements: int, num_ranks: int) -> float:
        """Reduce-scatter of gradients, gathers of values for forward and for backward."""
        return 3 * (num_ranks - 1) / num_ranks * num_elements

    def live_bytes(self, num_elements: int, num_ranks: int) -> float:
        """Values, gradients and two moments divided, all in fp32."""
        return 4 * num_elements * 4 / num_ranks
