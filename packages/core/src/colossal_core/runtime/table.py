"""The parameter table: the one book that all pieces share.

The one idea: compute runs on plain local tensors with explicit collectives, and this table, not a tensor
subclass, says what they mean. Strategies write it while they cut; the memory manager publishes a second book,
*places*, that says where the values and the states of each parameter live. Norm, checkpoint, report and
simulation read these two books and nothing else, so no piece needs to know another.

# Note [What a part says]
A part is a box of the serial parameter together with the place of that box in this
rank's local tensor. ``holders`` is the group of ranks that hold this very box after the step's reductions:
each counts for ``1 / size`` of it in a norm and one of them writes it to a checkpoint. ``sum_over`` is the
group whose members each computed only a share of the box's gradient, which therefore has to be summed among
them: norm weights in sequence regions, KV heads that several tensor ranks share, an embedding tied across two
stages. Elements of the local tensor that no part covers are padding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, Protocol

import torch
from attrs import evolve, frozen
from torch import nn

from colossal_core.boxes import Box
from colossal_core.errors import ColossalError, UsageError
from colossal_core.mesh import GroupSpec, MeshLayout
from colossal_core.runtime.blocks import find_blocks

__all__ = ["Entry", "Key", "ParameterTable", "Part", "Place"]

Key = tuple[str, str]
"""``(model, name)``: the model's name in this Booster and the parameter's name in the serial model."""


@frozen(kw_only=True)
class Part:
    """A box of a parameter that this rank holds; see Note [What a part says].

    Attributes:
        box: The box in the global index space.
        local: Offset, in this rank's local tensor, of the equally large box that holds it.
        holders: Ranks that hold this very box.
        sum_over: Ranks that each computed a share of its gradient; no axes when each computed all of it.
    """

    box: Box
    local: tuple[int, ...]
    holders: GroupSpec
    sum_over: GroupSpec = GroupSpec()


@frozen(kw_only=True)
class Entry:
    """One parameter or buffer of a serial model, and what this rank holds of it.

    Attributes:
        model: Name of the model in this Booster.
        name: Name in the serial model; of tied names the first.
        aliases: Further ``(model, name)`` of the same tensor.
        kind: ``"parameter"`` or ``"buffer"``.
        shape: Global shape.
        dtype: Element type before boosting.
        trainable: Whether it required gradients when it was boosted.
        unit: Name of the repeated block that it belongs to, ``""`` for the root unit.
        parts: What this rank holds; empty when it holds nothing.
        reduce: Ranks over which gradients are summed.
        divisor: What that sum is divided by. It is not implied by ``reduce``: experts reduce over fewer ranks
            than they divide by.
        is_alone: Whether its model is the only one of this Booster.
    """

    model: str
    name: str
    aliases: tuple[Key, ...] = ()
    kind: Literal["parameter", "buffer"]
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    unit: str = ""
    parts: tuple[Part, ...]
    reduce: GroupSpec
    divisor: int = 1
    is_alone: bool = True

    @property
    def key(self) -> Key:
        """``(model, name)``."""
        return (self.model, self.name)

    @property
    def title(self) -> str:
        """Name for messages: after that of its model where there are several, as in ``model_1.weight``."""
        return self.name if self.is_alone else f"{self.model}.{self.name}"

    @property
    def numel(self) -> int:
        """Elements of the serial parameter."""
        return math.prod(self.shape)


@frozen(kw_only=True, eq=False)
class Place:
    """Where one state of one parameter lives on this rank: an entry of the second book.

    Attributes:
        key: The parameter.
        state: ``"value"``, ``"master"``, ``"gradient"``, or the optimizer's own name of a state
            (``"exp_avg"``).
        tensor: Contiguous tensor that holds the range, 1-D or of the local shape.
        start: First element, in the row-major order of the local tensor, that it holds.
        sharded_over: Ranks among which the manager divided the local tensor, a subset of the holders of its
            parts; no axes when each holds it whole.
        home: Where the tensor lives while nobody reads it; None where it may be read all the time.
    """

    key: Key
    state: str
    tensor: torch.Tensor
    start: int = 0
    sharded_over: GroupSpec = GroupSpec()
    home: Home | None = None

    def present(self) -> AbstractContextManager[None]:
        """Return a context in which the tensor may be read and written."""
        return nullcontext() if self.home is None else self.home.present(self.state)


class Home(Protocol):
    """Where tensors live while nobody reads them."""

    def present(self, state: str) -> AbstractContextManager[None]:
        """Return a context in which the tensors of one state may be read and written."""


class ParameterTable:
    """Every parameter and buffer of the boosted models, in the order of the serial models.

    Built from the serial models before anything is cut; strategies replace entries through :meth:`cut`;
    closed before the memory manager reads it.
    """

    def __init__(self, entries: Iterable[tuple[Entry, torch.Tensor]], layout: MeshLayout) -> None:
        """Hold the entries with their local tensors; most callers want :meth:`serial`."""
        pairs = list(entries)
        self.layout = layout
        self._entries: dict[Key, Entry] = {entry.key: entry for entry, _ in pairs}
        self._tensors: dict[Key, torch.Tensor] = {entry.key: tensor for entry, tensor in pairs}
        self._keys: dict[torch.Tensor, Key] = {tensor: entry.key for entry, tensor in pairs}
        self._closed = False

    @classmethod
    def serial(cls, models: Mapping[str, nn.Module], layout: MeshLayout) -> ParameterTable:
        """Describe uncut models: every rank holds everything, gradients are reduced as the axes say.

        Args:
            models: Models by name; a parameter shared by two models is one entry with an alias.
            layout: Axes of the run.

        Raises:
            UsageError: Two different parameters share memory.
        """
        names: dict[torch.Tensor, list[Key]] = {}
        kinds: dict[torch.Tensor, Literal["parameter", "buffer"]] = {}
        units: dict[Key, str] = {}
        for model, module in models.items():
            blocks = find_blocks(module)
            for kind, named in (
                ("parameter", module.named_parameters(remove_duplicate=False)),
                ("buffer", module.named_buffers(remove_duplicate=False)),
            ):
                for name, tensor in named:
                    names.setdefault(tensor, []).append((model, name))
                    kinds[tensor] = "parameter" if kind == "parameter" else "buffer"
                    units[model, name] = _unit_of(name, blocks)
        refuse_shared_memory(names)
        everyone = layout.everyone()
        entries = []
        for tensor, keys in names.items():
            entry = Entry(
                model=keys[0][0],
                name=keys[0][1],
                aliases=tuple(keys[1:]),
                kind=kinds[tensor],
                shape=tuple(tensor.shape),
                dtype=tensor.dtype,
                trainable=kinds[tensor] == "parameter" and tensor.requires_grad,
                # A tensor tied across blocks is needed by several units: it belongs to the root.
                unit=units[keys[0]] if len({units[key] for key in keys}) == 1 else "",
                parts=(whole_part(tensor.shape, everyone),),
                reduce=layout.gradient_group,
                divisor=layout.gradient_divisor,
                is_alone=len(models) == 1,
            )
            entries.append((entry, tensor))
        return cls(entries, layout)

    def __iter__(self) -> Iterator[Entry]:
        """Iterate over the entries in serial order."""
        return iter(self._entries.values())

    def __len__(self) -> int:
        """Count the entries."""
        return len(self._entries)

    def __getitem__(self, key: Key) -> Entry:
        """Return the entry of ``(model, name)``; aliases resolve to the entry that owns the tensor."""
        found = self._entries.get(key)
        if found is not None:
            return found
        for entry in self:
            if key in entry.aliases:
                return entry
        raise UsageError(
            f"model {key[0]!r} has no parameter or buffer named {key[1]!r}", hint="see named_parameters()"
        )

    def tensor(self, entry: Entry) -> torch.Tensor:
        """Return this rank's local tensor: the Parameter object or buffer inside the model."""
        return self._tensors[entry.key]

    def entry_of(self, tensor: torch.Tensor) -> Entry | None:
        """Return the entry that owns this very object, or None when it is not of the boosted models."""
        key = self._keys.get(tensor)
        return None if key is None else self._entries[key]

    def check_groups(self, groups: Iterable[Mapping[str, Any]]) -> None:
        """Refuse parameter groups that hold what belongs to none of the models.

        Raises:
            UsageError: Naming the group and the shape.
        """
        for index, group in enumerate(groups):
            for parameter in group["params"]:
                if self.entry_of(parameter) is None:
                    raise UsageError(
                        f"parameter group {index} of the optimizer holds a parameter of shape "
                        f"{tuple(parameter.shape)} that belongs to none of the boosted models",
                        hint="build the optimizer from the parameters of the models that you pass to boost",
                    )

    def parameters(self) -> Iterator[tuple[Entry, nn.Parameter]]:
        """Iterate over parameters with their local tensors, in serial order."""
        for entry in self:
            tensor = self._tensors[entry.key]
            if isinstance(tensor, nn.Parameter):
                yield entry, tensor

    def cut(
        self,
        key: Key,
        *,
        parts: Iterable[Part] | None = None,
        reduce: GroupSpec | None = None,
        divisor: int | None = None,
        tensor: torch.Tensor | None = None,
    ) -> Entry:
        """Write what a strategy did to one parameter, and return the new entry.

        Args:
            key: The parameter; an alias is accepted.
            parts: What this rank now holds.
            reduce: New group for the gradient sum; unchanged when None.
            divisor: New divisor; unchanged when None.
            tensor: New local tensor object, where identity could not be kept.

        Raises:
            UsageError: A part lies outside the parameter or the local tensor, two parts overlap, or the
                divisor is below 1.
        """
        if self._closed:
            raise ColossalError(
                f"parameter {key[1]!r} is cut after the table was closed",
                hint="strategies cut in apply() only",
            )
        entry = self[key]
        if tensor is not None:
            self._keys.pop(self._tensors[entry.key])
            self._tensors[entry.key] = tensor
            self._keys[tensor] = entry.key
        changed = evolve(
            entry,
            parts=entry.parts if parts is None else tuple(map(self._normalise, parts)),
            reduce=entry.reduce if reduce is None else self.layout.normalise(reduce),
            divisor=entry.divisor if divisor is None else divisor,
        )
        check_parts(changed, self._tensors[entry.key].shape)
        self._entries[entry.key] = changed
        return changed

    def _normalise(self, part: Part) -> Part:
        """Return a part with one spec for one group.

        Gradients are reduced in lanes by spec; two lanes on one communicator would have no common order.
        """
        normal = self.layout.normalise
        return evolve(part, holders=normal(part.holders), sum_over=normal(part.sum_over))

    def close(self) -> None:
        """Allow no further cuts."""
        self._closed = True

    def agreement_lines(self) -> tuple[str, ...]:
        """Describe the serial models, line by line, for the comparison of ranks before anything is cut."""
        return tuple(
            f"{entry.kind} {entry.model}.{entry.name} {entry.shape} {str(entry.dtype).removeprefix('torch.')}"
            f"{'' if entry.kind == 'buffer' else ' trainable' if entry.trainable else ' frozen'}"
            + (f" tied to {', '.join('.'.join(alias) for alias in entry.aliases)}" if entry.aliases else "")
            for entry in self
        )


