"""Which activations may be left divided along the tokens: found by running the cut model on one rank.

The one idea: a copy of the model runs with its cut layers in place and nobody to talk to. What leaves its
row layers is then divided among one rank, which is all of it, and shows what becomes of it: which modules
read it, and which functions want the whole. Nothing else is guessed, since what wants the whole gets it in
training as well; see :mod:`~.tokens`.

# Note [Modules that treat each token by itself]
Norms have weights, each rank a share of their gradients, and these are best summed once, with all others. So
a module without children that reads divided activations is tried on its own with random numbers: when some
tokens give the same as all of them, in training and in evaluation, it computes the share of each rank. Others
compute whole, and what enters them is gathered.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, final

import torch
from attrs import evolve, frozen
from torch import nn
from torch.utils import _pytree as pytree

from colossal_core.runtime.collectives import Collectives
from colossal_core.runtime.mesh import Group
from colossal_core.runtime.replacement import Stand, replace_module
from colossal_tensor_parallel.attention import CutAttention
from colossal_tensor_parallel.candidates import UnitCut
from colossal_tensor_parallel.decisions import Decision, ModelPlan, Regions
from colossal_tensor_parallel.draws import Dice, WatchDraws
from colossal_tensor_parallel.layers import CutColumn, CutExperts, CutHead, CutRow, CutTable, Works
from colossal_tensor_parallel.products import Entrance
from colossal_tensor_parallel.spans import split_evenly
from colossal_tensor_parallel.tables import is_plain_table
from colossal_tensor_parallel.tokens import Lot, SplitTokens, plain
from colossal_tensor_parallel.tracing import Trace, copy_module, make_values, own_parameters
from colossal_tensor_parallel.wires import Wire

__all__ = ["find_regions", "solo_wire", "stand_of", "stand_of_unit", "with_shares", "works_of"]

_logger = logging.getLogger(__name__)

MOST_RUNS = 4
"""Runs until no further row layer turns out to be read whole."""

NUM_TOKENS, NUM_FIRST = 5, 2
"""Tokens with which modules are tried, and how many of them make the first piece."""

TOLERANCE = 1e-9
"""Largest difference between tokens computed apart and together, in fp64."""


def stand_of(decision: Decision) -> type[Stand]:
    """Return the class that takes the place of a cut layer."""
    if decision.cut in {"column", "gathered-column"}:
        return CutColumn
    if decision.cut == "row":
        return CutRow
    if decision.form == "embedding":
        return CutTable
    return CutHead if decision.is_head else CutColumn


def works_of(
    decision: Decision,
    module: nn.Module,
    entrance: Entrance,
    dice: Dice,
    *,
    degree: int,
    divides: bool,
) -> Works:
    """Return what the layer that takes a module's place is given on this rank."""
    assert decision.split is not None
    kind = stand_of(decision)
    return Works(
        entrance=entrance,
        size=decision.split.size,
        first=decision.split.spans(entrance.wire.group.index, degree)[0][0],
        is_transposed=decision.form == "transposed",
        gathers=kind is CutColumn and decision.cut != "column",
        dice=dice if decision.drops or decision.cut == "row" else None,
        is_plain=decision.form != "embedding" or is_plain_table(module),
        divides=divides,
        name=decision.name,
    )


def stand_of_unit(unit: UnitCut, entrance: Entrance, dice: Dice) -> tuple[type[Stand], Works]:
    """Return the class that takes the place of a module that is cut in one piece, and what it is given."""
    if unit.kind == "experts":
        return CutExperts, Works(entrance=entrance, size=0, name=unit.name)
    ranks = entrance.wire.group
    _, split = next(iter(unit.splits.values()))
    _, width, heads = split.parts[0]
    first, stop = split_evenly(heads, ranks.size)[ranks.index]
    size = (stop - first) * width
    return CutAttention, Works(entrance=entrance, size=size, first=first, dice=dice, name=unit.name)


def solo_wire() -> Wire:
    """Return a wire with nobody at its other end."""
    alone = Group("self", (0,), 0, None, "none", torch.device("cpu"))
    return Wire(collectives=Collectives(), group=alone)


