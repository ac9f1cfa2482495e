"""Sorting what ``boost`` was given: models, optimizers, schedulers, the criterion, and what is refused.

The one idea: class and order decide, keywords name, None passes through, and what comes back has the order
of what went in.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from attrs import define, field
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from colossal_core.errors import CapabilityError, UsageError
from colossal_core.runtime.optimizer import BoostedOptimizer
from colossal_core.runtime.scheduler import check_scheduler
from colossal_core.runtime.touch import is_watched

__all__ = ["Objects", "check_model", "mark_boosted", "sort_objects"]

_BOOSTED: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Modules of boosted models, until release."""


@define
class Objects:
    """What ``boost`` was given, by kind.

    Attributes:
        order: Everything in the order given, keywords last.
        models: Models by name.
        optimizers: Optimizers in order.
        schedulers: Learning-rate schedulers in order.
        loaders: Data loaders in order.
    """

    order: list[Any] = field(factory=list)
    models: dict[str, nn.Module] = field(factory=dict)
    optimizers: list[torch.optim.Optimizer] = field(factory=list)
    schedulers: list[LRScheduler] = field(factory=list)
    loaders: list[DataLoader[Any]] = field(factory=list)

    def position(self, thing: object) -> int:
        """Return where an object stands in :attr:`order`."""
        return next(index for index, other in enumerate(self.order) if other is thing)


def sort_objects(objects: Iterable[Any], named: Mapping[str, Any], *, is_first: bool = True) -> Objects:
    """Sort the objects of a ``boost`` call.

    Args:
        objects: As given, in order.
        named: Those given by keyword.
        is_first: Whether it is the Booster's first call, the only one that takes models and optimizers.

    Raises:
        UsageError: An object is of no known kind, or given twice.
        CapabilityError: It is of a kind that cannot be boosted (yet).
    """
    found = Objects()
    unnamed = [(None, thing) for thing in objects]
    for name, thing in [*unnamed, *named.items()]:
        found.order.append(thing)
        if thing is None:
            continue
        if any(thing is other for other in found.order[:-1]):
            raise UsageError(f"the same {type(thing).__name__} is given twice", hint="pass each object once")
        if isinstance(thing, BoostedOptimizer):
            raise UsageError(
                "this optimizer is boosted already",
                hint="pass the optimizer that you made, after release() of the Booster that holds it",
            )
        if isinstance(thing, torch.optim.Optimizer):
            found.optimizers.append(thing)
        elif isinstance(thing, (LRScheduler, ReduceLROnPlateau)):
            check_scheduler(thing)
            found.schedulers.append(thing)
        elif isinstance(thing, DataLoader):
            found.loaders.append(thing)
        elif isinstance(thing, nn.Module) and (name is not None or not _is_criterion(thing)):
            found.models[name or _next_name(found.models)] = thing
        elif not (_is_criterion(thing) or callable(thing)):
            _refuse(thing)
    if not is_first and (found.models or found.optimizers):
        raise UsageError(
            "this Booster has boosted already",
            hint="pass everything to one boost() call, or make a second Booster for other models; "
            "a later call takes schedulers and loaders",
        )
    if is_first and not found.models:
        raise UsageError(
            "boost was given no model", hint="pass the model first: booster.boost(model, optimizer)"
        )
    return found


def check_model(name: str, model: nn.Module) -> None:
    """Refuse models that other systems have taken over, and what cannot work.

    Raises:
        UsageError: As said, with the reason.
        CapabilityError: The model has sparse embeddings or uninitialised parameters.
    """
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        raise UsageError(
            f"{name} is wrapped in {type(model).__name__}", hint="pass the module inside: model.module"
        )
    for path, module in model.named_modules():
        if module in _BOOSTED:
            raise _boosted_already(f"module {path!r} of {name}" if path else name)
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise CapabilityError(
                f"embedding {path!r} has sparse=True, and sparse gradients are not reduced over ranks",
                hint="build it with sparse=False",
            )
        if "FSDP" in type(module).__name__ or "FullyShardedDataParallel" in type(module).__name__:
            raise UsageError(
                f"module {path!r} of {name} is under FSDP", hint="boost the model before fully_shard"
            )
    for path, buffer in model.named_buffers():
        if isinstance(buffer, nn.parameter.UninitializedBuffer):
            raise CapabilityError(f"buffer {path!r} has no shape yet", hint="run one forward before boost")
    for path, parameter in model.named_parameters():
        _check_parameter(name, path, parameter)


def _check_parameter(name: str, path: str, parameter: nn.Parameter) -> None:
    """Refuse a parameter that belongs to somebody else or cannot be moved; see :func:`check_model`."""
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        raise CapabilityError(f"parameter {path!r} has no shape yet", hint="run one forward before boost")
    if type(parameter) is not nn.Parameter:
        raise UsageError(
            f"parameter {path!r} is a {type(parameter).__name__}, expected a plain torch.nn.Parameter",
            hint="boost takes models before DTensor, quantisation or other wrappers",
        )
    if parameter.is_complex() and parameter.requires_grad:
        raise CapabilityError(
            f"parameter {path!r} is complex, and gradients of complex numbers are not reduced yet",
            hint="keep its real view as the parameter and use torch.view_as_complex in forward",
        )
    if is_watched(parameter):
        raise _boosted_already(name)
    if _has_live_graph(parameter):
        raise UsageError(
            f"a graph over parameter {path!r} is alive: some output or loss of it is still referenced",
            hint="call boost before the first forward, or delete what the model returned",
        )


def _boosted_already(what: str) -> UsageError:
    """Return the error for something that a Booster holds."""
    return UsageError(
        f"{what} is boosted already",
        hint="pass everything to one boost() call, or release() it from the Booster that holds it",
    )


def mark_boosted(models: Iterable[nn.Module]) -> Callable[[], None]:
    """Mark models as boosted, with or without an optimizer; return the function that unmarks them."""
    marked = weakref.WeakSet(module for model in models for module in model.modules())
    _BOOSTED.update(marked)

    def unmark() -> None:
        for module in list(marked):
            _BOOSTED.discard(module)

    return unmark


def _has_live_graph(parameter: nn.Parameter) -> bool:
    """Whether some autograd graph still refers to a parameter.

    Its accumulation node lives only as long as a graph or a reference does, so a mark left on it is found
    again only when something else keeps it alive.
    """
    if not parameter.requires_grad:
        return False
    mark = "colossal.mark"
    _metadata_of(parameter)[mark] = True
    return _metadata_of(parameter).pop(mark, None) is not None


def _metadata_of(parameter: nn.Parameter) -> dict[str, Any]:
    """Return the notes on the accumulation node of a parameter, which is made when there is none."""
    notes: Any = torch.autograd.graph.get_gradient_edge(parameter).node.metadata
    return cast("dict[str, Any]", notes)


def _next_name(models: Mapping[str, nn.Module]) -> str:
    """Return the name of the next unnamed model."""
    return f"model_{len(models)}" if models else "model"


def _is_criterion(thing: Any) -> bool:
    """Whether it is a loss: a module without parameters, or a torch loss."""
    return isinstance(thing, nn.Module) and next(thing.parameters(), None) is None


def _refuse(thing: Any) -> None:
    """Raise for an object that cannot be boosted."""
    raise UsageError(
        f"cannot boost a {type(thing).__name__}",
        hint="boost takes models, optimizers, learning-rate schedulers, data loaders, criteria and None",
    )