def whole_part(shape: Iterable[int], holders: GroupSpec) -> Part:
    """Return the part of a parameter that is held whole."""
    size = tuple(shape)
    return Part(box=Box((0,) * len(size), size), local=(0,) * len(size), holders=holders)


def check_parts(entry: Entry, local_shape: Iterable[int]) -> None:
    """Refuse parts that leave the parameter or the local tensor, or that overlap in either.

    Raises:
        UsageError: As said, naming the parameter and the numbers.
    """
    where = f"of {entry.kind} {entry.title!r}"
    if entry.divisor < 1:
        raise UsageError(
            f"the divisor {where} is {entry.divisor}", hint="it is a number of ranks, at least 1"
        )
    for limits, space, boxes in (
        (tuple(entry.shape), "its global shape", [part.box for part in entry.parts]),
        (tuple(local_shape), "the local tensor", [Box(part.local, part.box.size) for part in entry.parts]),
    ):
        whole = Box((0,) * len(limits), limits)
        for index, box in enumerate(boxes):
            if {len(box.offset), len(box.size)} != {len(limits)} or (
                box.volume and box.intersect(whole) != box
            ):
                raise UsageError(
                    f"part {box} {where} reaches outside {space} {limits}",
                    hint="correct the strategy that wrote it",
                )
            if any(box.intersect(other) is not None for other in boxes[:index]):
                raise UsageError(
                    f"part {box} {where} overlaps another part in {space} {limits}",
                    hint="correct the strategy that wrote them",
                )


