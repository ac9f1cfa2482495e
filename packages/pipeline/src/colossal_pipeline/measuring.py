"""What each item takes on this machine: its forward and backward, run for a moment with real tensors.

The one idea: the model runs once, and what items are given is kept; then each item runs by itself on what it
was given, a few times, and the fastest counts, since whatever disturbs a measurement makes it slower.
Parameters, their gradients, buffers and random numbers are afterwards as before.

Not counted: code between modules, but for the loss, which counts with the last item.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, final

import torch
from attrs import define, evolve, field, frozen
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from colossal_core.errors import UsageError
from colossal_core.runtime.batches import loss_of, split_batch
from colossal_core.runtime.trees import map_leaves
from colossal_pipeline.flow import list_leaves
from colossal_pipeline.items import Item

__all__ = ["Measured", "measure_items"]

Criterion = Callable[..., torch.Tensor] | None

SECONDS_OF_ITEM = 0.1
"""How long one item is run at most, once it has run three times."""

MAX_RUNS = 7


@final
@frozen(kw_only=True)
class Measured:
    """What an item takes for one micro-batch.

    Attributes:
        name: Name of the item.
        seconds: Its forward and backward.
        kept_bytes: What its forward keeps for backward, parameters not counted.
        parameters: Elements of its parameters by name; of several names the first in the model.
    """

    name: str
    seconds: float
    kept_bytes: int
    parameters: Mapping[str, int]


def measure_items(
    model: nn.Module, items: Sequence[Item], batch: Any, criterion: Criterion
) -> tuple[Measured, ...]:
    """Run each item of a model on what it is given for a batch.

    Args:
        model: The serial model, with values.
        items: Its items, in the order of forward.
        batch: As many samples as a micro-batch has, as ``forward_backward`` takes them.
        criterion: The loss, or None when outputs carry it.

    Raises:
        UsageError: The model has no values.
    """
    first = next(model.parameters(), None)
    if first is None or first.is_meta:
        raise UsageError(
            "items cannot be run: the model's parameters are on the meta device",
            hint="leave fit out, so that costs are estimated, or give a smaller model with equal blocks",
        )
    call = split_batch(batch, first.device)
    names: dict[torch.Tensor, str] = {}
    for name, parameter in model.named_parameters():
        names.setdefault(parameter, name)

    def run() -> torch.Tensor:
        return loss_of(model(*call.args, **call.kwargs), call, criterion)

    with _as_before(model):
        given = _watch(run, items)
        found = [_measure(item, given[item.name], names, first.device) for item in items]
        last = max(
            range(len(items)), key=lambda number: max((n for n, *_ in given[items[number].name]), default=0)
        )
        seconds, kept = _measure_rest(run, items[last], len(given[items[last].name]), first.device)
    found[last] = evolve(
        found[last], seconds=found[last].seconds + seconds, kept_bytes=found[last].kept_bytes + kept
    )
    return tuple(found)


def _watch(run: Callable[[], Any], items: Sequence[Item]) -> dict[str, list[tuple[int, Any, Any]]]:
    """Return for each item its calls: the number among all calls, and the arguments."""
    given: dict[str, list[tuple[int, Any, Any]]] = {item.name: [] for item in items}
    count = itertools.count(1)

    def watch(item: Item) -> Any:
        def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
            given[item.name].append((next(count), *map_leaves(_copy, (args, kwargs))))

        return item.module.register_forward_pre_hook(enter, with_kwargs=True)

    handles = [watch(item) for item in items]
    try:
        # A graph tells which inputs require gradients; what it would save is not needed.
        with saved_tensors_hooks(lambda tensor: tensor.new_empty(0), lambda tensor: tensor):
            run()
    finally:
        for handle in handles:
            handle.remove()
    return given


def _measure_rest(
    run: Callable[[], torch.Tensor], item: Item, num_calls: int, device: torch.device
) -> tuple[float, int]:
    """Return the time of what follows the last call of the last item, and the bytes that it keeps."""
    best, sizes = float("inf"), dict[int, int]()
    for number in range(3):
        rest = _Rest(num_calls, device)
        handle = item.module.register_forward_hook(rest.begin)
        try:
            with torch.no_grad(), _counting(sizes, ()) if number == 0 else ExitStack():
                torch.autograd.grad(run(), rest.leaves, allow_unused=True)
        finally:
            handle.remove()
        best = min(best, _now(device) - rest.start)
    return best, sum(sizes.values())


@define
class _Rest:
    """Begins to record a graph once an item has returned for the last time.

    Attributes:
        left: Calls that are still to come.
        device: Where the model is.
        start: When the rest began.
        leaves: Where its graph ends.
    """

    left: int
    device: torch.device
    start: float = 0.0
    leaves: list[torch.Tensor] = field(factory=list)

    def begin(self, _module: nn.Module, _args: Any, outputs: Any) -> Any:
        """Give code behind the item tensors of a new graph; a forward hook."""
        self.left -= 1
        if self.left:
            return outputs
        torch.set_grad_enabled(True)
        fresh = map_leaves(lambda _, leaf: _fresh(leaf, is_wanted=True), outputs)
        self.leaves = _wanted(fresh)
        self.start = _now(self.device)
        return fresh


def _measure(
    item: Item,
    calls: Sequence[tuple[int, Any, Any]],
    names: Mapping[torch.Tensor, str],
    device: torch.device,
) -> Measured:
    """Run one item as often as the model called it."""
    own = [parameter for parameter in item.module.parameters() if parameter.requires_grad]
    runs = [_run_often(item.module, args, kwargs, own, device) for _, args, kwargs in calls]
    return Measured(
        name=item.name,
        seconds=sum(seconds for seconds, _ in runs),
        kept_bytes=sum(kept for _, kept in runs),
        parameters={names[parameter]: parameter.numel() for parameter in item.module.parameters()},
    )


def _run_often(
    function: Callable[..., Any],
    args: Any,
    kwargs: Any,
    parameters: Sequence[torch.Tensor],
    device: torch.device,
) -> tuple[float, int]:
    """Return the shortest time of forward and backward, and the bytes that are kept between them."""
    best, kept, spent = float("inf"), 0, 0.0
    for number in range(MAX_RUNS):
        fresh_args, fresh_kwargs = map_leaves(lambda _, leaf: _fresh(leaf), (args, kwargs))
        inputs = _wanted((fresh_args, fresh_kwargs))
        sizes: dict[int, int] = {}
        with _counting(sizes, parameters) if number == 0 else ExitStack():
            start = _now(device)
            outputs = function(*fresh_args, **fresh_kwargs)
            roots = _wanted(outputs)
            if roots and (inputs or parameters):
                ones = [torch.ones_like(root) for root in roots]
                torch.autograd.grad(roots, [*inputs, *parameters], ones, allow_unused=True)
            seconds = _now(device) - start
        if number == 0:  # it counts bytes, and finds everything cold
            kept = sum(sizes.values())
            continue
        best, spent = min(best, seconds), spent + seconds
        if spent > SECONDS_OF_ITEM and number >= 3:
            break
    return best, kept


def _fresh(leaf: Any, *, is_wanted: bool = False) -> Any:
    """Return a copy of a tensor that requires gradients like it, or where it can; it may be written to."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    copy = leaf.detach().clone()
    if leaf.requires_grad or (is_wanted and copy.is_floating_point()):
        return copy.requires_grad_().view_as(copy)  # no leaf, since code may write into its inputs
    return copy


def _wanted(tree: Any) -> list[torch.Tensor]:
    """Return the tensors of a tree that require gradients."""
    return [leaf for leaf in list_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


@contextmanager
def _counting(sizes: dict[int, int], parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Count the memory of what is saved for backward, each memory once and parameters not at all."""
    known = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    alive: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in known:
            sizes[place] = tensor.untyped_storage().nbytes()
            alive.append(tensor.detach())
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


def _copy(_: str, leaf: Any) -> Any:
    """Return a copy that later code does not write into, and that requires gradients if the original does."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.detach().clone().requires_grad_(leaf.requires_grad)


@contextmanager
def _as_before(model: nn.Module) -> Iterator[None]:
    """Put back buffers and random numbers."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    with torch.random.fork_rng(), torch.enable_grad():
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)


def _now(device: torch.device) -> float:
    """Return the time once a device has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
