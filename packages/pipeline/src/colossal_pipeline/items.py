"""Items: the modules between which a model may be cut.

The one idea: a cut goes between modules, never through one. Items are the repeated blocks, and around them
the largest modules that contain no block; modules without parameters belong to nobody and run on every stage.
Their order is that in which the model registers them, which in nearly all models is the order of forward;
:mod:`~colossal_pipeline.tracing` finds out when it is not.
"""

from __future__ import annotations

from collections.abc import Iterator

from attrs import frozen
from torch import nn

from colossal_core.runtime.blocks import find_blocks

__all__ = ["Item", "find_items"]

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@frozen(eq=False)
class Item:
    """A module that is computed on one stage.

    Attributes:
        name: Its name in the model, of several the first.
        module: The module.
        is_block: Whether it is one of the repeated blocks.
    """

    name: str
    module: nn.Module
    is_block: bool


def find_items(model: nn.Module) -> tuple[Item, ...]:
    """Return the items of a model, in registration order; none lies inside another.

    Args:
        model: The serial model.
    """
    blocks = frozenset(find_blocks(model))
    return tuple(_search(model, "", blocks, set()))


def _search(module: nn.Module, prefix: str, blocks: frozenset[str], seen: set[nn.Module]) -> Iterator[Item]:
    """Yield the items below a module."""
    for name, child in module.named_children():
        path = f"{prefix}.{name}" if prefix else name
        if child in seen or next(child.parameters(), None) is None:
            continue
        seen.add(child)
        contains = any(block.startswith(f"{path}.") for block in blocks)
        if path not in blocks and (contains or isinstance(child, _CONTAINERS)):
            yield from _search(child, path, blocks, seen)
        else:
            yield Item(path, child, path in blocks)
