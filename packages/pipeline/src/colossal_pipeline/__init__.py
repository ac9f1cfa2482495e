"""Pipeline parallelism for Colossal: stages of a model on different ranks.

Importing this costs nothing: torch comes with the first use.
"""

from __future__ import annotations

__all__: list[str] = []
