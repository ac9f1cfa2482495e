"""Names of the mesh axes that core knows, and their order.

The one idea: an axis is a direction in which ranks differ, and axes are ordered from the outermost (slowest
links) to the innermost (fastest links). Core itself only gives meaning to ``data``; every other axis gets its
meaning from the record of the piece that owns it (:class:`colossal_core.plugins.AxisSpec`).
"""

from __future__ import annotations

from typing import Literal

__all__ = ["BASE_AXES", "DATA_AXIS", "GradientRule"]

BASE_AXES: tuple[str, ...] = ("pipeline", "replica", "data", "sequence", "tensor")
"""Axis names in their order, outermost first. A record can place further axes among them."""

DATA_AXIS = "data"
"""The axis along which ranks hold different samples; the only one that exists without any strategy."""

GradientRule = Literal["average", "sum", "none"]
"""What happens to gradients along an axis: averaged, summed, or left alone (the parameters differ there)."""
