"""Watching one forward of a copy of the model: which layers are called, and which feed which.

The one idea: nobody knows a model's structure better than its own forward. A copy of the model with random
weights runs once, on its example inputs or on guessed ones; layers are the nodes of a graph, and the graph of
autograd says between which of them nothing but other operations lies. Large models run on fake tensors, which
have shapes and no memory.

Structure is that of evaluation; a second run, in training, shows which weights are read without calls there.
The user's model is not touched: the copy shares nothing with it, and random generators are put back.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from attrs import define, field, frozen
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from colossal_tensor_parallel.examples import Example, guess_examples

__all__ = [
    "LayerUse",
    "Recorded",
    "Trace",
    "copy_module",
    "is_layer",
    "make_values",
    "own_parameters",
    "trace_model",
]

_logger = logging.getLogger(__name__)

LARGEST_REAL = 3_000_000
"""Parameters up to which the copy has values: a second of arithmetic at most."""

LARGEST_RETRIED = 300_000_000
"""Parameters up to which a copy with values is tried when fake tensors do not get through the forward."""


@define(eq=False)
class LayerUse:
    """How the forward used one layer.

    Attributes:
        name: First name in the model.
        parents: Layers whose outputs feed it, with no other layer between.
        children: Layers that it feeds.
        num_calls: How often it was called.
        is_read_outside: Whether a module other than itself used its weight.
        reaches_output: Whether the model's outputs depend on it through no other layer.
    """

    name: str
    parents: set[str] = field(factory=set)
    children: set[str] = field(factory=set)
    num_calls: int = 0
    is_read_outside: bool = False
    reaches_output: bool = False


@frozen(kw_only=True, eq=False)
class Recorded:
    """One call of a module.

    Attributes:
        args: Positional arguments, detached.
        kwargs: Keyword arguments, detached.
        needs_gradient: For each tensor among the arguments, in order, whether it required gradients.
        alive: Which leaves of its outputs are tensors on which the model's outputs may depend; those without
            gradients count, since nothing says where they go.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    needs_gradient: tuple[bool, ...]
    alive: tuple[int, ...]


@frozen(kw_only=True, eq=False)
class Trace:
    """What a forward showed.

    Attributes:
        layers: Every layer by its first name, in order of registration.
        calls: First call of every module that was called.
        is_fake: Whether the recorded tensors have no values.
        dtype: Of the floating ones that the model was given.
        read_outside: Modules whose parameters another module used.
        readers: Modules that used parameters of others.
    """

    layers: dict[str, LayerUse]
    calls: dict[str, Recorded]
    is_fake: bool
    dtype: torch.dtype
    read_outside: frozenset[str] = frozenset()
    readers: frozenset[str] = frozenset()


def is_layer(module: nn.Module) -> bool:
    """Whether a module is one of those that are cut: one matrix, perhaps a bias, and nothing else."""
    own = own_parameters(module)
    if not own.keys() <= {"weight", "bias"} or "weight" not in own or any(True for _ in module.children()):
        return False
    return own["weight"].dim() == 2 and own["weight"].is_floating_point()


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that a module has itself."""
    return dict(module.named_parameters(recurse=False))


def copy_module(module: nn.Module, make: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    """Return a copy in evaluation mode, without hooks, whose parameters and buffers are made by ``make``."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        value = make(parameter)
        memo[id(parameter)] = nn.Parameter(value, requires_grad=value.is_floating_point())
    for buffer in module.buffers():
        memo[id(buffer)] = make(buffer)
    twin = copy.deepcopy(module, memo)
    for inner in twin.modules():
        for hooks in ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks"):
            vars(inner)[hooks].clear()
    return twin.eval()


