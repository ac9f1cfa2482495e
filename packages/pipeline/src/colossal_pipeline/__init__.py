"""Pipeline parallelism for Colossal: stages of a model on different ranks.

Importing this costs nothing: torch comes with the first use.
"""

from __future__ import annotations

from colossal_pipeline.options import Pipeline

__all__ = ["Pipeline"]
