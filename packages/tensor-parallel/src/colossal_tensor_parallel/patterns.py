"""Roles by patterns of names: of the user, of policies of plugins, and of models of transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from colossal_core.errors import UsageError
from colossal_core.plugins.records import ShardingPolicySpec
from colossal_tensor_parallel.roles import Role

if TYPE_CHECKING:
    from torch import nn

    from colossal_core.plugins import Registered
    from colossal_tensor_parallel.groups import Layer

__all__ = ["match_policies", "match_roles", "read_library_plan"]

SHOWN_NAMES = 6
"""Names listed in an error before the rest is counted."""


def match_roles(
    patterns: Mapping[str, str], layers: Mapping[str, Layer], model: nn.Module
) -> dict[str, Role]:
    """Return the role of each layer that a pattern matches.

    Args:
        patterns: Texts of roles by pattern.
        layers: What can be cut, by name.
        model: What else there is, for errors.

    Raises:
        UsageError: A pattern matches no layer.
    """
    found: dict[str, Role] = {}
    for pattern, text in patterns.items():
        matching = [name for name in layers if fnmatchcase(name, pattern)]
        if not matching:
            others = [
                f"{name!r}, a {type(module).__name__}"
                for name, module in model.named_modules()
                if fnmatchcase(name, pattern)
            ]
            instead = f", but {others[0]}, which cannot be cut" if others else ""
            raise UsageError(
                f"the pattern {pattern!r} of TensorParallel(plan=...) matches none of {len(layers)} layers"
                f"{instead}",
                hint=f"name layers like {_listed(list(layers))}",
            )
        role = Role.parse(text, f"plan[{pattern!r}]")
        found.update(dict.fromkeys(matching, role))
    return found


def match_policies(
    model: nn.Module, layers: Mapping[str, Layer], policies: Sequence[Registered]
) -> dict[str, Role]:
    """Return the role of each layer that a policy for its model, or for a module around it, speaks of.

    Args:
        model: The model.
        layers: Its layers by name.
        policies: Records of sharding policies.

    Raises:
        UsageError: A pattern of a policy matches no layer, or policies say different things about one.
    """
    found: dict[str, Role] = {}
    for name, module in model.named_modules() if policies else ():
        paths = {f"{kind.__module__}:{kind.__qualname__}" for kind in type(module).__mro__}
        for entry in policies:
            record = entry.record
            if not isinstance(record, ShardingPolicySpec) or paths.isdisjoint(record.models):
                continue
            source = f"the policy {entry.qualified_name!r}"
            for pattern, text in record.plan.items():
                role = Role.parse(text, f"plan[{pattern!r}] of {source}", source)
                inside = f"{name}.{pattern}" if name else pattern
                matching = [layer for layer in layers if fnmatchcase(layer, inside)]
                if not matching:
                    raise UsageError(
                        f"the pattern {pattern!r} of {source} ({entry.provider}) matches no layer of this "
                        f"{type(module).__name__}",
                        hint=f"colossal plugins disable {entry.plugin}, or ask its author",
                    )
                for layer in matching:
                    other = found.setdefault(layer, role)
                    if other.source != source and other != role:
                        raise UsageError(
                            f"{other.source} wants {layer!r} to be {other.cut!r}, and {source} {role.cut!r}",
                            hint=f"say it in TensorParallel(plan={{{layer!r}: ...}}) and disable one of them",
                        )
                    found[layer] = role
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
