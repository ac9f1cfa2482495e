"""Names of our own pieces that come in other distributions, for the answer to a name that is not installed.

This is a list of hints and nothing more: what exists is what plugins register, and core decides nothing by
these names.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["DISTRIBUTION_BY_AXIS", "DISTRIBUTION_BY_NAME"]

DISTRIBUTION_BY_NAME: Mapping[str, str] = {
    "gemini": "colossal-gemini",
    "kernels": "colossal-kernels",
    "pipeline": "colossal-pipeline",
    "sequence-parallel": "colossal-sequence-parallel",
    "tensor-parallel": "colossal-tensor-parallel",
    "zero": "colossal-zero",
    "zero1": "colossal-zero",
    "zero2": "colossal-zero",
    "zero3": "colossal-zero",
}
"""Pieces, commands and plugins of ours, and what to install for them."""

DISTRIBUTION_BY_AXIS: Mapping[str, str] = {
    "pipeline": "colossal-pipeline",
    "replica": "colossal-zero",
    "sequence": "colossal-sequence-parallel",
    "tensor": "colossal-tensor-parallel",
}
"""Mesh axes whose piece comes in a distribution of ours."""
