"""Running one stage: the user's own forward, with the modules of other stages left out.

The one idea: forward runs as it is written. Modules of other stages return what was sent from them where this
stage needs it, and else tensors that are absent; modules of this stage compute, and hand out what other
stages need; once the last of them has returned, the rest of forward is left.

# Note [Random numbers]
Every module starts from a seed that depends on the step, the micro-batch and its place in the program, and so
does the code behind it. So dropout draws the same numbers under every schedule and every cut, also in
code between modules that runs on several stages.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, final

import torch
from attrs import define, evolve, field, frozen
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from colossal_core.errors import CapabilityError
from colossal_core.runtime.batches import loss_of
from colossal_core.runtime.draws import mix_seed
from colossal_core.runtime.trees import map_leaves
from colossal_pipeline.absent import Absent
from colossal_pipeline.flow import Flow, LeafKey, Slot, list_leaves

if TYPE_CHECKING:
    from colossal_core.runtime.batches import Call as ModelCall
    from colossal_core.runtime.borders import Crossing
    from colossal_pipeline.items import Item
    from colossal_pipeline.routes import Form, Routes

__all__ = ["Entry", "StageOutcome", "Stages", "enter_graph"]


_CALL = "_call_impl"
"""What torch runs when a module is called: hooks and forward. It is replaced as a whole, so that hooks of the
user run on the stage that computes a module, and nowhere else."""


class _StageEnd(BaseException):
    """The last module of a stage has returned; no exception that user code could catch as one."""


@final
@define(eq=False)
class Entry:
    """A tensor that came from another stage, at the place where it enters the graph of this one.

    Attributes:
        tensor: What forward uses; None once forward is done.
        gradient: What backward has brought, None before and where it brought none.
    """

    tensor: torch.Tensor | None
    gradient: torch.Tensor | None = None


class _Enter(torch.autograd.Function):
    """Gives a tensor from elsewhere a node in the graph, which keeps the gradient that arrives.

    A leaf would do for that, too, but code that writes into what a module returned would then fail.
    """

    @staticmethod
    def forward(ctx: Any, _anchor: torch.Tensor, entry: Entry) -> torch.Tensor:
        """Return the tensor."""
        ctx.entry = entry
        assert entry.tensor is not None
        return entry.tensor

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Keep the gradient."""
        ctx.entry.gradient = gradients[0]
        return None, None


def enter_graph(data: torch.Tensor, anchor: torch.Tensor, *, requires_grad: bool) -> Entry:
    """Return the entry for a tensor from another stage.

    Args:
        data: Its values; the entry owns them from now on.
        anchor: Any leaf that requires gradients.
        requires_grad: Whether it does in the serial model.
    """
    entry = Entry(data.new_empty(0).set_(data))  # type: ignore[call-overload]  # torch's stubs lack this form
    if requires_grad and torch.is_grad_enabled():
        apply: Callable[..., torch.Tensor] = _Enter.apply
        entry.tensor = apply(anchor, entry)
    return entry


@final
@frozen(kw_only=True)
class StageOutcome:
    """What a stage computed for one micro-batch.

    Attributes:
        sent: What other stages need: values without graph, contiguous.
        edges: Where their gradients enter the graph.
        entries: Where tensors of other stages entered it.
        loss: The loss, on the last stage.
        outputs: What the model returned, on the last stage.
        roots: Where backward starts on the last stage, and with which gradient.
    """

    sent: Mapping[LeafKey, torch.Tensor]
    edges: Mapping[LeafKey, GradientEdge]
    entries: Mapping[LeafKey, Entry]
    loss: torch.Tensor | None
    outputs: Any
    roots: tuple[tuple[GradientEdge, torch.Tensor], ...] = ()

    def without_values(self) -> StageOutcome:
        """Return what backward needs: places in the graph, and no tensors but those that the graph keeps."""
        for entry in self.entries.values():
            entry.tensor = None
        return evolve(self, sent={}, loss=None, outputs=None)