def check_groups(entry: Entry, layout: MeshLayout, rank: int) -> None:
    """Refuse groups that contradict each other, which would make norms or gradients silently wrong.

    Whoever takes part in a sum of a part's gradient holds that part afterwards, and counts in one sum only.

    Args:
        entry: What ``rank`` holds of a parameter; buffers have no gradient and pass.
        layout: Axes of the run.
        rank: Global rank that holds it.

    Raises:
        UsageError: As said, naming the parameter and the ranks.
    """
    if entry.kind == "buffer":
        return
    reduce = layout.members(entry.reduce, rank)
    for part in entry.parts:
        holders, sharers = layout.members(part.holders, rank), layout.members(part.sum_over, rank)
        for ranks, word in ((reduce, "reduced over"), (sharers, "summed over")):
            if not set(ranks) <= set(holders):
                raise UsageError(
                    f"the gradient of {entry.title!r} is {word} ranks {ranks}, "
                    f"but {part.box} is held by {holders}",
                    hint="holders are all ranks that have this very box after the step's sums",
                )
        if set(reduce) & set(sharers) != {rank}:
            raise UsageError(
                f"the gradient of {entry.title!r} is reduced over ranks {reduce} and summed over {sharers}, "
                "which would count some of it twice",
                hint="let sum_over name axes that reduce does not",
            )


