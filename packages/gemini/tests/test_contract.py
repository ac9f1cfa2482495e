"""The contract of memory managers."""

from __future__ import annotations

from colossal_gemini import Gemini
from colossal_testkit.contracts import MemoryManagerContract


class TestGemini(MemoryManagerContract):
    """Everything lives in host memory beside an arena that stands in for a device."""

    gathers_in_forward = True

    def make_piece(self) -> Gemini:
        """Return the options."""
        return Gemini(device_budget="64MiB")

    def words_per_step(self, num_elements: int, num_ranks: int) -> float:
        """Reduce-scatter of gradients, one gather of values, 18 numbers by which ranks agree on a plan."""
        return 2 * (num_ranks - 1) / num_ranks * (num_elements + 18)

    def live_bytes(self, num_elements: int, num_ranks: int) -> float:
        """Values, gradients and two moments divided, all in fp32."""
        return 4 * num_elements * 4 / num_ranks
