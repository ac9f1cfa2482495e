"""The user's optimizer, run on contiguous segments of flat buffers.

The one idea: an optimizer with an elementwise update cannot tell a parameter from a stretch of a buffer, so
all neighbours of one parameter group with one history are updated as a single long tensor: torch's fused
AdamW runs near memory bandwidth on those and four times slower on many small ones. Optimizers that need
shapes get whole parameters.

# Note [History]
torch skips a parameter without gradient entirely: its step count stays behind. A segment has
one step count, so when only some of its parameters had a gradient it is split there, with its state, and the
pieces live on separately.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from attrs import define, field
from torch import nn

from colossal_core.errors import UsageError
from colossal_core.runtime.flat import FlatBuffer, Slot
from colossal_core.runtime.optimizers import optimizer_spec
from colossal_core.runtime.ranges import OwnedRange, Segment, State
from colossal_core.states import Blank, is_like

__all__ = ["OwnedRange", "Segment", "SegmentedOptimizer", "allocated"]

CHUNK_NUMEL = 1 << 20
"""Elements updated by one call of the optimizer: 4 MiB of fp32 gradients stay in the last-level cache
between scaling or casting and the update, so those cost no pass over memory."""


@define(eq=False)
class SegmentedOptimizer:
    """Runs a copy of the user's optimizer on segments.

    The copy shares nothing with the user's object but the values in the parameter groups, which are read
    before each update and written back after it, so schedulers and the user see and change the real ones.
    ``idle`` is the state of parameters that are in no segment, such as frozen ones: kept and shown.
    """

    user: torch.optim.Optimizer
    owned: Sequence[OwnedRange]
    inner: torch.optim.Optimizer = field(init=False)
    segments: list[Segment] = field(init=False, factory=list)
    idle: dict[torch.Tensor, State] = field(init=False, factory=dict)
    is_flat: bool = field(init=False)
    _present: OwnedRange | None = field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        """Copy the optimizer, cut the segments, and take over the state that it already has."""
        self.is_flat = optimizer_spec(self.user).shapes == "flat"
        self.inner = _bare_copy(self.user)
        self.cut(self.user.state)
        self.user.state.clear()

    # --- layout ---------------------------------------------------------------------------------------------

    def cut(self, state: Mapping[torch.Tensor, State]) -> None:
        """Cut the owned ranges into segments, and give each its share of a state by parameter.

        Args:
            state: As in ``torch.optim.Optimizer.state``: full state of each parameter; a :class:`Blank` in
                place of a tensor is allocated with zeros.
        """
        self.segments = []
        self.inner.state.clear()
        group_of = {
            parameter: index
            for index, group in enumerate(self.user.param_groups)
            for parameter in group["params"]
        }
        for owned in self.owned:
            run: list[Slot] = []
            key: object = None
            for slot in owned.buffer.slots:
                if slot.parameter not in group_of or not _lies_in(slot, owned.start, owned.stop, owned.stop):
                    self._add_run(owned, run, group_of)
                    run = []
                    continue
                slot_key = (group_of[slot.parameter], _history(slot.parameter, state.get(slot.parameter, {})))
                if run and (slot_key != key or not self.is_flat):
                    self._add_run(owned, run, group_of)
                    run = []
                run.append(slot)
                key = slot_key
            self._add_run(owned, run, group_of)
        self._regroup()
        for owned, segments in itertools.groupby(self.segments, _owned_of):
            for segment in segments:
                self._give_state(segment, state)
            if owned.home is not None:
                owned.home.keep(self.states_in(owned))
        cut = {slot.parameter for owned in self.owned for slot in owned.buffer.slots} & group_of.keys()
        self.idle = {
            parameter: {name: allocated(value, parameter) for name, value in theirs.items()}
            for parameter, theirs in state.items()
            if parameter not in cut
        }

    def state_of_parameters(self) -> dict[torch.Tensor, State]:
        """Return the state by parameter, in the parameters' shapes: what torch would hold, as fresh tensors.

        Only the ranges that this rank owns are filled; under managers that shard, the rest is zero.
        """
        found: dict[torch.Tensor, State] = {}
        for parameter, state in self.idle.items():
            found[parameter] = {name: _copy(value) for name, value in state.items()}
        for segment in self.segments:
            for name, value in self.inner.state.get(segment.leaf, {}).items():
                for slot in segment.slots:
                    target = found.setdefault(slot.parameter, {})
                    if not is_like(name, value, segment.leaf):
                        target[name] = _copy(value)
                        continue
                    if name not in target:
                        target[name] = torch.zeros(
                            slot.parameter.shape, dtype=value.dtype, device=value.device
                        )
                    lo, hi = max(segment.start, slot.start), min(segment.stop, slot.stop)
                    piece = value.reshape(-1)[lo - segment.start : hi - segment.start]
                    target[name].view(-1)[lo - slot.start : hi - slot.start].copy_(piece)
        return found

    def tensor_states(self) -> Iterator[tuple[Segment, str, torch.Tensor]]:
        """Iterate over the states that are shaped like their segment."""
        for segment in self.segments:
            for name, value in self.inner.state.get(segment.leaf, {}).items():
                if is_like(name, value, segment.leaf):
                    yield segment, name, value

    def idle_states(self) -> Iterator[tuple[torch.Tensor, str, torch.Tensor]]:
        """Iterate over the states shaped like their parameter of parameters that are in no segment."""
        for parameter, state in self.idle.items():
            for name, value in state.items():
                if is_like(name, value, parameter):
                    yield parameter, name, value

    def counters(self) -> dict[torch.Tensor, State]:
        """Return the states that are not shaped like their parameter, such as step counts; not copied."""
        found: dict[torch.Tensor, State] = {}
        for parameter, state in self.idle.items():
            found[parameter] = {n: value for n, value in state.items() if not is_like(n, value, parameter)}
        for segment in self.segments:
            for name, value in self.inner.state.get(segment.leaf, {}).items():
                if not is_like(name, value, segment.leaf):
                    for slot in segment.slots:
                        found.setdefault(slot.parameter, {})[name] = value
        return found

    # --- update ---------------------------------------------------------------------------------------------

    def step(
        self,
        scale: Callable[[FlatBuffer], float],
        is_live: Callable[[Slot], bool],
        updated: Callable[[int], None],
    ) -> None:
        """Update every segment whose parameters had a gradient.

        Args:
            scale: Factor of a buffer's gradients: clipping, over what they still have to be divided by.
            is_live: Whether a parameter had a gradient on any rank.
            updated: Told how many owned ranges, from the first, are done, as more of them are.
        """
        for owned in self.owned:
            owned.stage()
        self._split_by_history(is_live)
        self._read_groups()
        live = [segment for segment in self.segments if is_live(segment.slots[0])]
        position = {owned: index for index, owned in enumerate(self.owned)}
        away = [owned for owned, _ in itertools.groupby(live, _owned_of) if owned.home is not None]
        batch: list[Segment] = []
        held = 0
        for segment in live:
            if not batch:
                updated(position[segment.owned])
            if away and segment.owned is away[0] and segment.owned.home is not None:
                self._update(batch, scale)
                batch, held = [], 0
                self._bring(away)
            batch.append(segment)
            # Only gradients that are cast or scaled on the way need to stay in the cache until the update.
            is_touched = segment.owned.keeps_master or scale(segment.owned.buffer) != 1.0
            held += segment.numel if is_touched else 0
            if self.is_flat and held >= _chunk_numel(segment.leaf.device):
                self._update(batch, scale)
                batch, held = [], 0
        self._update(batch, scale)
        self._put_back()
        self._write_groups()

    def _bring(self, away: list[OwnedRange]) -> None:
        """Have the next range that lives elsewhere here instead of the last one, and begin with one more."""
        self._put_back()
        self._present = away.pop(0)
        assert self._present.home is not None
        self._present.home.bring()
        if away and away[0].home is not None:
            away[0].home.start()

    def _put_back(self) -> None:
        """Let the range that is here by :meth:`_bring` live where it does."""
        present, self._present = self._present, None
        if present is not None and present.home is not None:
            present.home.put(self.states_in(present))

    def states_in(self, owned: OwnedRange) -> list[tuple[Segment, State]]:
        """Return the segments of a range with their states."""
        state = self.inner.state
        return [(s, state.get(s.leaf, {})) for s in self.segments if s.owned is owned]

    def _update(self, batch: Sequence[Segment], scale: Callable[[FlatBuffer], float]) -> None:
        """Scale the gradients of some segments, update them, and narrow the masters back into the model."""
        if not batch:
            return
        for segment in batch:
            gradient = segment.slice_of(segment.owned.arrived())
            if gradient.dtype != segment.leaf.dtype:
                gradient = gradient.to(segment.leaf.dtype)
            factor = scale(segment.owned.buffer)
            if factor != 1.0:
                gradient.mul_(factor)
            segment.leaf.grad = gradient.view(segment.leaf.shape)
        self.inner.step()
        for segment in batch:
            segment.leaf.grad = None
            if segment.owned.keeps_master:
                segment.slice_of(segment.owned.values).copy_(segment.leaf.detach().view(-1))

    # --- internals ------------------------------------------------------------------------------------------

    def _add_run(self, owned: OwnedRange, run: Sequence[Slot], group_of: Mapping[torch.Tensor, int]) -> None:
        """Make segments of neighbouring slots of one group: one, or several of at most a chunk each."""
        if not run:
            return
        start, stop = max(run[0].start, owned.start), min(run[-1].stop, owned.stop)
        group = group_of[run[0].parameter]
        if not self.is_flat:
            self.segments.append(
                self._segment(owned, (start, stop), group, tuple(run), run[0].parameter.shape)
            )
            return
        chunk = _chunk_numel(owned.master.device)
        for first in range(start, max(stop, start + 1), chunk):
            last = min(first + chunk, stop)
            inside = tuple(slot for slot in run if _lies_in(slot, first, last, stop))
            self.segments.append(self._segment(owned, (first, last), group, inside, None))

    @staticmethod
    def _segment(
        owned: OwnedRange,
        span: tuple[int, int],
        group: int,
        slots: tuple[Slot, ...],
        shape: torch.Size | None,
    ) -> Segment:
        """Make one segment over ``span`` of the buffer."""
        start, stop = span
        flat = owned.master[start - owned.start : stop - owned.start]
        leaf = nn.Parameter(flat if shape is None else flat.view(shape))
        return Segment(owned, start, stop, group, leaf, slots)

    def _regroup(self) -> None:
        """Give the inner optimizer its parameter groups."""
        self.inner.param_groups = [dict(group, params=[]) for group in self.user.param_groups]
        for segment in self.segments:
            self.inner.param_groups[segment.group]["params"].append(segment.leaf)

    def _give_state(self, segment: Segment, state: Mapping[torch.Tensor, State]) -> None:
        """Assemble the state of a segment from the states of its parameters."""
        states = [state.get(slot.parameter, {}) for slot in segment.slots]
        if not states[0]:
            return
        target: State = {}
        for name, value in states[0].items():
            if not is_like(name, value, segment.slots[0].parameter):
                target[name] = _copy(value)
                continue
            if isinstance(value, Blank):
                dtype = segment.leaf.dtype if value.dtype.is_floating_point else value.dtype
                target[name] = torch.zeros_like(segment.leaf, dtype=dtype)
                continue
            pieces = []
            for slot, theirs in zip(segment.slots, states, strict=True):
                lo, hi = max(segment.start, slot.start), min(segment.stop, slot.stop)
                pieces.append(theirs[name].reshape(-1)[lo - slot.start : hi - slot.start])
            flat = torch.cat(pieces).to(segment.leaf.device)
            # Moments have the dtype of the update, also where torch keeps those of bf16 parameters in bf16.
            wide = flat.to(segment.leaf.dtype) if flat.is_floating_point() else flat
            target[name] = wide.view(segment.leaf.shape)
        self.inner.state[segment.leaf] = target

    def _split_by_history(self, is_live: Callable[[Slot], bool]) -> None:
        """Split segments in which only some parameters had a gradient; see Note [History]."""
        if all(len({is_live(slot) for slot in segment.slots}) == 1 for segment in self.segments):
            return
        pieces: list[Segment] = []
        for segment in self.segments:
            start = segment.start
            runs: list[list[Slot]] = []
            for slot in segment.slots:
                if runs and is_live(runs[-1][-1]) == is_live(slot):
                    runs[-1].append(slot)
                else:
                    runs.append([slot])
            if len(runs) == 1:
                pieces.append(segment)
                continue
            old = self.inner.state.pop(segment.leaf, {})
            for run in runs:
                stop = min(run[-1].stop, segment.stop)
                piece = self._segment(segment.owned, (start, stop), segment.group, tuple(run), None)
                if old:
                    self.inner.state[piece.leaf] = _slice_state(
                        old, segment.leaf, start - segment.start, piece.numel
                    )
                pieces.append(piece)
                start = stop
        self.segments = pieces
        self._regroup()

    def _read_groups(self) -> None:
        """Take the user's current learning rates and other settings."""
        if len(self.inner.param_groups) != len(self.user.param_groups):
            raise UsageError(
                "a parameter group was added without add_param_group()", hint="call add_param_group"
            )
        for mine, theirs in zip(self.inner.param_groups, self.user.param_groups, strict=True):
            mine.update({key: value for key, value in theirs.items() if key != "params"})

    def _write_groups(self) -> None:
        """Show the user what the optimizer itself keeps in its groups."""
        for mine, theirs in zip(self.inner.param_groups, self.user.param_groups, strict=True):
            theirs.update({key: value for key, value in mine.items() if key != "params"})


