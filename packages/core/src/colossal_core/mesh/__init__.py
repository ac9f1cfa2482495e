"""Axes, coordinates and groups as plain integers; the process groups themselves are made in ``runtime``."""

from __future__ import annotations

from colossal_core.mesh.axes import BASE_AXES, DATA_AXIS, GradientRule
from colossal_core.mesh.layout import Axis, Coordinates, GroupSpec, MeshLayout

__all__ = ["BASE_AXES", "DATA_AXIS", "Axis", "Coordinates", "GradientRule", "GroupSpec", "MeshLayout"]
