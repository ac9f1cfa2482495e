"""Bound the outputs of a model smoothly. Importing this costs nothing: torch comes with the first use."""

from __future__ import annotations

from colossal_softcap.options import SoftCap

__all__ = ["SoftCap"]