def _owned_of(segment: Segment) -> OwnedRange:
    """Return the range that a segment lies in."""
    return segment.owned


def _chunk_numel(device: torch.device) -> int:
    """Return how many elements one call updates: on accelerators launches cost more than memory passes."""
    return CHUNK_NUMEL if device.type == "cpu" else 64 * CHUNK_NUMEL


def _bare_copy(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Copy an optimizer without its parameters, state, hooks and patched methods."""
    copy = object.__new__(type(optimizer))
    copy.__dict__.update(optimizer.__dict__)
    copy.__dict__.pop("step", None)  # a scheduler or a profiler patched the user's object, not ours
    copy.state = type(optimizer.state)(dict)
    copy.param_groups = []
    for name, value in optimizer.__dict__.items():
        if isinstance(value, OrderedDict) and name.endswith("_hooks"):
            copy.__dict__[name] = OrderedDict()
    return copy


def _lies_in(slot: Slot, start: int, stop: int, end: int) -> bool:
    """Whether a slot overlaps ``[start, stop)``; one without elements lies where it begins, or at the end."""
    if slot.start < slot.stop:
        return slot.start < stop and slot.stop > start
    return start <= slot.start < stop or slot.start == stop == end


def _copy(value: object) -> object:
    """Copy a state that is a tensor."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def allocated(value: object, parameter: torch.Tensor) -> object:
    """Return zeros shaped like a parameter for a :class:`Blank`, anything else as it is."""
    return torch.zeros_like(parameter, dtype=value.dtype) if isinstance(value, Blank) else value


def _history(parameter: torch.Tensor, state: State) -> tuple[tuple[str, object], ...]:
    """Return what neighbours in one segment have in common: which states there are, and their counters."""
    found: list[tuple[str, object]] = []
    for name, value in state.items():
        if is_like(name, value, parameter):
            found.append((name, None))
        elif isinstance(value, torch.Tensor):
            found.append((name, tuple(value.reshape(-1).tolist())))
        else:
            found.append((name, repr(value)))
    return tuple(found)


def _slice_state(state: State, leaf: torch.Tensor, start: int, numel: int) -> State:
    """Return the state of a stretch of a segment."""
    piece: State = {}
    for name, value in state.items():
        if is_like(name, value, leaf):
            piece[name] = value[start : start + numel]
        else:
            piece[name] = _copy(value)
    return piece
