"""The strategy ``recompute``: blocks keep only their inputs, and run again when backward needs the rest.

The one idea: torch's non-reentrant checkpoint does the work, around the ``forward`` of each chosen block,
inside its hooks. What is added is that the second run is the first one again, and leaves no trace: it sees
the random state of the first (torch's by the checkpoint, also that of Python and numpy), and it works on
copies of the buffers, as they were before the first run where that one changed them. So running statistics
are updated once, and modules whose outputs depend on a state that they advance (spectral norm) give the same
outputs again.

# Note [Buffers of a recomputed block]
Copying every buffer before every forward would be safe and wasteful: masks and rotary tables are large and
never change. So the first forward of a block copies and compares by value, since torch's fused kernels change
running statistics without a trace in ``_version``. Later ones copy what changed then, and check the rest by
identity and version, which costs nothing.

What the second run cannot reproduce is refused instead of giving other gradients: arguments that the block
changes in place, and parameters that were updated in between. Not handled: state of modules outside buffers,
random generators that a block owns, and containers in arguments that a block changes.
"""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from types import MethodType
from typing import TYPE_CHECKING, Any, Protocol, final, runtime_checkable

import torch
from attrs import define, field
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from colossal_core.errors import CapabilityError, UsageError
from colossal_core.interfaces import AbstractStrategy, Proposal
from colossal_core.plugins import Finding
from colossal_core.runtime.blocks import find_blocks

if TYPE_CHECKING:
    from colossal_core.mesh import MeshLayout
    from colossal_core.pieces import Recompute
    from colossal_core.plan import Plan
    from colossal_core.runtime.context import Context

__all__ = ["RecomputeStrategy", "Restorable"]