def make_values(source: torch.Generator, dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what gives copies random parameters, none of them zero or one, and the buffers' own values."""

    def make(tensor: torch.Tensor) -> torch.Tensor:
        """Return the value of one tensor of the copy."""
        if not isinstance(tensor, nn.Parameter):
            if tensor.is_meta:
                return torch.zeros(tensor.shape, dtype=tensor.dtype)
            copied = tensor.detach().cpu().clone()
            return copied.to(dtype) if copied.is_floating_point() else copied
        if not tensor.is_floating_point():
            return torch.zeros(tensor.shape, dtype=tensor.dtype)
        spread = 0.3 if tensor.dim() < 2 else max(tensor[0].numel(), 1) ** -0.5
        values = torch.randn(tensor.shape, generator=source, dtype=dtype) * spread
        return values + 1 if tensor.dim() < 2 else values

    return make


def trace_model(model: nn.Module, example: Example | None = None) -> Trace | str:
    """Run a copy of the model once.

    Args:
        model: The user's model, which stays as it is.
        example: Arguments of its forward; guessed when None.

    Returns:
        What was seen, or why nothing was: the error of the first arguments that were tried.
    """
    numel = sum(parameter.numel() for parameter in model.parameters())
    real = [(False, torch.float64), (False, torch.float32)]
    fake = [(True, torch.float64), (True, torch.float32)]
    kinds = real if numel <= LARGEST_REAL else [*fake, *real] if numel <= LARGEST_RETRIED else fake
    examples = list(guess_examples(model)) if example is None else [example]
    failures: list[str] = []
    with torch.random.fork_rng(devices=[]):
        for is_fake, dtype in kinds:
            for candidate in examples:
                found = _try(model, candidate, dtype, is_fake=is_fake)
                if isinstance(found, Trace):
                    return found
                failures.append(found)
    return failures[0] if failures else "its forward takes no arguments that could be guessed"


def _try(model: nn.Module, example: Example, dtype: torch.dtype, *, is_fake: bool) -> Trace | str:
    """Run a copy on some arguments; the error when it fails, for whatever reason the user's code has."""
    source = torch.Generator().manual_seed(97)
    try:
        with _tensors(is_fake=is_fake) as wrap:
            make = _make_fakes(dtype) if is_fake else make_values(source, dtype)
            args, kwargs = example.materialise(wrap, dtype)
            return _Watch(copy_module(model, make), dtype, is_fake=is_fake).run(args, kwargs)
    except Exception as err:
        _logger.debug("a copy of the model does not run", exc_info=True)
        return f"{type(err).__name__}: {str(err)[:120]}".replace("\n", " ")


def _make_fakes(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what gives copies tensors of a shape; called in a world of fake tensors."""
    return lambda tensor: torch.empty(
        tensor.shape, dtype=dtype if tensor.is_floating_point() else tensor.dtype
    )


@contextmanager
def _tensors(*, is_fake: bool) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """Run in a world of fake tensors, or in the real one; yield what brings a tensor there."""
    if not is_fake:
        yield lambda tensor: tensor
        return
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode: Any = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        yield mode.from_tensor


@final
class _Watch:
    """Hooks on a copy of the model that see every call, and every use of a parameter."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, *, is_fake: bool) -> None:
        """Prepare for one forward."""
        self._model = model
        self._dtype = dtype
        self._is_fake = is_fake
        self._names = {module: name for name, module in model.named_modules()}
        self._layers = {
            name: LayerUse(name) for name, module in model.named_modules() if name and is_layer(module)
        }
        self._owners: dict[torch.Tensor, set[nn.Module]] = {}
        for module in model.modules():
            for parameter in own_parameters(module).values():
                self._owners.setdefault(parameter, set()).add(module)
        self._stack: list[nn.Module] = []
        self._read_outside: set[str] = set()
        self._readers: set[str] = set()
        self._nodes: dict[Any, str] = {}
        self._calls: dict[str, tuple[tuple[Any, ...], dict[str, Any], list[Any]]] = {}
        self._values: dict[str, tuple[list[Any], list[bool]]] = {}

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Trace:
        """Call the model and say what was seen."""
        handles = []
        for module in self._model.modules():
            handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True))
            handles.append(module.register_forward_hook(self._leave, with_kwargs=True))
        try:
            with _Uses(self._note_use):
                outputs = self._model(*args, **kwargs)
            self._see_training(args, kwargs)
        finally:
            for handle in handles:
                handle.remove()
        ends = [leaf.grad_fn for leaf in _tensors_in(outputs) if leaf.grad_fn is not None]
        for name in self._nearest(ends):
            self._layers[name].reaches_output = True
        reached = _ancestors(ends)
        calls = {
            name: Recorded(
                args=args,
                kwargs=kwargs,
                needs_gradient=tuple(self._values[name][1]),
                alive=tuple(
                    index
                    for index, (leaf, node) in enumerate(outputs)
                    if leaf is not None and (node is None or node in reached)
                ),
            )
            for name, (args, kwargs, outputs) in self._calls.items()
        }
        return Trace(
            layers=self._layers,
            calls=calls,
            is_fake=self._is_fake,
            dtype=self._dtype,
            read_outside=frozenset(self._read_outside),
            readers=frozenset(self._readers),
        )

    def _see_training(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Call the model as in training, where its code may read weights that it does not in evaluation."""
        self._model.train()
        try:
            with torch.no_grad(), _Uses(self._note_use):
                self._model(*args, **kwargs)
        except Exception:
            _logger.debug("a copy of the model does not run in training", exc_info=True)
        finally:
            self._stack.clear()
            self._model.eval()

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note that a module is called, and what feeds it when it is a layer."""
        self._stack.append(module)
        name = self._names[module]
        if name not in self._values:
            tensors = _tensors_in((args, kwargs))
            needs = [tensor.requires_grad for tensor in tensors]
            kept = pytree.tree_map(
                lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf, (args, kwargs)
            )
            self._values[name] = (list(kept), needs)
        use = self._layers.get(name)
        if use is not None:
            use.num_calls += 1
            starts = [leaf.grad_fn for leaf in _tensors_in((args, kwargs)) if leaf.grad_fn is not None]
            for parent in self._nearest(starts):
                use.parents.add(parent)
                self._layers[parent].children.add(name)

    def _leave(self, module: nn.Module, _args: object, _kwargs: object, outputs: Any) -> None:
        """Note where the outputs of a layer are in the graph."""
        self._stack.pop()
        name = self._names[module]
        # Of outputs only whether they are tensors is kept, and where they are in the graph.
        leaves = [
            (True, leaf.grad_fn) if isinstance(leaf, torch.Tensor) else (None, None)
            for leaf in pytree.tree_leaves(outputs)
        ]
        if name not in self._calls:
            args, kwargs = self._values[name][0]
            self._calls[name] = (args, kwargs, leaves)
        if name in self._layers:
            for _, node in leaves:
                if node is not None:
                    self._nodes[node] = name

    def _note_use(self, tensor: torch.Tensor) -> None:
        """Note a layer whose weight is used by code of another module."""
        owners = self._owners.get(tensor)
        reader = self._stack[-1] if self._stack else None
        if owners is None or (reader in owners and self._names[reader] in self._layers):
            return
        for owner in owners:
            if isinstance(reader, nn.MultiheadAttention) and owner is reader.out_proj:
                continue  # the module and this layer are one unit
            if reader not in owners:
                self._read_outside.add(self._names[owner])
                if reader is not None:
                    self._readers.add(self._names[reader])
            use = self._layers.get(self._names[owner])
            if use is not None:
                use.is_read_outside = True

    def _nearest(self, starts: Iterable[Any]) -> set[str]:
        """Return the layers that feed some nodes with no other layer between."""
        found: set[str] = set()
        seen: set[Any] = set()
        pending = list(starts)
        while pending:
            node = pending.pop()
            if node in seen:
                continue
            seen.add(node)
            if node in self._nodes:
                found.add(self._nodes[node])
                continue
            pending.extend(inner for inner, _ in node.next_functions if inner is not None)
        return found


def _ancestors(starts: Iterable[Any]) -> set[Any]:
    """Return all nodes that some nodes depend on."""
    seen: set[Any] = set()
    pending = list(starts)
    while pending:
        node = pending.pop()
        if node not in seen:
            seen.add(node)
            pending.extend(inner for inner, _ in node.next_functions if inner is not None)
    return seen


def _tensors_in(tree: Any) -> list[torch.Tensor]:
    """Return the tensors of a tree, in order."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class _Uses(TorchFunctionMode):
    """Sees every function that gets a parameter and returns a tensor."""

    def __init__(self, note: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function, and note its parameters."""
        results = func(*args, **(kwargs or {}))
        if isinstance(results, (torch.Tensor, tuple, list)):
            for leaf in pytree.tree_leaves((args, kwargs)):
                if isinstance(leaf, nn.Parameter):
                    self._note(leaf)
        return results
