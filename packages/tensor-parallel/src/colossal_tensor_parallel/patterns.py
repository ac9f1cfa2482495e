"""Roles by patterns of names: those of the user, and those that models of the transformers library carry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from colossal_core.errors import UsageError
from colossal_tensor_parallel.roles import Role

if TYPE_CHECKING:
    from torch import nn

    from colossal_tensor_parallel.groups import Layer

__all__ = ["match_roles", "read_library_plan"]

SHOWN_NAMES = 6
"""Names listed in an error before the rest is counted."""


def match_roles(patterns: Mapping[str, str], layers: Mapping[str, Layer]) -> dict[str, Role]:
    """Return the role of each layer that a pattern matches.

    Raises:
        UsageError: A pattern matches no layer.
    """
    found: dict[str, Role] = {}
    for pattern, text in patterns.items():
        matching = [name for name in layers if fnmatchcase(name, pattern)]
        if not matching:
            raise UsageError(
                f"the pattern {pattern!r} of TensorParallel(plan=...) matches none of {len(layers)} layers",
                hint=f"name layers like {_listed(list(layers))}",
            )
        role = Role.parse(text, f"plan[{pattern!r}]")
        found.update(dict.fromkeys(matching, role))
    return found


def _listed(names: Sequence[str]) -> str:
    """Return some names and the number of the others."""
    shown = ", ".join(map(repr, names[:SHOWN_NAMES]))
    return shown + (f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else "")


def read_library_plan(model: nn.Module, layers: Mapping[str, Layer]) -> dict[str, str]:
    """Return what the plan that a model of the transformers library carries says about layers."""
    plan = getattr(model, "tp_plan", None)
    if not isinstance(plan, Mapping):
        return {}
    return {
        name: str(style)
        for pattern, style in plan.items()
        for name in layers
        if fnmatchcase(name, str(pattern)) or fnmatchcase(name, f"*.{pattern}")
    }
