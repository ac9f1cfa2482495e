"""Backward in two halves: gradients of what came in first, gradients of weights whenever there is time.

The one idea: a weight hangs on the path from the loss to the inputs by a node of autograd's graph, such as
that of a matrix product. The first half runs along the path and keeps what reaches these nodes; the second
runs each node again, for its weight only. Autograd computes of a node just what is asked for, so nothing is
computed twice, whatever the operation; and gradients arrive at weights as in any backward, with all hooks.

Only weights of two dims or more wait for the second half: biases and scales cost little. So do weights
that are used several times in a stage, whose nodes lie behind each other.

# Note [What waits between the halves]
A node that runs again needs what it saved and what reached it: the input of a product and the gradient of its
output. All else is let go of as soon as the first half has passed, though nodes live on, since those above
hold those below. So a micro-batch holds no more between the halves than before the first one, wherever
products' outputs are saved by what follows them, as in front of activations and attention.

Source: Qi et al., *Zero Bubble Pipeline Parallelism*, 2024 (arXiv 2401.10241).
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, final

import torch
from attrs import define, field, frozen
from torch.autograd.graph import GradientEdge

from colossal_core.errors import ColossalError
from colossal_pipeline.stages import Entry

__all__ = ["SplitBackward"]

_Node = Any
"""A node of autograd's graph."""


@final
@define(eq=False)
class _Seam:
    """A node on the path from which weights hang.

    Attributes:
        node: The node.
        weights: Leaves that hang from it.
        gradients: What reached it in the first half.
    """

    node: _Node
    weights: list[torch.Tensor]
    gradients: Sequence[torch.Tensor | None] = ()


@frozen(eq=False)
class _Reach:
    """What lies below the nodes of a graph.

    Attributes:
        order: All nodes, children first.
        inputs: Nodes from which an entry of the stage is reached.
        leaves: For each node, the leaves below it that are not reached through ``inputs`` nodes.
    """

    order: list[_Node]
    inputs: set[_Node]
    leaves: Mapping[_Node, frozenset[torch.Tensor]]


@final
@define(eq=False)
class SplitBackward:
    """Backward of one stage for one micro-batch, in two calls.

    Attributes:
        roots: Where gradients enter the graph.
        gradients: The gradients.
        anchor: The leaf below all entries.
    """

    roots: Sequence[GradientEdge]
    gradients: Sequence[torch.Tensor]
    anchor: torch.Tensor
    _seams: list[_Seam] = field(factory=list, init=False)
    _late: list[tuple[GradientEdge, torch.Tensor]] = field(factory=list, init=False)

    def inputs(self) -> None:
        """Bring gradients to the entries of the stage, and to what does not wait."""
        reach = _explore([edge.node for edge in self.roots])
        path = [
            (edge, gradient)
            for edge, gradient in zip(self.roots, self.gradients, strict=True)
            if edge.node in reach.inputs
        ]
        self._late = [
            (edge, gradient)
            for edge, gradient in zip(self.roots, self.gradients, strict=True)
            if edge.node not in reach.inputs
        ]
        self.roots, self.gradients = (), ()
        if not path:
            return
        at_once = self._find_seams(reach)
        again = {seam.node for seam in self._seams}
        handles = [seam.node.register_prehook(_keep_in(seam)) for seam in self._seams]
        handles += [
            node.register_hook(functools.partial(_let_go, node))
            for node in reach.inputs
            if node not in again and _slots_of(node)
        ]
        try:
            torch.autograd.backward(
                [edge for edge, _ in path],
                [gradient for _, gradient in path],
                retain_graph=True,
                inputs=[self.anchor, *at_once],
            )
        finally:
            for handle in handles:
                handle.remove()

    def weights(self) -> None:
        """Bring gradients to the weights that waited, and let go of the graph."""
        for seam in self._seams:
            pairs = [
                (GradientEdge(seam.node, number), gradient)
                for number, gradient in enumerate(seam.gradients)
                if gradient is not None
            ]
            if pairs:
                torch.autograd.backward(
                    [edge for edge, _ in pairs], [gradient for _, gradient in pairs], inputs=seam.weights
                )
        if self._late:
            torch.autograd.backward(
                [edge for edge, _ in self._late], [gradient for _, gradient in self._late]
            )
        self._seams, self._late = [], []

    def _find_seams(self, reach: _Reach) -> list[torch.Tensor]:
        """Find the nodes that run again, and return the leaves that do not wait for that."""
        hanging: dict[_Node, set[torch.Tensor]] = {}
        for node in reach.order:
            if node not in reach.inputs:
                continue
            below = [
                reach.leaves[child]
                for child, _ in node.next_functions
                if child is not None and child not in reach.inputs
            ]
            found = set[torch.Tensor]().union(*below)
            if found:
                hanging[node] = found
        counts = Counter(leaf for leaves in hanging.values() for leaf in leaves)
        # What also hangs from a root beside the path gets that part in the second half, by itself.
        at_once = [leaf for leaf, count in counts.items() if count > 1 or leaf.dim() < 2]
        for node, leaves in hanging.items():
            late = [leaf for leaf in leaves if counts[leaf] == 1 and leaf.dim() >= 2]
            if late:
                self._seams.append(_Seam(node, late))
        return at_once


def _slots_of(node: _Node) -> tuple[str, ...]:
    """Return the names under which a node shows what it saved."""
    kind: Any = type(node)
    return _slots_of_kind(kind)


@functools.cache
def _slots_of_kind(kind: Any) -> tuple[str, ...]:
    """Return the names under which nodes of a kind show what they saved."""
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def _let_go(node: _Node, *_: Any) -> None:
    """Free what a node has saved, which never runs again; see Note [What waits between the halves]."""
    for name in _slots_of(node):
        slot = getattr(node, name)
        for saved in slot if isinstance(slot, tuple | list) else (slot,):
            # Refused where nothing was saved, or where hooks of somebody else keep it elsewhere already.
            with contextlib.suppress(RuntimeError):
                saved.register_hooks(_forget, _miss)


def _forget(_: torch.Tensor) -> None:
    """Keep nothing of a saved tensor."""


def _miss(_: None) -> NoReturn:
    """Refuse to bring back what is gone; only a second backward over the same path would ask."""
    raise ColossalError("a stage runs backward over a path whose tensors are freed", hint="report this")


def _keep_in(seam: _Seam) -> Any:
    """Return a hook that keeps the gradients that reach a node."""

    def keep(gradients: tuple[torch.Tensor | None, ...]) -> None:
        seam.gradients = gradients

    return keep


def _explore(roots: Sequence[_Node]) -> _Reach:
    """Walk the graph below some nodes."""
    order: list[_Node] = []
    seen: set[_Node] = set()
    stack = [(root, False) for root in roots]
    while stack:
        node, is_done = stack.pop()
        if is_done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend((child, False) for child, _ in node.next_functions if child is not None)
    inputs: set[_Node] = set()
    leaves: dict[_Node, frozenset[torch.Tensor]] = {}
    for node in order:
        children = [child for child, _ in node.next_functions if child is not None]
        is_entry = isinstance(getattr(node, "entry", None), Entry)
        if is_entry or any(child in inputs for child in children):
            inputs.add(node)
        leaf = getattr(node, "variable", None)
        below = frozenset[torch.Tensor]().union(*(leaves[c] for c in children if c not in inputs))
        leaves[node] = below if leaf is None else below | {leaf}
    return _Reach(order, inputs, leaves)
