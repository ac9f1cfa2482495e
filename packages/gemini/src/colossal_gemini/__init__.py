"""Gemini for Colossal: train what does not fit, within a budget of memory that is kept.

Importing this costs nothing: torch comes with the first use.
"""

from __future__ import annotations

from colossal_gemini.options import Gemini

__all__ = ["Gemini"]
