"""Which parameters a backward pass reaches past the borders of their models.

The one idea: a border marks the nodes of the autograd graph by which results leave a model. What the pass
that runs now reaches from its roots without going through a marked node is used outside of every border: a
penalty on parameters, the loss of a sub-module, an auxiliary loss that a model keeps in an attribute. torch
tells hooks nothing about the roots of their pass, so they are read from the frame of the call that runs it.

Not handled: parameters that only the inside of a reentrant checkpoint outside of the model uses.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, cast

from torch.autograd import graph

if TYPE_CHECKING:
    import torch

__all__ = ["find_direct_uses", "mark_exit"]

_MARK = "colossal.border"
_LEAF = "torch::autograd::AccumulateGrad"


def mark_exit(output: torch.Tensor, inputs: Iterable[torch.Tensor]) -> None:
    """Mark a result that leaves a model.

    Args:
        output: The result, made by an operation of the border.
        inputs: What entered in the same call and needs gradients, made by operations of the border as well.
    """
    if output.grad_fn is not None:
        _notes_of(output.grad_fn)[_MARK] = [tensor.grad_fn for tensor in inputs]


def find_direct_uses() -> set[torch.Tensor] | None:
    """Return the leaves that the backward pass which runs now reaches past all borders; only from inside one.

    Reads as much of the graph as lies outside of the models.

    Returns:
        The leaves; None when the roots of the pass cannot be found.
    """
    waiting = _find_roots()
    if waiting is None:
        return None
    found: set[torch.Tensor] = set()
    seen: set[graph.Node] = set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        notes = _notes_of(node)
        if _MARK in notes:
            waiting.extend(entered for entered in notes[_MARK] if entered is not None)
            continue
        if node.name() == _LEAF:
            found.add(node.variable)  # type: ignore[attr-defined]  # torch has no type for these nodes
        waiting.extend(following for following, _ in node.next_functions if following is not None)
    return found


def _find_roots() -> list[graph.Node] | None:
    """Return where the backward pass that runs now has begun."""
    code: CodeType = graph._engine_run_backward.__code__  # noqa: SLF001 - every pass goes through it
    frames = sys._current_frames()  # noqa: SLF001 - hooks of accelerators run in threads of the engine
    own = frames.pop(threading.get_ident(), None)
    for frame in (own, *frames.values()):
        running = _find_frame(frame, code)
        if running is not None:
            return [_node_of(root) for root in running.f_locals["t_outputs"]]
    return None


def _find_frame(frame: FrameType | None, code: CodeType) -> FrameType | None:
    """Return the innermost frame that runs some code."""
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame


def _notes_of(node: graph.Node) -> dict[str, Any]:
    """Return the notes that torch keeps with a node for as long as the graph lives."""
    notes: Any = node.metadata  # torch declares the property as a method
    return cast("dict[str, Any]", notes)


def _node_of(root: torch.Tensor | graph.GradientEdge) -> graph.Node:
    """Return the node of a root."""
    return root.node if isinstance(root, graph.GradientEdge) else graph.get_gradient_edge(root).node
