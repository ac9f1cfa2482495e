"""Running a model with other tensors in place of its own, and leaving no trace of that in it.

The one idea: a module finds its parameters and buffers in two dictionaries, so for the time of a run these
hold other tensors. Parameter objects are not touched, and what forward assigns is put back.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["Slot", "evaluating", "find_slots", "kept_attributes", "replaced_forwards", "replaced_tensors"]


Slot = tuple[dict[str, Any], str, Any]
"""A dictionary of a module, a name in it, and what is there."""


def find_slots(model: nn.Module, tensors: Container[Any]) -> list[Slot]:
    """Return where modules find some parameters and buffers.

    Args:
        model: The model.
        tensors: Which ones.
    """
    found: list[Slot] = []
    for module in model.modules():
        held: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)  # noqa: SLF001 - as torch.func
        for slots in held:
            for name, tensor in slots.items():
                if tensor is not None and tensor in tensors:
                    found.append((slots, name, tensor))
        flat = vars(module).get("_flat_weights")  # recurrent modules keep a list of their own
        if isinstance(flat, list):
            found.append((vars(module), "_flat_weights", flat))
    return found


@contextmanager
def replaced_tensors(
    model: nn.Module, replacements: Mapping[Any, torch.Tensor], *, places: Sequence[Slot] | None = None
) -> Iterator[None]:
    """Let modules see other tensors in place of some parameters and buffers.

    Args:
        model: The model.
        replacements: What is seen in place of each tensor; others stay.
        places: Where they are, if that is known.
    """
    undo = find_slots(model, replacements) if places is None else places
    try:
        for slots, name, before in undo:
            is_list = isinstance(before, list)
            slots[name] = [replacements.get(one, one) for one in before] if is_list else replacements[before]
        yield
    finally:
        for slots, name, before in undo:
            slots[name] = before


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put all modules into evaluation mode; each goes back to its own mode afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def kept_attributes(model: nn.Module) -> Iterator[None]:
    """Put back what is assigned to modules meanwhile; what is written into their tensors stays written."""
    slots = [
        found
        for module in model.modules()
        for found in (vars(module), module._buffers)  # noqa: SLF001 - as above
    ]
    before = [dict(found) for found in slots]
    try:
        yield
    finally:
        for found, kept in zip(slots, before, strict=True):
            for name in found.keys() - kept.keys():
                del found[name]
            found.update(kept)


@contextmanager
def replaced_forwards(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Let modules run other functions in place of their ``forward``, inside of their hooks.

    Args:
        forwards: What each module runs.
    """
    before = {module: vars(module).get("forward") for module in forwards}
    for module, forward in forwards.items():
        vars(module)["forward"] = forward
    try:
        yield
    finally:
        for module, own in before.items():
            del vars(module)["forward"]
            if own is not None:
                vars(module)["forward"] = own
