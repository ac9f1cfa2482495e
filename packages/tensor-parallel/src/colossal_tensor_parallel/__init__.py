"""Tensor parallelism for Colossal: cut the layers of any transformer without touching its code.

Importing this costs nothing: torch comes with the first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from colossal_tensor_parallel.options import TensorParallel

if TYPE_CHECKING:
    from colossal_tensor_parallel.explaining import explain

__all__ = ["TensorParallel", "explain"]

_LAZY = {"explain": "colossal_tensor_parallel.explaining"}


def __getattr__(name: str) -> Any:
    """Import what needs torch on its first use."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)