def find_regions(model: nn.Module, made: ModelPlan, trace: Trace) -> Regions | str:
    """Return what is divided along the tokens, or why nothing can be.

    Args:
        model: The serial model, which stays as it is.
        made: What becomes of its layers.
        trace: What its forward showed.
    """
    excluded: set[str] = set()
    found: Regions | None = None
    for _ in range(MOST_RUNS):
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                run = _DryRun(model, made, trace, excluded)
                found = run.regions()
        except Exception as err:
            _logger.debug("the model does not run with divided activations", exc_info=True)
            return f"it does not run with divided activations: {type(err).__name__}: {str(err)[:120]}"
        if not run.read_whole:
            break
        excluded |= run.read_whole
    if found is None or not found.divided:
        readers = dict.fromkeys(found.gathered) if found is not None else {}
        return "no activations are read token by token" + (
            f"; they are read whole in {', '.join(readers)}" if readers else ""
        )
    return found


@final
class _DryRun:
    """One run of a copy with cut layers and one rank.

    Attributes:
        read_whole: Row layers and tables whose outputs nothing reads token by token.
    """

    def __init__(self, model: nn.Module, plan: ModelPlan, trace: Trace, excluded: set[str]) -> None:
        """Run it."""
        self._plan = plan
        self._model = model
        self._read_outside = trace.read_outside | trace.readers
        self._num_owners = Counter(p for it in model.modules() for p in own_parameters(it).values())
        self._notes: list[tuple[str, str]] = []
        self._lot = Lot(solo_wire(), Dice(0), self._notes)
        self._stack: list[str] = [""]
        self._seen: set[str] = set()
        self._pieces: dict[str, None] = {}
        self._verdicts: dict[object, bool] = {}
        self._gathered: list[str] = []
        self._num_notes = 0
        self.read_whole: set[str] = set()
        call = trace.calls[""]
        if trace.is_fake:
            with torch.device("meta"):
                self._run(_make_meta, call.args, call.kwargs, excluded)
        else:
            make = make_values(torch.Generator().manual_seed(83), trace.dtype)
            self._run(make, call.args, call.kwargs, excluded)

    def regions(self) -> Regions:
        """Return what was seen."""
        return Regions(
            divided=tuple(sorted(self._seen - self.read_whole)),
            pieces=tuple(self._pieces),
            gathered=tuple(dict.fromkeys(self._gathered)),
        )

    def _run(
        self,
        make: Callable[[torch.Tensor], torch.Tensor],
        args: Any,
        kwargs: Any,
        excluded: set[str],
    ) -> None:
        """Put the cut layers into a copy and call it."""
        twin = copy_module(self._model, make)
        entrance = Entrance(self._lot.wire, self._lot)
        for decision in self._plan.decisions:
            if decision.split is not None:
                module = twin.get_submodule(decision.name)
                divides = decision.name not in excluded and stand_of(decision) in {CutRow, CutTable}
                works = works_of(decision, module, entrance, self._lot.dice, degree=1, divides=divides)
                replace_module([twin], decision.name, module, stand_of(decision), works)
        for unit in self._plan.units:
            if unit.kind == "attention":
                stand, works = stand_of_unit(unit, entrance, self._lot.dice)
                replace_module([twin], unit.name, twin.get_submodule(unit.name), stand, works)
        for name, module in twin.named_modules():
            is_leaf = next(module.children(), None) is None and not isinstance(module, Stand)
            if is_leaf and name and "forward" not in vars(module) and not isinstance(module, nn.Identity):
                vars(module)["forward"] = _Probe(self, name, module.forward)
            module.register_forward_pre_hook(lambda _module, _args, name=name: self._stack.append(name))
            module.register_forward_hook(self._leave)
        if make is _make_meta:
            args, kwargs = pytree.tree_map(_to_meta, (args, kwargs))
        twin(*args, **kwargs)

    def _leave(self, _module: nn.Module, _args: Any, outputs: Any) -> None:
        """Note where divided activations come from, and who wanted them whole."""
        place = self._stack.pop()
        for leaf in pytree.tree_leaves(outputs):
            if isinstance(leaf, SplitTokens) and leaf.origin:
                self._seen.add(leaf.origin)
        for reason, origin in self._notes[self._num_notes :]:
            if origin:
                self.read_whole.add(origin)
            self._gathered.append(f"{place or 'the model'} ({reason})")
        self._num_notes = len(self._notes)

    def try_piece(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether a module treats each token by itself; what it is then remembered for."""
        others = pytree.tree_leaves((args[1:], dict(kwargs)))
        if any(isinstance(leaf, torch.Tensor) for leaf in others):
            return False
        module = self._model.get_submodule(name)
        if name in self._read_outside or any(self._num_owners[p] > 1 for p in module.parameters()):
            return False  # others have the whole gradient of its weights, or it has shares of theirs
        scalars = tuple(
            (key, value) for key, value in sorted(vars(module).items()) if type(value) in {int, float, bool}
        )
        shapes = tuple((key, tuple(value.shape)) for key, value in module.named_parameters())
        key = (type(module), shapes, scalars, int(plain(args[0]).shape[-1]), repr(others))
        if key not in self._verdicts:
            self._verdicts[key] = _is_of_tokens(module, int(plain(args[0]).shape[-1]), args[1:], kwargs)
        if self._verdicts[key]:
            self._pieces[name] = None
        return self._verdicts[key]


@frozen(eq=False)
class _Probe:
    """Forward of a module in the copy that tries whether a piece is enough.

    Attributes:
        run: Where that is noted.
        name: Of the module.
        forward: Its own forward.
    """

    run: _DryRun
    name: str
    forward: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run on the piece where that is right."""
        first = args[0] if args else None
        if isinstance(first, SplitTokens) and self.run.try_piece(self.name, args, kwargs):
            return first.like(self.forward(plain(first), *args[1:], **kwargs))
        return self.forward(*args, **kwargs)


def _make_meta(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same shape without memory."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _to_meta(leaf: Any) -> Any:
    """Return a leaf of the arguments without memory."""
    return _make_meta(leaf) if isinstance(leaf, torch.Tensor) else leaf


def _is_of_tokens(module: nn.Module, width: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Try a module on all tokens and on some; see Note [Modules that treat each token by itself]."""
    source = torch.Generator().manual_seed(89)
    try:
        with torch.device("cpu"):  # the run around it may have no memory
            twin = copy_module(module, make_values(source, torch.float64))
            features = torch.randn(2, NUM_TOKENS, width, generator=source, dtype=torch.float64)
        for trains in (False, True):
            twin.train(trains)
            watch = WatchDraws()
            watch.is_open = True
            before = {name: buffer.clone() for name, buffer in twin.named_buffers()}
            with watch if trains else nullcontext():
                whole = twin(features, *args, **kwargs)
                pieces = [
                    twin(piece, *args, **kwargs)
                    for piece in features.tensor_split([NUM_FIRST, NUM_FIRST], dim=1)
                ]
            if watch.num_calls or not isinstance(whole, torch.Tensor) or whole.dim() != features.dim():
                return False
            if any(not torch.equal(buffer, before[name]) for name, buffer in twin.named_buffers()):
                return False
            joined = torch.cat(pieces, dim=1)
            if joined.shape != whole.shape or not torch.allclose(
                joined, whole, rtol=TOLERANCE, atol=TOLERANCE
            ):
                return False
    except Exception:  # noqa: BLE001 - the user's code meets what it was not written for
        return False
    return True


def with_shares(regions: Regions, decisions: Sequence[Decision], model: nn.Module) -> Regions:
    """Return the regions with the parameters of which each rank has a share of the gradient."""
    divided = {decision.name for decision in decisions if decision.cut == "row"} & set(regions.divided)
    shares = [
        f"{name}.bias"
        for name in divided
        if dict(model.get_submodule(name).named_parameters(recurse=False)).get("bias") is not None
    ]
    for name in regions.pieces:
        shares += [f"{name}.{key}" for key, _ in model.get_submodule(name).named_parameters()]
    return evolve(regions, shares=tuple(sorted(shares)))
