"""A first look at a model before there is any batch: in which order it calls its modules, and what they cost.

The one idea: inputs are guessed from what the model shows, and since only shapes are computed, a wrong guess
costs milliseconds and an error that nobody sees. Where no guess fits, the order of registration and the sizes
of weights have to do; a first batch that tells otherwise is then refused with what to do.
"""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from attrs import frozen
from torch import nn
from torch.utils import _pytree as pytree

from colossal_core.runtime.batches import Call
from colossal_pipeline.flow import Flow
from colossal_pipeline.items import Item, find_items
from colossal_pipeline.tracing import trace

__all__ = ["Look", "look_at"]

ROWS, LENGTH = 2, 4
SIDES = (8, 16, 28, 32, 64, 96, 224)
"""Sides of images that are tried, small ones first."""


@frozen(eq=False)
class Look:
    """What is known of a model before the first batch.

    Attributes:
        items: Its items in the order of forward, as far as it is known.
        flow: What flows between them for a guessed input, or None.
    """

    items: tuple[Item, ...]
    flow: Flow | None


def look_at(model: nn.Module) -> Look:
    """Look at a model; nothing of it changes.

    Args:
        model: The serial model; may be on the ``meta`` device.
    """
    items = find_items(model)
    flow = _try(model, items)
    return Look(items if flow is None else _sort(items, flow), flow)


def _try(model: nn.Module, items: Sequence[Item]) -> Flow | None:
    """Return the flow of the first guess that fits."""
    parameters = {
        name: (tuple(parameter.shape), parameter.dtype)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    for call in _guess(model):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return trace(model, items, call, _add_up, parameters, trains=False, wants_outputs=False)
        except Exception:  # noqa: BLE001, S112 - whatever user code raises for a wrong guess
            continue
    return None


def _add_up(outputs: Any, _: Any) -> torch.Tensor:
    """Return a scalar that depends on all outputs."""
    leaves = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
    return torch.stack([leaf.double().sum() for leaf in leaves]).sum()


def _sort(items: Sequence[Item], flow: Flow) -> tuple[Item, ...]:
    """Return items in the order of their first calls; those without stay behind their neighbours."""
    first: dict[str, int] = {}
    for number, call in enumerate(flow.calls):
        first.setdefault(call.item, number)
    places: dict[str, float] = {}
    known = -1.0
    for item in items:
        known = places[item.name] = float(first.get(item.name, known))
    return tuple(sorted(items, key=lambda item: places[item.name]))


# --- guesses ------------------------------------------------------------------------------------------------


def _guess(model: nn.Module) -> Iterator[Call]:
    """Yield calls that the model may accept."""
    yield from _guess_named(model)
    required = [
        parameter
        for parameter in inspect.signature(model.forward).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind in {parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD}
    ]
    if 1 <= len(required) <= 2:
        for args in itertools.product(list(_guess_tensors(model)), repeat=len(required)):
            yield Call(args, {}, None)


def _guess_named(model: nn.Module) -> Iterator[Call]:
    """Yield calls of models in the manner of transformers: they tell the name of their main input."""
    name = getattr(model, "main_input_name", None)
    if not isinstance(name, str):
        return
    config = getattr(model, "config", None)
    extra: dict[str, Any] = {}
    if getattr(config, "is_encoder_decoder", False):
        extra["decoder_input_ids"] = torch.zeros(ROWS, LENGTH, dtype=torch.long)
    for tensor in _guess_tensors(model):
        yield Call((), {name: tensor, **extra}, None)


def _guess_tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield tensors that fit the first module of the model that takes any."""
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            yield torch.zeros(ROWS, LENGTH, dtype=torch.long)
            return
        if isinstance(module, nn.Linear):
            yield torch.zeros(ROWS, module.in_features, dtype=dtype)
            yield torch.zeros(ROWS, LENGTH, module.in_features, dtype=dtype)
            return
        if isinstance(module, nn.RNNBase):
            yield torch.zeros(ROWS, LENGTH, module.input_size, dtype=dtype)
            return
        if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            dims = len(module.kernel_size)
            own = getattr(getattr(model, "config", None), "image_size", None)
            for side in (own, *SIDES) if isinstance(own, int) else SIDES:
                yield torch.zeros(ROWS, module.in_channels, *(side,) * dims, dtype=dtype)
            return
