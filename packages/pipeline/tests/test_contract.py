"""The contract of strategies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from colossal_core.plugins import Registry
from colossal_pipeline import Pipeline, plugin
from colossal_testkit.contracts import StrategyContract


def make_registry() -> Registry:
    """Return a registry with the pieces of this package."""
    return Registry.isolated({"pipeline": plugin})


class TestPipeline(StrategyContract):
    """Three stages. Among the reference models one chooses branches by values, one has two modules only."""

    registry = make_registry
    refusals: ClassVar[Mapping[str, str]] = {"lstm": "2 modules between which it can be cut"}

    def make_piece(self) -> Pipeline:
        """Return the options."""
        return Pipeline(degree=3, microbatches=4, flow="values")
