"""The registry of these tests: core's pieces and this member's plugin, whatever else is installed."""

from __future__ import annotations

from colossal_core.plugins import Registry
from colossal_tensor_parallel import plugin

__all__ = ["make_registry"]


def make_registry() -> Registry:
    """Return the registry."""
    return Registry.isolated({"tensor-parallel": plugin})