@final
class Stages:
    """Runs stages of one model on this rank."""

    def __init__(
        self,
        model: nn.Module,
        items: Sequence[Item],
        crossing: Crossing,
    ) -> None:
        """Know the model.

        Args:
            model: The model, of which this rank may hold parts only.
            items: Its items.
            crossing: Tells borders that outputs go into a loss, and completes what other stages get.
        """
        self._model = model
        self._crossing = crossing
        self.items = tuple(items)
        self._run: _Run | None = None
        self.is_running = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Let items ask the present run what to do, while this is entered: once for all runs of a step."""
        device = next(self._model.parameters()).device
        undo: list[Callable[[], None]] = []
        try:
            for item in self.items:
                self._watch(item, device, undo)
            yield
        finally:
            for step in reversed(undo):
                step()

    def _watch(self, item: Item, device: torch.device, undo: list[Callable[[], None]]) -> None:
        """Let a module compute on its own stage, and elsewhere return what came from there.

        Args:
            item: The module.
            device: Where outputs would be.
            undo: Gets what takes this back.
        """
        # By name, since what cuts layers puts others in the place of those that there were.
        module, name = self._model.get_submodule(item.name), item.name
        slots = vars(module)
        before = slots.get(_CALL)
        compute = getattr(module, _CALL)

        def call(*args: Any, **kwargs: Any) -> Any:
            run = self._run
            if run is None:
                return compute(*args, **kwargs)
            if not run.computes(name):
                return run.leave_out(name, args, kwargs, device)
            run.enter(name, args, kwargs)
            outputs = compute(*args, **kwargs)
            run.leave(name, outputs)
            return outputs

        def restore() -> None:
            del slots[_CALL]
            if before is not None:
                slots[_CALL] = before

        slots[_CALL] = call
        undo.append(restore)

    def run(
        self,
        stage: int,
        call: ModelCall,
        criterion: Callable[..., torch.Tensor] | None,
        form: Form,
        received: Mapping[LeafKey, Entry],
        *,
        seed: int,
    ) -> StageOutcome:
        """Run forward of one stage for one micro-batch, inside of :meth:`watched`.

        Args:
            stage: Which one.
            call: The micro-batch.
            criterion: The loss, or None when outputs carry it.
            form: What flows between items for a micro-batch of this form, and what is sent.
            received: What other stages sent.
            seed: Of the step and the micro-batch.

        Raises:
            CapabilityError: Forward did something else than it did without values.
        """
        routes = form.routes
        run = _Run(form.flow, stage, routes, received, seed, self._crossing)
        is_last = stage == routes.num_stages - 1
        outputs: Any = None
        loss: torch.Tensor | None = None
        if routes.last_calls[stage] is None and not is_last:
            return run.outcome(None, None)
        self.is_running, self._run = True, run
        try:
            with self._crossing.to_loss():
                run.draw("begin", 0)
                outputs = self._model(*call.args, **call.kwargs)
                loss = loss_of(outputs, call, criterion)
        except _StageEnd:
            outputs, loss = None, None
        finally:
            self.is_running, self._run = False, None
        if is_last and isinstance(loss, Absent):
            raise CapabilityError(
                "the loss depends on what was not sent to the last stage: forward took another way than it "
                "did for shapes alone",
                hint="let what forward does depend on shapes, not on values",
            )
        return run.outcome(loss, outputs)


@final
@define(eq=False)
class _Run:
    """One forward of one stage.

    Attributes:
        flow: What flows between items.
        stage: The stage.
        routes: What is sent.
        received: What other stages sent.
        seed: Of the step and the micro-batch.
        crossing: Completes what other stages get.
        counts: How often each item was called.
        sent: What other stages need: values without graph, contiguous.
        edges: Where their gradients enter the graph.
        calls_received: Numbers of the calls that something in ``received`` comes from.
    """

    flow: Flow
    stage: int
    routes: Routes
    received: Mapping[LeafKey, Entry]
    seed: int
    crossing: Crossing
    counts: dict[str, int] = field(factory=dict)
    sent: dict[LeafKey, torch.Tensor] = field(factory=dict)
    edges: dict[LeafKey, GradientEdge] = field(factory=dict)
    calls_received: frozenset[int] = field(init=False)

    def __attrs_post_init__(self) -> None:
        """Look up of which calls anything came."""
        self.calls_received = frozenset(key.call for key in self.received)

    @property
    def wanted(self) -> frozenset[LeafKey]:
        """The tensors that other stages need."""
        return self.routes.wanted[self.stage]

    def outcome(self, loss: torch.Tensor | None, outputs: Any) -> StageOutcome:
        """Return what was computed."""
        missing = self.wanted - self.sent.keys()
        if missing:
            raise CapabilityError(
                f"stage {self.stage} did not compute {self.flow.describe(min(missing))}: forward took "
                "another way than it did for shapes alone",
                hint="let what forward does depend on shapes, not on values",
            )
        return StageOutcome(
            sent=self.sent, edges=self.edges, entries=dict(self.received), loss=loss, outputs=outputs
        )

    def draw(self, where: str, number: int) -> None:
        """Seed the generators; see Note [Random numbers]."""
        seed = self.seed ^ _place_of(where, number)
        # torch.manual_seed also queues a call, with a traceback, for each kind of device that is not in use.
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed(seed)

    def computes(self, name: str) -> bool:
        """Whether the next call of an item is one of this stage."""
        return self.routes.stage_of[self._find(name)] == self.stage

    def enter(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin a call of a module of this stage."""
        number = self._find(name)

        def check(path: str, leaf: Any) -> Any:
            if isinstance(leaf, Absent):
                raise _surprise(name, f"was given a tensor of another stage at {path}")
            return leaf

        # Mostly there are a few plain tensors.
        if kwargs or any(type(leaf) is not torch.Tensor for leaf in args):
            map_leaves(check, (args, kwargs))
        self.draw("call", number)

    def leave(self, name: str, outputs: Any) -> None:
        """Take what other stages need from a call of a module of this stage, or end the stage."""
        number = self._find(name)
        self.counts[name] = self.counts.get(name, 0) + 1
        self._take(number, outputs)
        if number == self.routes.last_calls[self.stage] and self.stage < self.routes.num_stages - 1:
            raise _StageEnd
        self.draw("behind", number)

    def leave_out(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device
    ) -> Any:
        """Return what came from the stage of another module, or nothing but shapes."""
        number = self._find(name)
        self.counts[name] = self.counts.get(name, 0) + 1
        call = self.flow.calls[number]
        spec = call.only_leaf
        if spec is not None and number not in self.calls_received:
            result: Any = Absent.like(spec.shape, spec.dtype, device)
        else:
            result = self._fill(number, args, kwargs, device)
        self.draw("behind", number)
        return result

    def _fill(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> Any:
        """Return what a call on another stage returned, with what came from there."""
        call = self.flow.calls[number]
        arguments = list_leaves((args, kwargs)) if call.passes_arguments else []

        def fill(_: str, leaf: Any) -> Any:
            if not isinstance(leaf, Slot):
                return leaf
            if leaf.is_argument:
                return arguments[leaf.index]
            found = self.received.get(LeafKey(number, leaf.index))
            if found is not None and found.tensor is not None:
                return found.tensor
            spec = call.leaves[leaf.index]
            return Absent.like(spec.shape, spec.dtype, device)

        template = call.template
        return fill("", template) if isinstance(template, Slot) else map_leaves(fill, template)

    def _find(self, name: str) -> int:
        """Return the number of the next call of an item in the flow."""
        number = self.flow.numbers.get((name, self.counts.get(name, 0)))
        if number is None:
            raise _surprise(name, f"is called more than {self.counts.get(name, 0)} times")
        return number

    def _take(self, number: int, outputs: Any) -> None:
        """Check the outputs of a call, and take those that other stages need."""
        if type(outputs) is torch.Tensor and number not in self.routes.wanted_calls[self.stage]:
            return  # one real tensor that nobody else needs: nothing to do, as for most calls
        call = self.flow.calls[number]
        leaves = [leaf for leaf in list_leaves(outputs) if isinstance(leaf, torch.Tensor)]
        if len(leaves) != len(call.leaves):
            raise _surprise(call.item, f"returns {len(leaves)} tensors, not {len(call.leaves)}")
        for index, (leaf, spec) in enumerate(zip(leaves, call.leaves, strict=True)):
            key = LeafKey(number, index)
            if isinstance(leaf, Absent):
                raise _surprise(call.item, "computes with a tensor of another stage that it was not given")
            if key not in self.wanted:
                continue
            leaf = self.crossing.complete(leaf)  # noqa: PLW2901 - of what is divided others get the whole
            if tuple(leaf.shape) != spec.shape or leaf.dtype != spec.dtype:
                found = f"{tuple(leaf.shape)} {leaf.dtype}, not {spec.shape} {spec.dtype}"
                raise _surprise(call.item, f"returns a tensor of {found}")
            data = leaf.detach().contiguous()
            self.sent[key] = (
                data.clone() if spec.is_overwritten and data.data_ptr() == leaf.data_ptr() else data
            )
            if leaf.requires_grad and key in self.flow.with_gradient:
                self.edges[key] = get_gradient_edge(leaf)


@functools.cache
def _place_of(where: str, number: int) -> int:
    """Return a number that tells places in a program apart in each of its bits."""
    return mix_seed(where, number)


def _surprise(name: str, what: str) -> CapabilityError:
    """Return the error for a forward that depends on more than shapes."""
    return CapabilityError(
        f"{name!r} {what}: forward takes another way with these values than it did for shapes alone",
        hint="if the values of the batch decide which modules are called, write Pipeline(flow='values'); if "
        "those of hidden tensors do, keep these modules on one stage with Pipeline(balance=[...])",
    )
