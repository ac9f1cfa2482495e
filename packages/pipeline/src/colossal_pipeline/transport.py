"""Messages between stages: sent when they are computed, posted before they are needed.

The one idea: every rank knows the lists of actions of all ranks and what flows between stages, so it knows in
which order each other rank sends to it, and posts its receives in that order. Messages need no header and no
tag, and no rank waits for a message that nobody has sent.

# Note [Two directions]
Ranks send to higher ranks on one channel and to lower ranks on another. So between any two ranks each channel
carries messages one way only, and a backend that works off the messages of a pair one after another cannot
come to a standstill.

# Note [Messages that have arrived]
Not every backend tells whether a message has left. But a rank takes its actions in order, and what it sends
comes after all that it needed before: a message from it proves that those which earlier actions needed have
arrived, and their tensors can go.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, final

import torch
from attrs import define, field, frozen

from colossal_core.mesh import GroupSpec
from colossal_core.runtime.collectives import Pending
from colossal_core.schedule import Action, Work
from colossal_pipeline.flow import Flow, LeafKey
from colossal_pipeline.routes import Form, Route, Routes

if TYPE_CHECKING:
    from colossal_core.runtime.context import Context
    from colossal_core.runtime.mesh import Group

__all__ = ["AXIS", "CHANNELS", "Letter", "Timetable", "Transport", "letters_for", "letters_of"]

AXIS = "pipeline"

CHANNELS = ("stages.down", "stages.up")
"""Channels of messages to lower and to higher ranks, in this order; see Note [Two directions]."""


@final
@frozen(cache_hash=True)
class Letter:
    """What one stage sends to another for one micro-batch: values in forward, gradients in backward.

    Attributes:
        route: The tensors, from where they are computed to where they are needed.
        microbatch: The micro-batch.
        is_gradient: Whether their gradients travel, back from the target of the route to its source.
    """

    route: Route
    microbatch: int
    is_gradient: bool

    @property
    def sender(self) -> int:
        """The stage that sends it."""
        return self.route.target if self.is_gradient else self.route.source

    @property
    def receiver(self) -> int:
        """The stage that receives it."""
        return self.route.source if self.is_gradient else self.route.target


def letters_of(action: Action, routes: Routes) -> Iterator[Letter]:
    """Yield what an action gives to other stages."""
    if action.work is Work.FORWARD:
        for route in routes.out_of(action.stage):
            yield Letter(route, action.microbatch, is_gradient=False)
    elif action.work is not Work.WEIGHT:
        for route in routes.back_out_of(action.stage):
            yield Letter(route, action.microbatch, is_gradient=True)


def letters_for(action: Action, routes: Routes) -> Iterator[Letter]:
    """Yield what an action needs from other stages."""
    if action.work is Work.FORWARD:
        for route in routes.into(action.stage):
            yield Letter(route, action.microbatch, is_gradient=False)
    elif action.work is not Work.WEIGHT:
        for route in routes.back_into(action.stage):
            yield Letter(route, action.microbatch, is_gradient=True)


@final
@frozen(eq=False)
class Timetable:
    """Which letters the actions of steps need and give; one object for all steps with equal micro-batches.

    Attributes:
        needs: For each action of this rank, what it needs from other stages.
        gives: For each action of this rank, what it gives to other stages.
        awaited: For each other rank, what it sends to this one, in its order.
        needed: For each letter, which action of its receiver needs it.
        made: For each letter, which action of its sender gives it.
    """

    needs: tuple[tuple[Letter, ...], ...]
    gives: tuple[tuple[Letter, ...], ...]
    awaited: Mapping[int, tuple[Letter, ...]]
    needed: Mapping[Letter, int]
    made: Mapping[Letter, int]

    @staticmethod
    def of(
        placement: Sequence[int], forms: Sequence[Form], actions: Sequence[Sequence[Action]], rank: int
    ) -> Timetable:
        """Write down the letters of a step.

        Args:
            placement: Rank of each stage, along the axis.
            forms: Form of each micro-batch.
            actions: For each rank, what it computes in order.
            rank: This one.
        """
        needs = [
            [tuple(letters_for(action, forms[action.microbatch].routes)) for action in row] for row in actions
        ]
        gives = [
            [tuple(letters_of(action, forms[action.microbatch].routes)) for action in row] for row in actions
        ]
        return Timetable(
            needs=tuple(needs[rank]),
            gives=tuple(gives[rank]),
            awaited={
                other: tuple(
                    letter for given in row for letter in given if placement[letter.receiver] == rank
                )
                for other, row in enumerate(gives)
                if other != rank
            },
            needed=_numbers(needs),
            made=_numbers(gives),
        )


def _numbers(rows: Sequence[Sequence[Sequence[Letter]]]) -> dict[Letter, int]:
    """Return for each letter the number of its action in the row of a rank."""
    return {letter: number for row in rows for number, letters in enumerate(row) for letter in letters}


@final
@define(eq=False)
class Transport:
    """Carries the letters of one step.

    Attributes:
        context: Mesh and collectives.
        placement: Rank of each stage, along the axis.
        forms: Form of each micro-batch.
        timetable: Which letters there are.
        num_actions: For each rank, how many actions it takes.
    """

    context: Context
    placement: Sequence[int]
    forms: Sequence[Form]
    timetable: Timetable
    num_actions: Sequence[int]
    _rank: int = field(init=False)
    _groups: tuple[Group, Group] = field(init=False)
    _awaited: Mapping[int, Iterator[Letter]] = field(init=False)
    _posted: dict[Letter, list[tuple[torch.Tensor, Pending]]] = field(factory=dict, init=False)
    _local: dict[Letter, list[torch.Tensor]] = field(factory=dict, init=False)
    _sent: dict[int, list[tuple[int, torch.Tensor, Pending]]] = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        """Look up the groups."""
        mesh, spec = self.context.mesh, GroupSpec((AXIS,))
        self._rank = mesh.group(spec).index
        down, up = (mesh.group(spec, channel) for channel in CHANNELS)
        self._groups = down, up
        self._awaited = {rank: iter(letters) for rank, letters in self.timetable.awaited.items()}

    def post(self, number: int) -> None:
        """Get ready to receive what an action of this rank will need; nothing behind the last one."""
        for letter in self.timetable.needs[number] if number < len(self.timetable.needs) else ():
            self._post(letter)

    def receive(self, letter: Letter) -> list[torch.Tensor]:
        """Wait for a letter, and return its tensors in the order of the route."""
        if self.placement[letter.sender] == self._rank:
            return self._local.pop(letter)
        self._post(letter)
        parts = self._posted.pop(letter)
        for _, pending in parts:
            pending.wait()
        self._let_go(self.placement[letter.sender], self.timetable.made[letter])
        return [tensor for tensor, _ in parts]

    def send(self, letter: Letter, tensors: Sequence[torch.Tensor]) -> None:
        """Send a letter; returns at once, and keeps its tensors until they have left."""
        rank = self.placement[letter.receiver]
        if rank == self._rank:
            self._local[letter] = list(tensors)
            return
        group, needed = self._groups[rank > self._rank], self.timetable.needed[letter]
        for tensor in tensors:
            if tensor.numel():
                pending = self.context.collectives.send(tensor, group, destination=rank, phase=_phase(letter))
                self._sent.setdefault(rank, []).append((needed, tensor, pending))

    def blank(self, letter: Letter) -> list[torch.Tensor]:
        """Return tensors of a letter's form, to send in place of what cannot be computed."""
        flow = self.forms[letter.microbatch].flow
        return [self._make(flow, key).zero_() for key in letter.route.keys]

    def finish(self) -> None:
        """Wait until everything has left."""
        for rank in list(self._sent):
            self._let_go(rank, self.num_actions[rank])

    def _let_go(self, rank: int, index: int) -> None:
        """Let go of what a rank needed up to one of its actions; see Note [Messages that have arrived]."""
        waiting = []
        for needed, tensor, pending in self._sent.get(rank, ()):
            if needed <= index:
                pending.wait()
            else:
                waiting.append((needed, tensor, pending))
        self._sent[rank] = waiting

    def _post(self, letter: Letter) -> None:
        """Post the receives of a letter, and of all that its sender sends to this rank before it."""
        sender = self.placement[letter.sender]
        if sender == self._rank:
            return
        group = self._groups[self._rank > sender]
        while letter not in self._posted:
            found = next(self._awaited[sender])
            flow = self.forms[found.microbatch].flow
            self._posted[found] = []
            for key in found.route.keys:
                buffer, pending = self._make(flow, key), Pending()
                if buffer.numel():
                    pending = self.context.collectives.receive(
                        buffer, group, source=sender, phase=_phase(found)
                    )
                self._posted[found].append((buffer, pending))

    def _make(self, flow: Flow, key: LeafKey) -> torch.Tensor:
        """Return a tensor of the form of an output."""
        spec = flow.spec(key)
        return torch.empty(spec.shape, dtype=spec.dtype, device=self.context.mesh.device)


def _phase(letter: Letter) -> str:
    """Return how the ledger calls it."""
    return "stage gradients" if letter.is_gradient else "stages"
