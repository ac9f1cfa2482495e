"""Finding out what flows between items: one run of the whole model without values.

The one idea: the user's forward runs once with parameters that are absent (:mod:`~colossal_pipeline.absent`),
so it allocates nothing and computes shapes only, while a dispatch mode follows from which outputs of
items, and from which parameters outside of items, every tensor is made. The batch itself is real, so code
that looks at masks and lengths works. Nothing of the model changes: buffers are not written, random numbers
not drawn. What needs values inside an item is guessed (:mod:`~colossal_pipeline.opaque`).

# Note [Taints]
What a tensor is made of is noted for its memory, not for the object: views share it, and writing in place
adds to it. An output of an item gets memory of its own when it leaves the item, and is made of itself only.
Tensors that exist, and into which something absent was written, count as absent from then on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from colossal_core.errors import CapabilityError, UsageError
from colossal_core.runtime.batches import loss_of
from colossal_core.runtime.batchnorm import Synchronised
from colossal_core.runtime.residency import is_in_backward
from colossal_core.runtime.swapping import kept_attributes, replaced_forwards, replaced_tensors
from colossal_core.runtime.trees import map_leaves
from colossal_pipeline.absent import Absent, run_on_shadows
from colossal_pipeline.flow import Call, Flow, LeafKey, LeafSpec, Slot, list_leaves
from colossal_pipeline.opaque import guessed_where_values_are_needed
from colossal_pipeline.reentrant import without_reentrant_checkpoints

if TYPE_CHECKING:
    from colossal_core.runtime.batches import Call as ModelCall
    from colossal_pipeline.items import Item

__all__ = ["SerialView", "trace"]

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
"""What an item may return beside tensors, and what it was given."""

SerialView = Callable[[nn.Module], AbstractContextManager[None]]

Source = LeafKey | str
"""What tensors are made of: an output of an item, or the name of a parameter."""


def trace(
    model: nn.Module,
    items: Sequence[Item],
    call: ModelCall,
    criterion: Callable[..., torch.Tensor] | None,
    parameters: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    *,
    trains: bool,
    wants_outputs: bool,
    views: Sequence[SerialView] = (),
) -> Flow:
    """Run a model without values.

    Args:
        model: The model, whole or cut.
        items: Its items.
        call: A micro-batch.
        criterion: The loss, or None when outputs carry it.
        parameters: Shape and dtype of each parameter of the serial model, by all its names.
        trains: Whether gradients will be wanted.
        wants_outputs: Whether the outputs of the model are wanted as well as the loss.
        views: What lets cut layers compute as the serial ones do.

    Raises:
        CapabilityError: An item returns what cannot be sent, or forward looks at values.
        UsageError: There is no loss.
    """
    tracer = _Tracer(model, trains=trains)
    absent = tracer.make_parameters(model, parameters)
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(kept_attributes(model))
        stack.enter_context(replaced_tensors(model, absent))
        stack.enter_context(_without_communication(model))
        stack.enter_context(without_reentrant_checkpoints())
        for view in views:
            stack.enter_context(view(model))
        for item in items:
            stack.enter_context(tracer.watch(item))
        stack.enter_context(guessed_where_values_are_needed(items, tracer.count))
        stack.enter_context(torch.set_grad_enabled(trains))
        stack.enter_context(tracer)
        outputs = model(*call.args, **call.kwargs)
        loss = loss_of(outputs, call, criterion)
    return tracer.finish(outputs, loss, wants_outputs=wants_outputs)


@final
class _Tracer(TorchDispatchMode):
    """Follows what tensors are made of; see Note [Taints]."""

    def __init__(self, model: nn.Module, *, trains: bool) -> None:
        """Know nothing yet.

        Args:
            model: Its buffers are not written.
            trains: Whether parameters require gradients.
        """
        super().__init__()  # type: ignore[no-untyped-call]  # theirs has no types
        self.calls: list[Call] = []
        self.flops: dict[str, float] = {}
        self._trains = trains
        self._counts: dict[str, int] = {}
        self._taints: dict[int, frozenset[Source]] = {}
        self._alive: list[Any] = []
        self._leaves: dict[int, LeafKey] = {}
        self._nodes: dict[LeafKey, Any] = {}
        self._overwritten: set[LeafKey] = set()
        self._given: list[tuple[frozenset[Source], list[Any]]] = []
        self._running: list[str] = []
        self._buffers = {_storage_of(buffer) for buffer in model.buffers() if not buffer.is_meta}

    def make_parameters(
        self, model: nn.Module, parameters: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    ) -> dict[nn.Parameter, torch.Tensor]:
        """Return an absent tensor for each parameter of a model."""
        found: dict[nn.Parameter, torch.Tensor] = {}
        for name, parameter in model.named_parameters():
            shape, dtype = parameters[name]
            made = Absent.like(shape, dtype, parameter.device)
            made.requires_grad_(self._trains and parameter.requires_grad)
            self._taint(made, frozenset({name}))
            found[parameter] = made
        return found

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation, without values where any is missing, and note what its results are made of."""
        del types
        kwargs = kwargs or {}
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        written = [
            leaf
            for leaf in pytree.tree_leaves([args[index] for index in _written(func) if index < len(args)])
            if isinstance(leaf, torch.Tensor)
        ]
        sources = frozenset[Source]().union(*map(self._sources, given))
        if not sources and not any(isinstance(leaf, Absent) for leaf in given):
            if any(_storage_of(leaf) in self._buffers for leaf in written):
                return written[0] if len(written) == 1 else written
            return func(*args, **kwargs)
        if not self._running and is_in_backward():
            raise CapabilityError(
                "forward differentiates what modules computed, as torch.autograd.grad does, and these may "
                "be on several stages",
                hint="let one module compute it, inputs and gradient, and keep that on one stage with "
                "Pipeline(balance=[...]); or use another strategy",
            )
        results = run_on_shadows(func, args, kwargs)
        count = flop_registry.get(func.overloadpacket)
        if count is not None:
            self.count(count(*args, **kwargs, out_val=results))
        for leaf in (*written, *pytree.tree_leaves(results)):
            if isinstance(leaf, torch.Tensor):
                self._taint(leaf, self._sources(leaf) | sources)
        self._overwritten.update(
            self._leaves[_storage_of(leaf)] for leaf in written if _storage_of(leaf) in self._leaves
        )
        return results

    def count(self, flops: float) -> None:
        """Add operations to those of the item that runs."""
        if self._running:
            name = self._running[-1]
            self.flops[name] = self.flops.get(name, 0.0) + flops

    @contextmanager
    def watch(self, item: Item) -> Iterator[None]:
        """Note every call of an item."""

        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            leaves = list_leaves((args, kwargs))
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            self._given.append((frozenset[Source]().union(*map(self._sources, tensors)), leaves))
            self._running.append(item.name)

        def leave(_: nn.Module, _args: Any, outputs: Any) -> Any:
            self._running.pop()
            sources, arguments = self._given.pop()
            return self._note_call(item.name, sources, arguments, outputs)

        # This one runs after the user's own hooks that there are; `finally` also where forward raises.
        handles = [
            item.module.register_forward_pre_hook(enter, with_kwargs=True),
            item.module.register_forward_hook(leave),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def finish(self, outputs: Any, loss: torch.Tensor, *, wants_outputs: bool) -> Flow:
        """Return the flow.

        Raises:
            UsageError: Gradients are wanted, and the loss has none.
        """
        if self._trains and not loss.requires_grad:
            raise UsageError(
                "the loss does not require gradients",
                hint="call it outside torch.no_grad, with trainable weights",
            )
        reached = _reach(loss.grad_fn)
        specs: list[LeafSpec] = []
        sources = self._sources(loss)

        def visit(_: str, leaf: Any) -> Any:
            nonlocal sources
            if not isinstance(leaf, torch.Tensor):
                return leaf
            specs.append(self._spec(leaf, None))
            sources = sources | (self._sources(leaf) if wants_outputs else frozenset())
            return Slot(len(specs) - 1)

        template = map_leaves(visit, outputs) if wants_outputs else None
        calls = tuple(
            Call(
                item=call.item,
                number=call.number,
                template=call.template,
                leaves=tuple(
                    LeafSpec(
                        spec.shape,
                        spec.dtype,
                        spec.requires_grad,
                        LeafKey(number, index) in self._overwritten,
                    )
                    for index, spec in enumerate(call.leaves)
                ),
                needs=call.needs,
                parameters=call.parameters,
            )
            for number, call in enumerate(self.calls)
        )
        return Flow(
            calls=calls,
            needs=_keys(sources),
            parameters=_names(sources),
            with_gradient=frozenset(key for key, node in self._nodes.items() if node in reached),
            template=template,
            outputs=tuple(specs),
            flops=self.flops,
        )

    def _note_call(self, name: str, sources: frozenset[Source], arguments: list[Any], outputs: Any) -> Any:
        """Note a call that has returned, and let its outputs be made of themselves."""
        number = len(self.calls)
        specs: list[LeafSpec] = []
        positions = {id(leaf): index for index, leaf in enumerate(arguments)}

        def mark(path: str, leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                specs.append(self._spec(leaf, LeafKey(number, len(specs))))
                return Slot(len(specs) - 1)
            if isinstance(leaf, _PLAIN):
                return leaf
            if id(leaf) in positions:
                return Slot(positions[id(leaf)], is_argument=True)
            raise CapabilityError(
                f"{name!r} returns a {type(leaf).__name__} at outputs{path}, which cannot be sent to another "
                "pipeline stage",
                hint="return tensors, numbers, texts and None, in tuples, lists, mappings and dataclasses",
            )

        template = map_leaves(mark, outputs)
        replaced: list[torch.Tensor] = []

        def rename(_: str, leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            replaced.append(self._rename(leaf, LeafKey(number, len(replaced))))
            return replaced[-1]

        results = map_leaves(rename, outputs)
        count = self._counts.get(name, 0)
        self._counts[name] = count + 1
        self.calls.append(Call(name, count, template, tuple(specs), _keys(sources), _names(sources)))
        return results

    def _rename(self, leaf: torch.Tensor, key: LeafKey) -> torch.Tensor:
        """Return an output of an item with memory and a gradient function of its own."""
        apply: Callable[..., torch.Tensor] = _Rename.apply
        made = apply(leaf)
        self._nodes[key] = made.grad_fn
        storage = _storage_of(made)
        self._taints[storage] = frozenset({key})
        self._leaves[storage] = key
        self._alive.append(made)
        return made

    @staticmethod
    def _spec(leaf: torch.Tensor, _: LeafKey | None) -> LeafSpec:
        """Return the form of a tensor."""
        return LeafSpec(tuple(leaf.shape), leaf.dtype, leaf.requires_grad, is_overwritten=False)

    def _sources(self, tensor: torch.Tensor) -> frozenset[Source]:
        """Return what a tensor is made of; nothing for a real one."""
        return self._taints.get(_storage_of(tensor), frozenset())

    def _taint(self, tensor: torch.Tensor, sources: frozenset[Source]) -> None:
        """Note what a tensor is made of, and keep its memory, whose address is the key."""
        self._taints[_storage_of(tensor)] = sources
        self._alive.append(tensor.shadow if isinstance(tensor, Absent) else tensor)


class _Rename(torch.autograd.Function):
    """Identity between absent tensors; its node stands for an output of an item in the graph."""

    @staticmethod
    def forward(_ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        """Return an absent tensor of the same form, with memory of its own."""
        shadow = torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device="meta")
        return Absent.over(shadow, leaf.device)

    @staticmethod
    def backward(_ctx: Any, *gradients: Any) -> Any:
        """Return the gradient."""
        return gradients[0]


def _storage_of(tensor: torch.Tensor) -> int:
    """Return what tells one memory from another."""
    owner = tensor.shadow if isinstance(tensor, Absent) else tensor
    return int(owner.untyped_storage()._cdata)


@functools.cache
def _written(func: Any) -> tuple[int, ...]:
    """Return the positions of arguments that an operation writes."""
    return tuple(
        index
        for index, argument in enumerate(func._schema.arguments)  # noqa: SLF001 - the only place of it
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _reach(node: Any) -> set[Any]:
    """Return all nodes of the graph below one."""
    reached: set[Any] = set()
    pending = [node] if node is not None else []
    while pending:
        found = pending.pop()
        if found in reached:
            continue
        reached.add(found)
        pending.extend(child for child, _ in found.next_functions if child is not None)
    return reached


def _keys(sources: frozenset[Source]) -> frozenset[LeafKey]:
    """Return the outputs of items among sources."""
    return frozenset(source for source in sources if isinstance(source, LeafKey))


def _names(sources: frozenset[Source]) -> frozenset[str]:
    """Return the parameters among sources."""
    return frozenset(source for source in sources if isinstance(source, str))


# --- leaving the model as it is -----------------------------------------------------------------------------


def _without_communication(model: nn.Module) -> AbstractContextManager[None]:
    """Let modules whose forward waits for other ranks return something of the same form."""
    found = [module for module in model.modules() if isinstance(module, Synchronised)]
    return replaced_forwards({module: functools.partial(_pass_through, module) for module in found})


def _pass_through(module: nn.Module, features: torch.Tensor) -> torch.Tensor:
    """Return something that has the form of a normalisation's result and depends on the same parameters."""
    result = features
    for parameter in module._parameters.values():  # noqa: SLF001 - absent tensors are no Parameter objects
        if parameter is not None:
            result = result + parameter.sum()
    return result
