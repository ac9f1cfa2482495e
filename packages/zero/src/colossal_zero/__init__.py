"""ZeRO for Colossal: optimizer state, gradients and parameters divided among data ranks.

Importing this costs nothing: torch comes with the first use.
"""

from __future__ import annotations

from colossal_zero.options import Zero

__all__ = ["Zero"]