@runtime_checkable
class Restorable(Protocol):
    """A tensor of a class of its own that a block may get; kept for backward, it may come back plain."""

    def restorer(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return what makes such a tensor of a plain one again; it keeps no values."""


SHOWN_NAMES = 8
"""Names listed in an error before the rest is counted."""


@final
class RecomputeStrategy(AbstractStrategy):
    """Recomputes every k-th block of each model in backward."""

    def __init__(self, options: Recompute) -> None:
        """Remember the options; see :class:`colossal_core.Recompute`."""
        self.options = options
        self._chosen: dict[str, tuple[str, ...]] = {}

    def propose(self, models: Mapping[str, nn.Module], plan: Plan, layout: MeshLayout, rank: int) -> Proposal:
        """Choose the blocks; see :class:`~.interfaces.AbstractStrategy`.

        Raises:
            UsageError: A pattern matches nothing that is called, or no model has repeated blocks.
        """
        found = {name: self._blocks(model) for name, model in models.items()}
        self._check(models, found)
        self._chosen = {name: blocks[:: self.options.every] for name, blocks in found.items()}
        findings = [
            Finding(
                severity="note",
                code="recompute",
                message=f"model {name!r} has no repeated blocks, so nothing of it is recomputed",
            )
            for name, blocks in found.items()
            if not blocks
        ]
        return Proposal(findings=tuple(findings))

    def apply(self, models: Mapping[str, nn.Module], proposal: Proposal, context: Context) -> None:
        """Give the chosen blocks a forward that keeps its inputs only."""
        known: set[nn.Module] = set()
        for name, model in models.items():
            present = dict(model.named_modules())
            for path in self._chosen[name]:
                block = present.get(path)  # a stage of a pipeline may lack it
                if block is not None and block not in known:
                    known.add(block)
                    context.undo.append(_Recomputation.install(block, path, context.before_rerun))

    def _blocks(self, model: nn.Module) -> tuple[str, ...]:
        """Return the names of the blocks of a model: those that patterns name, or the repeated ones."""
        patterns = self.options.blocks
        if not patterns:
            return find_blocks(model)
        found: list[str] = []
        for name, module in model.named_modules():
            is_inside = any(name.startswith(f"{outer}.") for outer in found)
            if (
                not is_inside
                and _is_called(module)
                and any(fnmatchcase(name, it) for it in patterns)
                and name
            ):
                found.append(name)
        return tuple(found)

    def _check(self, models: Mapping[str, nn.Module], found: Mapping[str, Sequence[str]]) -> None:
        """Refuse patterns without effect, and plans without any block."""
        names = [name for model in models.values() for name, module in model.named_modules() if name]
        for pattern in self.options.blocks:
            if not any(fnmatchcase(name, pattern) for blocks in found.values() for name in blocks):
                inside = [name for name in names if fnmatchcase(name, pattern)]
                reason = f"matches none of the {len(names)} modules"
                if inside:
                    reason = f"matches only {_listed(inside)}, which others contain or which is never called"
                raise UsageError(
                    f"the recompute pattern {pattern!r} {reason}",
                    hint=f"name modules like {_nameable(models)}",
                )
        if not any(found.values()):
            raise UsageError(
                f"no repeated blocks are in {', '.join(map(repr, models))}, so recompute would do nothing",
                hint=f"name what shall be recomputed, Recompute(blocks=(...)), among {_nameable(models)}",
            )


def _is_called(module: nn.Module) -> bool:
    """Whether a module has a forward; containers have none."""
    return not isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict))


def _nameable(models: Mapping[str, nn.Module]) -> str:
    """List what a pattern can name: modules with modules of their own first, else all with parameters."""
    named = [
        (name, module)
        for model in models.values()
        for name, module in model.named_modules()
        if name and _is_called(module) and next(module.parameters(), None) is not None
    ]
    outer = [name for name, module in named if next(module.children(), None) is not None]
    return _listed(outer or [name for name, _ in named]) or "none: the models have no modules inside"


def _listed(names: Sequence[str]) -> str:
    """Return some names and the number of the others."""
    shown = ", ".join(map(repr, names[:SHOWN_NAMES]))
    return shown + (f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else "")


# --- one block ----------------------------------------------------------------------------------------------

_KEY = "_colossal_recomputation"
_BufferKey = tuple[nn.Module, str, bool]
"""A module, a name of a buffer in it, and whether the module is in training."""


def _recomputed_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run the user's forward, keeping its inputs only; set on blocks as their ``forward``."""
    recomputation: _Recomputation = vars(self)[_KEY]
    return recomputation.call(self, args, kwargs)


# A pickle of a bound method names the function and looks it up on the object, which finds the class's own.
_recomputed_forward.__name__ = "forward"


@final
@define(eq=False)
class _Recomputation:
    """What a recomputed block keeps in its ``__dict__``; a copy of the block gets a copy.

    Attributes:
        name: Name of the block, for errors.
        own_forward: The forward that was set on the block and not on its class, or None.
        constant: Buffers that a forward was seen not to change.
        changing: Buffers that a forward was seen to change.
        before_rerun: Called with the block before its forward runs again.
    """

    name: str
    own_forward: Callable[..., Any] | None = None
    constant: set[_BufferKey] = field(factory=set)
    changing: set[_BufferKey] = field(factory=set)
    before_rerun: Sequence[Callable[[nn.Module], None]] = ()

    @classmethod
    def install(
        cls, block: nn.Module, name: str, before_rerun: Sequence[Callable[[nn.Module], None]]
    ) -> Callable[[], None]:
        """Let a block be recomputed, and return what undoes it."""
        own_forward = vars(block).get("forward")
        vars(block)[_KEY] = cls(name, own_forward, before_rerun=before_rerun)
        vars(block)["forward"] = MethodType(_recomputed_forward, block)

        def undo() -> None:
            del vars(block)[_KEY], vars(block)["forward"]
            if own_forward is not None:
                vars(block)["forward"] = own_forward

        return undo

    def call(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run forward; without gradients there is nothing to recompute for."""
        forward = self.own_forward or functools.partial(type(block).forward, block)
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if torch.compiler.is_compiling():  # the compiler recomputes by itself, and traces no bookkeeping
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)
        args = tuple(map(self._without_cache, args))
        kwargs = {key: self._without_cache(argument) for key, argument in kwargs.items()}
        run = _Run(self, block, forward, len(args), tuple(kwargs))
        # Positional, since that is where the checkpoint looks for devices and guards tensors against changes.
        return checkpoint(run, *args, *kwargs.values(), use_reentrant=False)

    def _without_cache(self, argument: Any) -> Any:
        """Return an argument, or None for an empty cache of keys and values, as transformers' checkpoints do.

        The second run would write into it once more, and nothing reads it in training.

        Raises:
            CapabilityError: It is not empty.
        """
        length = getattr(argument, "get_seq_length", None)  # all of transformers' have it
        if not callable(length):
            return argument
        if length():
            raise CapabilityError(
                f"block {self.name!r} is given a {type(argument).__name__} of {length()} tokens, and would "
                "write into it once more when it is recomputed",
                hint="train without it: model.config.use_cache = False",
            )
        return None


@final
class _Run:
    """One call of a recomputed block: the first run of its forward, and all later ones."""

    def __init__(
        self,
        recomputation: _Recomputation,
        block: nn.Module,
        forward: Callable[..., Any],
        num_args: int,
        names: tuple[str, ...],
    ) -> None:
        """Prepare a call.

        Args:
            recomputation: What is known about the block.
            block: The block.
            forward: The user's forward.
            num_args: How many arguments are positional.
            names: Names of the others, which follow.
        """
        self._recomputation, self._block, self._forward = recomputation, block, forward
        self._num_args, self._names = num_args, names
        self._had_first = False
        self._restorers: list[Callable[[torch.Tensor], torch.Tensor] | None] = []
        self._random = _RandomState()
        self._training: list[tuple[nn.Module, bool]] = []
        self._copies: list[tuple[nn.Module, str, torch.Tensor]] = []
        self._watched: list[tuple[str, torch.Tensor, int]] = []

    def __call__(self, *arguments: Any) -> Any:
        """Run forward, for the first time or as the first time."""
        if self._had_first:  # kept under hooks of saved tensors, they have lost their class
            arguments = tuple(
                it if restore is None or isinstance(it, Restorable) else restore(it)
                for it, restore in zip(arguments, self._restorers, strict=True)
            )
        args = arguments[: self._num_args]
        kwargs = dict(zip(self._names, arguments[self._num_args :], strict=True))
        if self._had_first:
            return self._run_again(args, kwargs)
        self._had_first = True
        self._restorers = [it.restorer() if isinstance(it, Restorable) else None for it in arguments]
        return self._run_first(args, kwargs)

    def _run_first(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run forward and remember what it started from.

        Raises:
            CapabilityError: It changed what a second run would have to start from.
        """
        self._training = [(module, module.training) for module in self._block.modules()]
        inputs = [
            (leaf, leaf._version)
            for leaf in pytree.tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor)
        ]
        inner = [pair for pair in inputs if not any(pair[0] is it for it in [*args, *kwargs.values()])]
        self._watched = [("an argument", tensor, version) for tensor, version in inner]
        self._watched += [
            (f"parameter {name!r}", parameter, parameter._version)
            for name, parameter in self._block.named_parameters()
        ]
        buffers = list(self._buffers())
        outputs = self._forward(*args, **kwargs)
        if any(tensor._version != version for tensor, version in inputs):
            raise CapabilityError(
                f"block {self._recomputation.name!r} changes an argument in place, and would be recomputed "
                "from the changed one",
                hint="use the out-of-place form in it, or leave the block out of Recompute(blocks=...)",
            )
        for module, name, buffer, version, copy in buffers:
            self._learn(module, name, buffer, version, copy)
        return outputs

    def _buffers(self) -> Iterator[tuple[nn.Module, str, torch.Tensor, int, torch.Tensor | None]]:
        """Yield module, name, buffer, version, and a copy unless the buffer is known to be constant."""
        for module in self._block.modules():
            for name, buffer in module.named_buffers(recurse=False):
                is_constant = (module, name, module.training) in self._recomputation.constant
                yield module, name, buffer, buffer._version, None if is_constant else buffer.detach().clone()

    def _learn(
        self, module: nn.Module, name: str, buffer: torch.Tensor, version: int, copy: torch.Tensor | None
    ) -> None:
        """Keep the copy of a buffer that forward changed; see Note [Buffers of a recomputed block].

        Raises:
            CapabilityError: It was constant until now, so there is no copy.
        """
        now = dict(module.named_buffers(recurse=False)).get(name)
        is_traced = now is not buffer or buffer._version != version
        key = (module, name, module.training)
        if copy is None:
            if is_traced:
                raise CapabilityError(
                    f"buffer {name!r} of a {type(module).__name__} in block {self._recomputation.name!r} was "
                    "changed by this forward and not by earlier ones, so there is no copy to recompute from",
                    hint="leave the block out of Recompute(blocks=...)",
                )
            return
        if key in self._recomputation.changing or is_traced or not torch.equal(buffer, copy):
            self._recomputation.changing.add(key)
            self._copies.append((module, name, copy))
        else:
            self._recomputation.constant.add(key)

    def _run_again(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run forward from where the first run started, and leave no trace.

        Raises:
            UsageError: What it starts from was changed in between.
        """
        for prepare in self._recomputation.before_rerun:
            prepare(self._block)
        for what, tensor, version in self._watched:
            if tensor._version != version:
                raise UsageError(
                    f"{what} of block {self._recomputation.name!r}, which is recomputed in backward, was "
                    "changed in place between forward and backward",
                    hint="run backward before the update, as torch requires of weights that backward needs",
                )
        modes = [
            (module, module.training) for module, training in self._training if module.training != training
        ]
        for module, training in modes:
            module.training = not training
        present = [(module, name, getattr(module, name)) for module, name, _ in self._copies]
        for module, name, copy in self._copies:
            setattr(module, name, copy.clone())
        try:
            with self._random.restored():
                return self._forward(*args, **kwargs)
        finally:
            for module, name, buffer in present:
                setattr(module, name, buffer)
            for module, training in modes:
                module.training = training


@final
class _RandomState:
    """The state of the generators that torch's checkpoint does not know, at the time of construction."""

    def __init__(self) -> None:
        """Read the states of Python, and of numpy where it was imported."""
        numpy = sys.modules.get("numpy")
        self._python = random.getstate()
        self._numpy = None if numpy is None else numpy.random.get_state()

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Return to this state, and to the present one afterwards."""
        present = _RandomState()
        self._set()
        try:
            yield
        finally:
            present._set()

    def _set(self) -> None:
        """Set the states."""
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
