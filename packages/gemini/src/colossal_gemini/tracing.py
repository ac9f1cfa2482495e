"""Tracing a step before there is any memory for it.

The one idea: the model runs once, forward, loss and backward, with fake tensors in place of its own: they
have shapes and no memory, so a model of any size is traced on any machine in seconds. Hooks on modules and on
what autograd saves say which unit is needed when, exactly as they do in training.

Fake tensors compute on the device that the model will run on, if there is one; what a kernel keeps for
backward may differ between devices.

Not traced: modules that read values of tensors in Python. Such models, and modules in subclasses of tensors
that have no shapes of their own, are refused with the reason; they are traced in their first step instead.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, final

import torch
from attrs import evolve
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry

from colossal_core.errors import CapabilityError, ColossalError
from colossal_core.runtime.batches import Call, check_scalar, loss_of, split_batch
from colossal_core.runtime.blocks import find_blocks
from colossal_core.runtime.borders import hook_border
from colossal_core.runtime.precision import CastBorder, Precision, inner_borders
from colossal_core.runtime.swapping import kept_attributes, replaced_tensors
from colossal_gemini.extents import extent_of
from colossal_gemini.layout import Layout, lay_out
from colossal_gemini.recording import Recorder
from colossal_gemini.trace import Trace

__all__ = ["batch_key", "run_step", "trace_step"]

Criterion = Callable[..., torch.Tensor]


def batch_key(batch: Any, *, trains: bool) -> str:
    """Return what a trace holds for: shapes and dtypes of a batch, and whether gradients are computed."""
    leaves = [
        f"{key}:{tuple(leaf.shape)}:{str(leaf.dtype).removeprefix('torch.')}"
        if isinstance(leaf, torch.Tensor)
        else f"{key}:{leaf!r}"
        for key, leaf in ((pytree.keystr(path), leaf) for path, leaf in pytree.tree_leaves_with_path(batch))
    ]
    return f"{'train' if trains else 'evaluate'} {' '.join(leaves)}"


def trace_step(
    model: nn.Module,
    batch: Any,
    criterion: Criterion | None = None,
    *,
    ranks: int = 1,
    precision: Precision | None = None,
    chunk_bytes: int | None = None,
    recompute: bool = False,
    layout: Layout | None = None,
) -> Trace:
    """Return the trace of a training step, without allocating the model and without changing it.

    Args:
        model: The serial model; may be on the ``meta`` device.
        batch: As for ``booster.forward_backward``: this rank's share. May be on the ``meta`` device, too.
        criterion: ``criterion(outputs, target) -> loss``; None when the outputs carry a ``loss``.
        ranks: Among how many ranks chunks are divided.
        precision: What the model computes in; fp32 by default.
        chunk_bytes: Most bytes of a chunk; None to choose it.
        recompute: Whether blocks run again in backward, as with ``Recompute()``.
        layout: The chunks, where they are known already.

    Raises:
        CapabilityError: The model does not run on fake tensors.
        UsageError: Batch, criterion or loss are not as documented.
    """
    precision = Precision("fp32") if precision is None else precision
    if layout is None:
        layout = lay_out(model, precision, ranks=ranks, chunk_bytes=chunk_bytes)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=[]))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")  # of code that runs a second time in training
            stack.enter_context(kept_attributes(model))
            stack.enter_context(fake)
            twins = _make_twins(model, layout, device)
            stack.enter_context(replaced_tensors(model, twins))
            stack.enter_context(_borders(model, precision))
            if recompute:
                stack.enter_context(_recomputed(model))
            call = split_batch(_fake_batch(batch, device), device)
            stack.enter_context(torch.enable_grad())
            recorder = _recorder(layout, twins, batch_key(batch, trains=True))
            return run_step(model, call, criterion, layout, recorder, twins=twins)
    except ColossalError:
        raise
    except Exception as err:
        reason = "forward looks at values" if isinstance(err, _VALUES) else type(err).__name__
        raise CapabilityError(
            f"{type(model).__name__} does not run on tensors without values: {reason}: {_first_line(err)}",
            hint="train without fit(): the first step is traced while it runs",
        ) from err


_VALUES = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)
"""What fake tensors raise when somebody wants to know what is in them."""


def _first_line(err: Exception) -> str:
    """Return the beginning of what an error says."""
    return next(iter(str(err).splitlines()), "")


def _recorder(layout: Layout, twins: Mapping[Any, torch.Tensor], key: str) -> Recorder:
    """Return a recorder that leaves out the memory of parameters."""
    values = {twins[parameter].untyped_storage()._cdata for parameter in layout.chunk_of}
    return Recorder(
        layout.chunks,
        key=key,
        excludes=lambda one: one.untyped_storage()._cdata in values,
    )


def _make_twins(model: nn.Module, layout: Layout, device: torch.device) -> dict[Any, torch.Tensor]:
    """Return a fake tensor for each parameter and buffer of a model, inside a fake mode."""
    twins: dict[Any, torch.Tensor] = {}
    for parameter in model.parameters():
        dtype = layout.dtypes.get(parameter, parameter.dtype)
        empty = torch.empty(parameter.shape, dtype=dtype, device=device)
        twins[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        twins[buffer] = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
    return twins


def _fake_batch(batch: Any, device: torch.device) -> Any:
    """Return a batch of fake tensors of the same form."""

    @functools.cache
    def make(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return torch.empty(leaf.shape, dtype=leaf.dtype, device=device, requires_grad=leaf.requires_grad)

    return pytree.tree_map(make, batch)


@contextmanager
def _borders(model: nn.Module, precision: Precision) -> Iterator[None]:
    """Cast what enters and leaves the model as training does."""
    with ExitStack() as stack:
        if precision.is_narrow:
            pairs = [(model, CastBorder(precision.compute, torch.float32)), *inner_borders(model, precision)]
            for module, border in pairs:
                for handle in hook_border(module, border):
                    stack.callback(handle.remove)
        yield


@contextmanager
def _recomputed(model: nn.Module) -> Iterator[None]:
    """Let the repeated blocks of a model run again in backward, within their hooks."""
    modules = dict(model.named_modules())
    blocks = [modules[name] for name in find_blocks(model)]
    for block in blocks:
        run = functools.partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
        vars(block)["forward"] = run
    yield  # attributes are put back by kept_attributes


def run_step(
    model: nn.Module,
    call: Call,
    criterion: Criterion | None,
    layout: Layout,
    recorder: Recorder,
    *,
    twins: Mapping[Any, torch.Tensor] | None = None,
) -> Trace:
    """Run forward, loss and backward under a recorder; gradients are dropped as they arrive.

    Args:
        model: A model whose parameters are all there.
        call: A batch.
        criterion: The loss.
        layout: Its chunks.
        recorder: A recorder of these chunks.
        twins: What stands in place of the parameters that the layout knows.
    """
    seen = {parameter: (twins or {}).get(parameter, parameter) for parameter in layout.chunk_of}
    buffers = [(twins or {}).get(buffer, buffer) for buffer in model.buffers()]
    batch = pytree.tree_leaves((call.args, call.kwargs, call.target))
    # Each p.grad shows one number in the shape of its parameter from the first step on.
    guards = [tensor.detach().new_empty(()) for tensor in seen.values() if tensor.requires_grad]
    with _Watch(model, layout, recorder, seen) as watch:
        existing = [*buffers, *guards, *(leaf for leaf in batch if isinstance(leaf, torch.Tensor))]
        recorder.begin(existing)
        try:
            with _Flop(recorder):
                with watch.packing():
                    outputs = model(*call.args, **call.kwargs)
                loss = loss_of(outputs, call, criterion)
                check_scalar(loss)
                # As the executor weighs a loss: these numbers live until backward has ended.
                total = torch.ones((), dtype=torch.float64, device=loss.device)
                part = 1.0 / total
                mean = loss.detach().double() * part
                factor = part * 1
                (loss * (factor * 1.0).to(loss.dtype)).backward()
            del outputs, mean
            watch.settle()
            extents = (extent_of((call.args, dict(call.kwargs))),)
            return evolve(recorder.finish(), extents=extents)
        finally:
            recorder.cancel()


@final
class _Flop(TorchDispatchMode):
    """Counts the operations that take most time: products of matrices, convolutions, attention."""

    def __init__(self, recorder: Recorder) -> None:
        """Know who is told."""
        start: Any = super().__init__  # not annotated in torch
        start()
        self._recorder = recorder

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation and count it."""
        result = func(*args, **(kwargs or {}))
        count = flop_registry.get(func.overloadpacket)
        if count is not None:
            self._recorder.add_flop(int(count(*args, **(kwargs or {}), out_val=result)))
        return result


