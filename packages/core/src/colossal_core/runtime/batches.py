"""What a batch is, how a model is called with it, and what a rank's share of it weighs.

The one idea: the loss of a global batch is a weighted mean of the ranks' losses, and the weight is whatever
the rank's own mean was taken over: valid targets where the criterion ignores some, elements otherwise, or
what the user says.

# Note [Losses inside models]
Models of the transformers library compute their loss from ``labels``, as the mean over those that are not
-100, and take ``num_items_in_batch`` for the divisor. Causal ones predict the next token, so the first label
of a row is never a target; the name of their ``loss_function`` tells. It tells nothing of models that shift
the inputs of their decoder instead, as T5 does: they have the same ``loss_function`` and do not use it.

# Note [Dims of samples]
Samples are rows: dim 0 of what has as many as there are samples. What is laid out in
another way is named by the user: a keyword, a parameter of the model's forward, a key of a batch that is one
mapping, or ``target``. From then on it is known by its path in the call.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from attrs import evolve, field, frozen
from torch import nn
from torch.utils import _pytree as pytree

from colossal_core.errors import UsageError
from colossal_core.runtime.trees import map_leaves

__all__ = [
    "Call",
    "Weight",
    "check_scalar",
    "loss_of",
    "loss_weight",
    "read_number",
    "split_batch",
]

Criterion = Callable[..., torch.Tensor]
Weight = float | Callable[[Any], float] | None
BatchDims = Mapping[str, int | None] | None
_IGNORING = (nn.CrossEntropyLoss, nn.NLLLoss)
_IGNORING_FUNCTIONS = (F.cross_entropy, F.nll_loss)


@frozen
class Call:
    """How a batch becomes a call of the model and of the criterion.

    Attributes:
        args: Positional arguments of the model.
        kwargs: Keyword arguments of the model.
        target: Second argument of the criterion: the target, or the whole mapping.
        dims: By path, ``inputs[0]``, ``inputs['x']``, ``target`` or ``target['x']``: the dim of samples in
            what is there, None where each sample needs all of it.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any
    dims: Mapping[str, int | None] = field(factory=dict)

    def dim_of(self, path: str) -> tuple[int | None, bool]:
        """Return the dim of samples at a path, and whether the user named it; dim 0 if not."""
        for known, dim in self.dims.items():
            if path == known or path.startswith(f"{known}["):
                return dim, True
        return 0, False

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Return the tensors with their paths: inputs in the order of the call, then the target."""
        found: list[tuple[str, torch.Tensor]] = []

        def visit(path: str, leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                found.append((path, leaf))
            return leaf

        for tree, path in ((self.args, "inputs"), (self.kwargs, "inputs"), (self.target, "target")):
            map_leaves(visit, tree, path=path)
        return found


def split_batch(
    batch: Any, device: torch.device, batch_dims: BatchDims = None, model: nn.Module | None = None
) -> Call:
    """Read a batch, moved to the device.

    Args:
        batch: ``(inputs, target)`` with inputs a tensor, a tuple or a mapping; or one mapping, whose items
            become keyword arguments of the model.
        device: Where the model is.
        batch_dims: The dim of samples of what does not have them in dim 0; see Note [Dims of samples].
        model: Knows the names of positional inputs; needed only with ``batch_dims``.

    Raises:
        UsageError: It is neither, or ``batch_dims`` names what is not there.
    """
    call = _split(batch, device)
    return call if batch_dims is None else _with_dims(call, batch_dims, model)


def _split(batch: Any, device: torch.device) -> Call:
    """Read a batch without dims."""
    batch = pytree.tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, batch)
    if isinstance(batch, Mapping):
        return Call((), dict(batch), batch)
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        size = f" of length {len(batch)}" if isinstance(batch, (tuple, list)) else ""
        raise UsageError(
            f"a batch is {type(batch).__name__}{size}, expected (inputs, target) or one mapping",
            hint="regroup it, e.g. ((ids, mask), labels) or {'input_ids': ids, 'labels': labels}",
        )
    inputs, target = batch
    if isinstance(inputs, Mapping):
        return Call((), dict(inputs), target)
    return Call(tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,), {}, target)


def loss_of(outputs: Any, call: Call, criterion: Criterion | None) -> torch.Tensor:
    """Return the loss of a model's outputs.

    Raises:
        UsageError: There is none, or it is no scalar tensor that requires gradients.
    """
    loss: Any
    if criterion is not None:
        loss = criterion(outputs, call.target)
        source = "the criterion returned"
    else:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
        source = "without a criterion the model's output has a loss of"
    if not isinstance(loss, torch.Tensor):
        raise UsageError(f"{source} {loss!r}, expected a tensor", hint="pass criterion=, or return the loss")
    if loss.numel() != 1:
        raise UsageError(
            f"{source} a tensor of shape {tuple(loss.shape)}, expected a scalar",
            hint="reduce it to its mean over the samples of this rank",
        )
    return loss.reshape(())


def check_scalar(loss: object) -> None:
    """Refuse what backward cannot start from.

    Raises:
        UsageError: It is no scalar tensor that requires gradients.
    """
    if isinstance(loss, torch.Tensor):
        if loss.numel() == 1 and loss.requires_grad:
            return
        what = f"a tensor of shape {tuple(loss.shape)}{'' if loss.requires_grad else ' without a graph'}"
    else:
        what = repr(loss)
    raise UsageError(
        f"backward got {what}, expected a scalar tensor that requires gradients",
        hint="reduce the loss to its mean, outside torch.no_grad",
    )


def read_number(value: object) -> float:
    """Return a number, or a tensor of one element, as a float.

    Raises:
        UsageError: It is something else.
    """
    if isinstance(value, (int, float)):
        return float(value)
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return float(value.detach())
    what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
    raise UsageError(
        f"mean got {what}, expected a number or a tensor of one element",
        hint="call it for each number; booster.gather(tensor) puts rows of all ranks together",
    )


def loss_weight(
    batch: Any, call: Call, criterion: Criterion | None, weight: Weight, model: nn.Module | None = None
) -> tuple[float | None, str]:
    """Return what a rank's loss weighs in the mean over the global batch, and by which rule.

    The first that applies: the user's ``weight``; the number of targets that the criterion counts; without a
    criterion ``num_items_in_batch``, given or counted in the labels, where the model accepts it; the number
    of samples.

    Returns:
        The weight, or None when the criterion sums, so that the global loss is the plain sum; and the rule
        in words, for ``booster.describe()``.

    Raises:
        UsageError: The weight is negative or not finite, the criterion does not reduce, or no batch size is
            found.
    """
    if weight is not None:
        value = float(weight(batch) if callable(weight) else weight)
        if not (math.isfinite(value) and value >= 0):
            raise UsageError(f"the weight of the batch is {value}", hint="give a finite number of at least 0")
        return value, "weight= of the call"
    reduction = getattr(criterion, "reduction", "mean")
    if reduction == "none":
        raise UsageError("the criterion has reduction='none'", hint="use reduction='mean' or 'sum'")
    if reduction == "sum":
        return None, f"nothing: {_name_of(criterion)} sums"
    counted = _counted_targets(call.target, criterion)
    rule = f"targets that {_name_of(criterion)} counts"
    if criterion is None and model is not None:
        counted, rule = _counted_labels(call.kwargs, model), "num_items_in_batch, or the labels that count"
    return (float(_batch_size(call)), "number of samples") if counted is None else (counted, rule)


def _name_of(criterion: Criterion | None) -> str:
    """Return how a user would call a criterion."""
    return str(getattr(criterion, "__name__", type(criterion).__name__))


def _counted_targets(target: Any, criterion: Criterion | None) -> float | None:
    """Return what the mean of a classification loss divides by, or None for other criteria."""
    if not isinstance(target, torch.Tensor):
        return None
    if isinstance(criterion, _IGNORING):
        ignore, class_weights = criterion.ignore_index, criterion.weight
    elif any(criterion is function for function in _IGNORING_FUNCTIONS):
        ignore, class_weights = -100, None
    else:
        return float(target.numel()) if _is_torch_loss(criterion) else None
    if target.is_floating_point():  # class probabilities: the mean is over everything but the class dim
        return float(target.numel() // (target.shape[1] if target.dim() > 1 else target.shape[0]))
    valid = target != ignore
    if class_weights is None:
        return float(valid.sum())
    return float(class_weights.to(target.device)[target[valid]].sum())


def _counted_labels(kwargs: Mapping[str, Any], model: nn.Module) -> float | None:
    """Return what the mean of a model's own loss divides by, or None; see Note [Losses inside models]."""
    given = kwargs.get("num_items_in_batch")
    if given is not None:
        return float(given)
    loss_function = getattr(model, "loss_function", None)
    parameters = inspect.signature(model.forward).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if "num_items_in_batch" not in parameters and not (takes_any and callable(loss_function)):
        return None
    labels = kwargs.get("labels")
    if getattr(loss_function, "__name__", "") == "ForCausalLMLoss" and not _shifts_inputs(model):
        shifted = kwargs.get("shift_labels")
        if isinstance(shifted, torch.Tensor):
            labels = shifted
        elif isinstance(labels, torch.Tensor):
            labels = labels[..., 1:]
    return float((labels != -100).sum()) if isinstance(labels, torch.Tensor) else None


