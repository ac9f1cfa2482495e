"""Experts whose weights are stacked in one tensor, cut along their hidden features.

The one idea: a module that keeps matrices ``[expert, out, in]`` is a group of layers in one piece: what it
computes between its first and its last matrix divides among ranks, and its outputs are summands. It is tried
as other groups are (:mod:`~.proving`): outputs, and gradients of what goes in, have to add up over the ranks,
and gradients of weights have to be pieces of the serial ones. Routing is common to all ranks.

Not handled: a bias that is added to the outputs, which every rank would add; such modules stay whole.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from attrs import evolve
from torch import nn
from torch.utils import _pytree as pytree

from colossal_tensor_parallel.candidates import Attribute, UnitCut
from colossal_tensor_parallel.members import pick
from colossal_tensor_parallel.spans import Split
from colossal_tensor_parallel.tracing import Recorded, Trace, copy_module, make_values, own_parameters

__all__ = ["find_experts"]

_logger = logging.getLogger(__name__)

TOLERANCES = {torch.float64: 1e-4, torch.float32: 1e-3}
"""As those of :mod:`~.proving`, for the same reasons."""


def find_experts(model: nn.Module, trace: Trace, degree: int) -> list[UnitCut]:
    """Return the modules of stacked experts for which a cut is proved.

    Args:
        model: The serial model, which stays as it is.
        trace: What its forward showed.
        degree: Number of ranks.
    """
    found: list[UnitCut] = []
    known: dict[object, UnitCut | None] = {}
    for name, module in model.named_modules():
        own = own_parameters(module)
        stacked = [parameter for parameter in own.values() if parameter.dim() == 3]
        if len(stacked) < 2 or name not in trace.calls or name in trace.read_outside or not name:
            continue
        if "forward" in vars(module) or any(True for child in module.children() for _ in child.parameters()):
            continue
        key = (type(module), tuple((key, tuple(value.shape)) for key, value in own.items()))
        if key not in known:
            known[key] = _prove(name, module, trace.calls[name], degree, trace.dtype)
        cut = known[key]
        if cut is not None:
            attributes = tuple(Attribute(name, a.name, a.values) for a in cut.attributes)
            found.append(evolve(cut, name=name, attributes=attributes))
    return found


def _prove(name: str, module: nn.Module, call: Recorded, degree: int, dtype: torch.dtype) -> UnitCut | None:
    """Return the first guess that is right, or None."""
    for kind in dict.fromkeys((dtype, torch.float32)):
        try:
            bench = _Bench(module, call, kind)
        except Exception:
            _logger.debug("the experts %s do not run by themselves", name, exc_info=True)
            continue
        for splits, attributes in _guess(module, bench.width, degree):
            (_, split), *_ = splits.values()
            reason = f"stacked experts, proved: {split.parts[0][2]} hidden features of each divide"
            cut = UnitCut(name=name, kind="experts", splits=splits, attributes=attributes, reason=reason)
            if bench.proves(cut, degree):
                return cut
    return None


def _guess(
    module: nn.Module, width: int, degree: int
) -> Iterator[tuple[dict[str, tuple[int, Split]], tuple[Attribute, ...]]]:
    """Yield splits of parameters, and integers that change."""
    own = own_parameters(module)
    sizes = {size for value in own.values() if value.dim() == 3 for size in value.shape[1:]}
    counts = [size for size in sorted(sizes) if size >= degree and (size != width or len(sizes) == 1)]
    for count in counts:
        options = [list(_options(name, value, count, width)) for name, value in own.items()]
        if not all(options):
            continue
        shares = tuple(Split.whole(count, count).local_size(rank, degree) for rank in range(degree))
        attributes = tuple(
            Attribute("", key, shares)
            for key, value in vars(module).items()
            if type(value) is int and value == count and not key.startswith("_")
        )
        for chosen in itertools.product(*options):
            splits = {name: found for name, found in zip(own, chosen, strict=True) if found is not None}
            yield splits, ()
            if attributes:
                yield splits, attributes


def _options(name: str, value: torch.Tensor, count: int, width: int) -> Iterator[tuple[int, Split] | None]:
    """Yield ways to cut a parameter whose experts have some number of hidden features; None leaves it."""
    del name
    for dim in range(1, value.dim()):
        size = int(value.shape[dim])
        others = [int(other) for at, other in enumerate(value.shape) if at not in {0, dim}]
        if any(other != width for other in others):
            continue
        if size == count:
            yield dim, Split.whole(size, count)
        if size == 2 * count:
            yield dim, Split.whole(size, count, 2)
            yield dim, Split.whole(size, count)
    if value.dim() == 1:
        yield None


class _Bench:
    """A copy of a module of experts, on which guesses are tried."""

    def __init__(self, module: nn.Module, call: Recorded, dtype: torch.dtype) -> None:
        """Run it as it is."""
        self._source = torch.Generator().manual_seed(67)
        self._dtype = dtype
        self._twin = copy_module(module, make_values(self._source, dtype))
        self._slots: dict[str, Any] = self._twin._parameters  # noqa: SLF001 - as torch.func swaps them
        self._whole = {name: value.detach() for name, value in own_parameters(self._twin).items()}
        self._inputs = pytree.tree_map(self._fill, (call.args, call.kwargs))
        first = next(leaf for leaf in pytree.tree_leaves(self._inputs) if isinstance(leaf, torch.Tensor))
        self.width = int(first.shape[-1])
        self._cotangent: torch.Tensor | None = None
        self._serial = self._run(self._whole)
        if not all(bool(found.abs().max() > 0) for found in self._serial):
            raise ValueError("its gradients say nothing")

    def proves(self, cut: UnitCut, degree: int) -> bool:
        """Whether the ranks' runs are the serial one together."""
        outputs: list[torch.Tensor] = []
        names = list(self._whole)
        try:
            runs = []
            for rank in range(degree):
                mine = dict(self._whole)
                for name, (dim, split) in cut.splits.items():
                    mine[name] = pick(self._whole[name], split.spans(rank, degree), dim)
                runs.append(self._run(mine, {a.name: a.values[rank] for a in cut.attributes}))
        except Exception:
            _logger.debug("a guess about %s does not run", cut.name, exc_info=True)
            return False
        for index, whole in enumerate(self._serial):
            found = [run[index] for run in runs]
            at = index - (len(self._serial) - len(names))
            if at < 0:
                outputs.append(whole)
                if not self._close(torch.stack(found).sum(0), whole):
                    return False
                continue
            if names[at] not in cut.splits:
                return False
            dim, split = cut.splits[names[at]]
            pieces = (pick(whole, split.spans(rank, degree), dim) for rank in range(degree))
            if not all(self._close(mine, piece) for mine, piece in zip(found, pieces, strict=True)):
                return False
        return bool(outputs)

    def _run(
        self, values: Mapping[str, torch.Tensor], attributes: Mapping[str, int] | None = None
    ) -> list[torch.Tensor]:
        """Return outputs, gradients of floating inputs, and gradients of parameters."""
        state = vars(self._twin)
        before = {name: state[name] for name in attributes or {}}
        state.update(attributes or {})
        for name, value in values.items():
            self._slots[name] = nn.Parameter(value.clone())
        leaves, spec = pytree.tree_flatten(self._inputs)
        entered: list[torch.Tensor] = []
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
                leaves[index] = leaf.detach().clone().requires_grad_()
                entered.append(leaves[index])
        try:
            args, kwargs = pytree.tree_unflatten(leaves, spec)
            with torch.enable_grad():
                output = self._twin(*args, **kwargs)
        finally:
            state.update(before)
        if self._cotangent is None:
            self._cotangent = torch.randn(output.shape, generator=self._source, dtype=self._dtype)
        wanted = [*entered, *(self._slots[name] for name in values)]
        gradients = torch.autograd.grad((output * self._cotangent).sum(), wanted)
        return [output.detach(), *gradients]

    def _fill(self, leaf: Any) -> Any:
        """Return an argument with values."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if not leaf.is_floating_point():
            return leaf if type(leaf) is torch.Tensor else torch.zeros(tuple(leaf.shape), dtype=leaf.dtype)
        if type(leaf) is torch.Tensor:
            return leaf.to(self._dtype)
        return torch.randn(tuple(leaf.shape), generator=self._source, dtype=self._dtype)

    def _close(self, mine: torch.Tensor, whole: torch.Tensor) -> bool:
        """Whether two tensors are equal but for rounding."""
        if mine.shape != whole.shape:
            return False
        bound = TOLERANCES[self._dtype] * float(whole.abs().max())
        return bool((mine - whole).abs().max() <= bound)
