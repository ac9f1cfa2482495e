"""What flows between the items of a model: the outcome of one run without values.

The one idea: the calls of items, in the order of the program, and for each the outputs of earlier calls that
reach it, through whatever user code lies between. All ranks find the same flow by themselves, so
nobody has to tell anybody what will be sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from attrs import field, frozen

from colossal_core.runtime.trees import map_leaves

__all__ = ["Call", "Flow", "LeafKey", "LeafSpec", "Slot", "list_leaves"]


@frozen(order=True)
class LeafKey:
    """One tensor that a call returns.

    Attributes:
        call: Number of the call in the flow.
        index: Number of the tensor among those that the call returns.
    """

    call: int
    index: int


@frozen
class LeafSpec:
    """The form of such a tensor.

    Attributes:
        shape: Its shape.
        dtype: Its element type.
        requires_grad: Whether it has a gradient function.
        is_overwritten: Whether code after the call changes it in place, so that what is sent is a copy.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    is_overwritten: bool


@frozen
class Slot:
    """The place of a tensor in what a call returns, or of an argument that it passes through.

    Attributes:
        index: Number of the tensor, or of the argument among all leaves of the arguments.
        is_argument: Whether it is an argument.
    """

    index: int
    is_argument: bool = False


@frozen(eq=False)
class Call:
    """One call of an item.

    Attributes:
        item: Name of the item.
        number: How many calls of the item came before.
        template: What it returns, with a :class:`Slot` in place of each tensor.
        leaves: The tensors that it returns.
        needs: Outputs of earlier calls that its arguments are made of.
        parameters: Names of parameters that its arguments are made of, outside all items.
        passes_arguments: Whether it returns an argument as it is.
        only_leaf: The form of the one tensor that it returns and nothing else; None where it does not.
    """

    item: str
    number: int
    template: Any
    leaves: tuple[LeafSpec, ...]
    needs: frozenset[LeafKey]
    parameters: frozenset[str]
    passes_arguments: bool = field(init=False)
    only_leaf: LeafSpec | None = field(init=False)

    def __attrs_post_init__(self) -> None:
        """Look up what is asked for with every micro-batch."""
        slots = (leaf for leaf in list_leaves(self.template) if isinstance(leaf, Slot))
        object.__setattr__(self, "passes_arguments", any(slot.is_argument for slot in slots))
        is_plain = isinstance(self.template, Slot) and not self.passes_arguments
        object.__setattr__(self, "only_leaf", self.leaves[0] if is_plain else None)


@frozen(eq=False)
class Flow:
    """All calls of one forward, and of the criterion behind it.

    Attributes:
        calls: In the order of the program.
        needs: Outputs of calls that the loss is made of; with outputs, also what they are made of.
        parameters: Names of parameters that it is made of, outside all items.
        with_gradient: Tensors to which the loss sends a gradient back.
        template: What the model returns, with a :class:`Slot` in place of each tensor.
        outputs: Forms of these tensors.
        flops: For each item, what its products cost in forward, in FLOP.
        numbers: Number of each call, by its item and how many calls of that came before.
    """

    calls: tuple[Call, ...]
    needs: frozenset[LeafKey]
    parameters: frozenset[str]
    with_gradient: frozenset[LeafKey]
    template: Any
    outputs: tuple[LeafSpec, ...]
    flops: Mapping[str, float]
    numbers: Mapping[tuple[str, int], int] = field(init=False)

    def __attrs_post_init__(self) -> None:
        """Look up what is asked for with every micro-batch."""
        numbers = {(call.item, call.number): number for number, call in enumerate(self.calls)}
        object.__setattr__(self, "numbers", numbers)

    def spec(self, key: LeafKey) -> LeafSpec:
        """Return the form of a tensor."""
        return self.calls[key.call].leaves[key.index]

    def describe(self, key: LeafKey) -> str:
        """Return how a person would call a tensor."""
        return f"output {key.index} of {self.calls[key.call].item!r}"


def list_leaves(tree: Any) -> list[Any]:
    """Return the leaves of arguments or outputs, containers of any kind opened, in a fixed order."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    found: list[Any] = []

    def visit(_: str, leaf: Any) -> Any:
        found.append(leaf)
        return leaf

    map_leaves(visit, tree)
    return found
