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

from collections import deque
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

__all__ = ["AXIS", "CHANNELS", "Letter", "Transport", "channel_of", "letters_for", "letters_of"]

AXIS = "pipeline"

CHANNELS = ("stages.down", "stages.up")
"""Channels of messages to lower and to higher ranks; see Note [Two directions]."""


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
@define(eq=False)
class Transport:
    """Carries the letters of one step.

    Attributes:
        context: Mesh and collectives.
        placement: Rank of each stage, along the axis.
        forms: Form of each micro-batch.
        actions: For each rank, what it computes in order.
    """

    context: Context
    placement: Sequence[int]
    forms: Sequence[Form]
    actions: Sequence[Sequence[Action]]
    _rank: int = field(init=False)
    _awaited: Mapping[int, deque[Letter]] = field(init=False)
    _posted: dict[Letter, list[tuple[torch.Tensor, Pending]]] = field(factory=dict, init=False)
    _local: dict[Letter, list[torch.Tensor]] = field(factory=dict, init=False)
    _sent: dict[int, list[tuple[int, torch.Tensor, Pending]]] = field(factory=dict, init=False)
    _needed: dict[Letter, int] = field(factory=dict, init=False)
    _made: dict[Letter, int] = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        """Write down in which order each other rank sends to this one."""
        self._rank = self.context.mesh.group(GroupSpec((AXIS,))).index
        self._awaited = {
            rank: deque(letter for action in row for letter in self._letters(action) if self._is_mine(letter))
            for rank, row in enumerate(self.actions)
            if rank != self._rank
        }
        for row in self.actions:
            for index, action in enumerate(row):
                routes = self.forms[action.microbatch].routes
                self._needed.update(dict.fromkeys(letters_for(action, routes), index))
                self._made.update(dict.fromkeys(letters_of(action, routes), index))

    def post(self, action: Action) -> None:
        """Get ready to receive what an action will need."""
        for letter in letters_for(action, self.forms[action.microbatch].routes):
            self._post(letter)

    def receive(self, letter: Letter) -> list[torch.Tensor]:
        """Wait for a letter, and return its tensors in the order of the route."""
        if self.placement[letter.sender] == self._rank:
            return self._local.pop(letter)
        self._post(letter)
        parts = self._posted.pop(letter)
        for _, pending in parts:
            pending.wait()
        self._let_go(self.placement[letter.sender], self._made[letter])
        return [tensor for tensor, _ in parts]

    def send(self, letter: Letter, tensors: Sequence[torch.Tensor]) -> None:
        """Send a letter; returns at once, and keeps its tensors until they have left."""
        rank = self.placement[letter.receiver]
        if rank == self._rank:
            self._local[letter] = list(tensors)
            return
        group = self.context.mesh.group(GroupSpec((AXIS,)), channel_of(self._rank, rank))
        for tensor in tensors:
            if tensor.numel():
                pending = self.context.collectives.send(tensor, group, destination=rank, phase=_phase(letter))
                self._sent.setdefault(rank, []).append((self._needed[letter], tensor, pending))

    def blank(self, letter: Letter) -> list[torch.Tensor]:
        """Return tensors of a letter's form, to send in place of what cannot be computed."""
        flow = self.forms[letter.microbatch].flow
        return [self._make(flow, key).zero_() for key in letter.route.keys]

    def finish(self) -> None:
        """Wait until everything has left."""
        for rank in list(self._sent):
            self._let_go(rank, len(self.actions[rank]))

    def _let_go(self, rank: int, index: int) -> None:
        """Let go of what a rank needed up to one of its actions; see Note [Messages that have arrived]."""
        waiting = []
        for needed, tensor, pending in self._sent.get(rank, ()):
            if needed <= index:
                pending.wait()
            else:
                waiting.append((needed, tensor, pending))
        self._sent[rank] = waiting

    def _letters(self, action: Action) -> Iterator[Letter]:
        """Yield what an action of any rank gives to other stages."""
        return letters_of(action, self.forms[action.microbatch].routes)

    def _is_mine(self, letter: Letter) -> bool:
        """Whether a letter is for this rank."""
        return self.placement[letter.receiver] == self._rank

    def _post(self, letter: Letter) -> None:
        """Post the receives of a letter, and of all that its sender sends to this rank before it."""
        sender = self.placement[letter.sender]
        if sender == self._rank:
            return
        group = self.context.mesh.group(GroupSpec((AXIS,)), channel_of(sender, self._rank))
        while letter not in self._posted and letter in self._awaited[sender]:
            found = self._awaited[sender].popleft()
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


def channel_of(sender: int, receiver: int) -> str:
    """Return the channel of messages from one rank to another; see Note [Two directions]."""
    return CHANNELS[receiver > sender]


def _phase(letter: Letter) -> str:
    """Return how the ledger calls it."""
    return "stage gradients" if letter.is_gradient else "stages"