def refuse_shared_memory(names: Mapping[torch.Tensor, list[Key]]) -> None:
    """Refuse parameters that share memory with another tensor: flat buffers would silently untie them.

    Buffers stay where they are, so they may be views of each other.

    Raises:
        UsageError: Naming both.
    """
    by_storage: dict[int, list[tuple[int, int, bool, str]]] = {}
    for tensor, keys in names.items():
        if tensor.numel() == 0 or tensor.is_meta:
            continue
        reach = sum((int(n) - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        spans = by_storage.setdefault(tensor.untyped_storage()._cdata, [])
        first = int(tensor.storage_offset()) * tensor.element_size()
        last = first + (reach + 1) * tensor.element_size()
        moves = isinstance(tensor, nn.Parameter)
        for start, stop, other_moves, other in spans:
            if first < stop and start < last and (moves or other_moves):
                raise UsageError(
                    f"parameters {other!r} and {keys[0][1]!r} share memory but are different objects",
                    hint="tie them by assigning the Parameter (a.weight = b.weight), or clone one of them",
                )
        spans.append((first, last, moves, keys[0][1]))


def _unit_of(name: str, blocks: Iterable[str]) -> str:
    """Return the block that a parameter name lies in, or ``""``."""
    for block in blocks:
        if name.startswith(block + "."):
            return block
    return ""