@final
class _Watch:
    """Tells a recorder what a model needs, from hooks like those of training."""

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        recorder: Recorder,
        seen: Mapping[nn.Parameter, torch.Tensor],
    ) -> None:
        """Know what is needed where.

        Args:
            model: The model.
            layout: Its chunks.
            recorder: Who is told.
            seen: What modules see in place of each parameter.
        """
        self._model, self._layout, self._recorder, self._seen = model, layout, recorder, seen
        self._units = {chunk: unit for unit, chunks in layout.units.items() for chunk in chunks}
        self._storages = {
            tensor.untyped_storage()._cdata: layout.chunk_of[parameter] for parameter, tensor in seen.items()
        }
        self._is_forward = False
        self._missing = [set[int]() for _ in layout.chunks]
        self._held, self._left = set[int](), set[int]()
        self._message: torch.Tensor | None = None
        self._stack = ExitStack()

    def __enter__(self) -> _Watch:
        """Install hooks."""
        for path, module in self._model.named_modules():
            if next(module.parameters(), None) is None:
                continue
            enter = functools.partial(self._enter, self._layout.unit_of(path))
            self._stack.callback(module.register_forward_pre_hook(enter, prepend=True).remove)
        for number, (parameter, tensor) in enumerate(self._seen.items()):
            if tensor.requires_grad:
                chunk = self._layout.chunk_of[parameter]
                self._missing[chunk].add(number)
                arrive = functools.partial(self._arrive, chunk, number)
                handle = tensor.register_post_accumulate_grad_hook(arrive)
                self._stack.callback(handle.remove)
        return self

    def __exit__(self, *_: object) -> None:
        """Remove hooks."""
        self._stack.close()

    def settle(self) -> None:
        """Let messages end."""
        self._message = None

    @contextmanager
    def packing(self) -> Iterator[None]:
        """Take what runs within for the forward, whose autograd asks for what it saved when it needs it."""
        self._is_forward = True
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            self._is_forward = False

    def _need(self, unit: str, chunk: int | None = None) -> None:
        """Tell of a need: of a unit, or of one chunk of the root where only a backward runs."""
        is_after = torch._C._current_graph_task_id() != -1 and not self._is_forward  # noqa: SLF001 - as residency does
        name = unit or type(self._model).__name__
        needs = self._layout.units.get(unit, ())
        if chunk is not None and is_after and not unit and len(self._layout.units) > 1:
            needs = (chunk,)
        self._recorder.moment(name, "backward" if is_after else "forward", needs)

    def _enter(self, unit: str, _module: nn.Module, _args: Any) -> None:
        """See a module called."""
        self._need(unit)

    def _pack(self, tensor: torch.Tensor) -> Any:
        """Remember whose values autograd saves."""
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return tensor
        chunk = self._storages.get(storage._cdata)
        return tensor if chunk is None else (chunk, tensor)

    def _unpack(self, saved: Any) -> torch.Tensor:
        """See backward read what was saved."""
        if isinstance(saved, torch.Tensor):
            return saved
        chunk, tensor = saved
        self._need(self._units[chunk], chunk)
        found: torch.Tensor = tensor
        return found

    def _arrive(self, chunk: int, number: int, tensor: torch.Tensor) -> None:
        """See a gradient arrive, which then lies in the buffer of its chunk.

        A buffer that is complete leaves, but has memory until the next one comes: that waits for it. What
        arrives meanwhile from other ranks, where the CPU adds it up, may last until the next buffer leaves.
        """
        if chunk not in self._held:
            for left in self._left:
                self._recorder.drop_gradient(left)
            self._left.clear()
            self._held.add(chunk)
            self._recorder.hold_gradient(chunk)
        self._missing[chunk].discard(number)
        tensor.grad = None
        if not self._missing[chunk]:
            self._left.add(chunk)
            if self._layout.ranks > 1 and tensor.device.type == "cpu":
                self._message = tensor.new_empty(self._layout.chunks[chunk].numel)