def _shifts_inputs(model: nn.Module) -> bool:
    """Whether a model shifts the inputs of its decoder, and all labels are targets."""
    if not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return False
    code = getattr(inspect.unwrap(model.forward), "__code__", None)
    return code is not None and "loss_function" not in code.co_names


def _is_torch_loss(criterion: Criterion | None) -> bool:
    """Whether it is a loss of ``torch.nn``, whose mean is over the elements of the target."""
    return isinstance(criterion, nn.Module) and type(criterion).__module__ == nn.MSELoss.__module__


def _batch_size(call: Call) -> int:
    """Return how many samples the target has, else the first tensor among the inputs."""
    tensors = call.tensors()
    for path, leaf in sorted(tensors, key=lambda found: not found[0].startswith("target")):
        dim, _ = call.dim_of(path)
        if dim is not None and leaf.dim() > 0:
            return int(leaf.shape[dim])
    raise UsageError("the batch holds no tensor with a batch dim", hint="pass weight= to forward_backward")


def _with_dims(call: Call, batch_dims: Mapping[str, int | None], model: nn.Module | None) -> Call:
    """Return a call that knows where its samples are; see Note [Dims of samples].

    Raises:
        UsageError: A name is not in the batch, or a tensor under it has no such dim.
    """
    names = {} if model is None else inspect.signature(model.forward).parameters
    paths = {name: [f"inputs[{index}]"] for index, name in zip(range(len(call.args)), names, strict=False)}
    paths |= {name: [f"inputs[{name!r}]"] for name in call.kwargs}
    paths.setdefault("target", ["target"])
    if isinstance(call.target, Mapping):  # may be the inputs once more
        for name in call.target:
            paths.setdefault(name, []).append(f"target[{name!r}]")
    if unknown := [name for name in batch_dims if name not in paths]:
        raise UsageError(
            f"batch_dims names {unknown[0]!r}, and the batch has {', '.join(map(repr, paths))}",
            hint="name a keyword, a parameter of the model's forward, or 'target'",
        )
    found = evolve(call, dims={path: dim for name, dim in batch_dims.items() for path in paths[name]})
    for path, leaf in found.tensors():
        dim, is_named = found.dim_of(path)
        if is_named and dim is not None and not 0 <= dim < leaf.dim():
            raise UsageError(
                f"batch_dims gives dim {dim} for {path}, which has the shape {tuple(leaf.shape)}",
                hint="count dims from 0, and give None for what every sample needs as a whole",
            )
    return found
