"""Batches and outputs as trees: containers of tensors that keep their types.

The one idea: torch's pytree takes what it does not know for a leaf, but batches come in whatever container a
collate function makes: dicts that carry attributes, named tuples, dataclasses. So containers are walked by
what they can do, and rebuilt only where something below has changed.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils import _pytree as pytree

from colossal_core.errors import UsageError

__all__ = ["cut_rows", "edited", "is_list_of_values", "map_leaves", "move_to"]

_LEAVES = (torch.Tensor, str, bytes, int, float)

Visit = Callable[[str, Any], Any]
"""Takes the path of a leaf, such as ``['labels'][0]``, and the leaf; returns what takes its place."""


@runtime_checkable
class _Movable(Protocol):
    """A batch object that moves itself: a PackedSequence, a BatchEncoding, a graph."""

    def to(self, device: torch.device) -> Any:
        """Return it on the device."""


def map_leaves(
    visit: Visit, tree: Any, *, is_leaf: Callable[[Any], bool] | None = None, path: str = ""
) -> Any:
    """Replace every leaf of a tree, in a fixed order.

    Containers are mappings (in their order), lists, tuples, named tuples and dataclass instances; all else is
    a leaf.

    Args:
        visit: Called for each leaf.
        tree: The tree; not changed.
        is_leaf: Tells which further nodes are leaves.
        path: Where the tree stands.

    Returns:
        A tree of the same types, or the same object when no leaf was replaced by another object.
    """
    if isinstance(tree, _LEAVES) or tree is None or (is_leaf is not None and is_leaf(tree)):
        return visit(path, tree)
    items: list[tuple[Any, Any]]
    if isinstance(tree, (list, tuple)):
        items = list(enumerate(tree))
    elif isinstance(tree, Mapping):
        items = [(key, value) for key, value in tree.items()]
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        items = [(field.name, getattr(tree, field.name)) for field in dataclasses.fields(tree)]
    else:
        return visit(path, tree)
    mapped = [map_leaves(visit, value, is_leaf=is_leaf, path=f"{path}[{key!r}]") for key, value in items]
    for new, (_, old) in zip(mapped, items, strict=True):
        if new is not old:
            return _rebuild(tree, {key: one for one, (key, _) in zip(mapped, items, strict=True)})
    return tree


def move_to(tree: Any, device: torch.device, *, non_blocking: bool = False) -> Any:
    """Return a batch whose tensors are on a device.

    Args:
        tree: The batch. An object with a method ``to`` moves itself.
        device: Where to.
        non_blocking: Whether copies from pinned memory may go on while this returns.
    """

    def move(_: str, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.to(device, non_blocking=non_blocking)
        return leaf.to(device) if isinstance(leaf, _Movable) else leaf

    return map_leaves(move, tree, is_leaf=lambda node: isinstance(node, _Movable))


def is_list_of_values(node: Any) -> bool:
    """Whether a node is a list of numbers, texts or None, or of such lists: one value for each sample."""
    return isinstance(node, list) and all(
        value is None or isinstance(value, bool | int | float | str) or is_list_of_values(value)
        for value in node
    )


def cut_rows(tree: Any, pick: Callable[[int], slice]) -> tuple[Any, int]:
    """Return some rows of a batch that was collated whole.

    Tensors are cut in dim 0, in which they must agree; 0-d tensors stay. Lists of values that are as long are
    cut as well.

    Args:
        tree: The batch.
        pick: Given the number of rows, tells which to take.

    Returns:
        The cut batch, and the rows of the whole one.

    Raises:
        UsageError: No tensor has rows, or tensors disagree about them.
    """
    sizes: dict[int, str] = {}

    def measure(path: str, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0:
            sizes.setdefault(leaf.shape[0], path or "the batch")
        return leaf

    map_leaves(measure, tree)
    if len(sizes) != 1:
        found = ", ".join(f"{size} in {path}" for size, path in sizes.items()) or "none"
        raise UsageError(
            "a batch of a loader with batch_size=None cannot be divided: rows are dim 0, "
            f"and there are {found}",
            hint="give the loader samples and a batch_size, or do not boost it and take this rank's share",
        )
    (rows,) = sizes
    wanted = pick(rows)

    def cut(_: str, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf[wanted] if leaf.dim() > 0 else leaf
        return leaf[wanted] if is_list_of_values(leaf) and len(leaf) == rows else leaf

    return map_leaves(cut, tree, is_leaf=is_list_of_values), rows


def _rebuild(tree: Any, items: dict[Any, Any]) -> Any:
    """Return a container like another one, with other items."""
    kind: Any = type(tree)
    if isinstance(tree, MutableMapping):
        clone = copy.copy(tree)  # keeps attributes that a subclass may carry
        for key, value in items.items():  # outputs of some libraries refuse update()
            clone[key] = value
        return clone
    if isinstance(tree, Mapping):
        return kind(items)
    if isinstance(tree, list):
        copied = copy.copy(tree)
        copied[:] = items.values()
        return copied
    if isinstance(tree, tuple):
        return kind(*items.values()) if pytree.is_namedtuple_instance(tree) else kind(items.values())
    clone = copy.copy(tree)  # replace() would leave out what __init__ does not take
    for name, value in items.items():
        object.__setattr__(clone, name, value)  # also where the class is frozen
    return clone


@contextmanager
def edited(tensors: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """Show tensors by name; whatever the user puts in the place of one is copied into it at the end.

    Raises:
        UsageError: It has another shape, or a name that there is not.
    """
    shown = dict(tensors)
    yield shown
    for name, value in shown.items():
        kept = tensors.get(name)
        if value is kept:
            continue
        if kept is None or kept.shape != value.shape:
            expected = "no tensor of that name" if kept is None else f"one of shape {tuple(kept.shape)}"
            raise UsageError(
                f"{name!r} was assigned a tensor of shape {tuple(value.shape)}, where there is {expected}",
                hint="write into what the context shows, or assign tensors of the same shapes",
            )
        with torch.no_grad():
            kept.copy_(value)
