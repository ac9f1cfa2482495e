"""Finding the repeated blocks of a model: what is gathered, released, recomputed or staged together.

The one idea: models repeat one structure in a list, so the outermost ``ModuleList`` or ``Sequential`` with
at least two children of one class, each with modules of its own, holds the blocks. What is left is the root
unit.
"""

from __future__ import annotations

from collections import Counter

from torch import nn

__all__ = ["find_blocks"]


def find_blocks(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the repeated blocks of a model, in registration order; none inside another."""
    found: list[str] = []
    _search(model, "", found)
    return tuple(found)


def _search(module: nn.Module, prefix: str, found: list[str]) -> None:
    """Add the blocks below ``module`` to ``found``, outermost first."""
    children = [
        (name, child) for name, child in module.named_children() if next(child.parameters(), None) is not None
    ]
    repeated: set[type[nn.Module]] = set()
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        kinds = Counter(type(child) for _, child in children if next(child.children(), None) is not None)
        repeated = {kind for kind, count in kinds.items() if count > 1}
    for name, child in children:
        path = f"{prefix}.{name}" if prefix else name
        if type(child) in repeated:
            found.append(path)
        else:
            _search(child, path, found)
