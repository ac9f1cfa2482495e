"""The contract of strategies, at two ranks and at three."""

from __future__ import annotations

from colossal_tensor_parallel import TensorParallel
from colossal_testkit.contracts import StrategyContract

from .registries import make_registry


class TestTwoRanks(StrategyContract):
    """Two ranks share each layer, alone and along with two data ranks."""

    registry = staticmethod(make_registry)

    def make_piece(self) -> TensorParallel:
        """Return the options."""
        return TensorParallel(degree=2)


class TestThreeRanks(StrategyContract):
    """Three ranks share each layer, which few of the sizes divide by."""

    registry = staticmethod(make_registry)

    def make_piece(self) -> TensorParallel:
        """Return the options."""
        return TensorParallel(degree=3)


class TestDividedSequences(StrategyContract):
    """Three ranks also share what lies between the layers."""

    registry = staticmethod(make_registry)
    refusals = dict.fromkeys(("branches", "convnet", "lstm"), "cannot be divided along the sequence")

    def make_piece(self) -> TensorParallel:
        """Return the options."""
        return TensorParallel(degree=3, sequence=True)
