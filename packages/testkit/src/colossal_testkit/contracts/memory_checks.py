"""What the ranks do for the contract of memory managers. Module-level, so that workers find it."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import attrs
import torch
from torch import nn

from colossal_core.errors import NonFiniteError
from colossal_core.runtime import standstill
from colossal_testkit.engine import engine_of
from colossal_testkit.memory import LiveBytes
from colossal_testkit.models import GPT, TokenLoss, Workload, build_workload, randomise
from colossal_testkit.parity import (
    Recipe,
    Trace,
    boost_workload,
    collect_slabs,
    digest_of,
    share_of,
    take_steps,
)
from colossal_testkit.pool.groups import list_groups
from colossal_testkit.stories import Story, tell, tiny_buffers
from colossal_testkit.stories import Trace as StoryTrace
from colossal_testkit.traffic import Traffic, measure_traffic

if TYPE_CHECKING:
    from colossal_core.plugins import Registry
    from colossal_core.runtime.booster import Booster

__all__ = [
    "Coverage",
    "HeldBytes",
    "StepCost",
    "build_large",
    "build_warm",
    "exchange_state",
    "keep_training_after_release",
    "measure_coverage",
    "measure_live_bytes",
    "measure_step",
    "meet_non_finite",
    "tell_impatiently",
    "tell_twice",
    "train_serial_state",
    "watch_identities",
    "watch_untouched",
]

MakeRegistry = Callable[[], "Registry"]

# Large enough that flags, counters and padding stay below a thousandth of the traffic, a hundredth of the
# memory.
_VOCABULARY, _WIDTH, _HEADS, _LENGTH = 97, 128, 4, 16


@final
@attrs.frozen(kw_only=True)
class StepCost:
    """What one step moved.

    Attributes:
        num_elements: Trainable elements of the serial model.
        traffic: By the ledger.
        num_booked: Collectives of the ledger in the whole run, without those that are made of messages.
        num_issued: Collectives that torch saw in the whole run; None when its record was too short.
    """

    num_elements: int
    traffic: Traffic
    num_booked: int
    num_issued: int | None


@final
@attrs.frozen(kw_only=True)
class HeldBytes:
    """What one rank holds after a step, before gradients are cleared.

    Attributes:
        num_elements: Trainable elements of the serial model.
        held_bytes: Bytes that are alive.
        estimated_bytes: What the manager's ``estimate`` says, from the table alone.
    """

    num_elements: int
    held_bytes: int
    estimated_bytes: int


@final
@attrs.frozen(kw_only=True)
class Coverage:
    """Which elements one rank holds: name and state to half-open ranges of the flattened parameter."""

    ranges: Mapping[tuple[str, str], Sequence[tuple[int, int]]]
    num_elements: Mapping[str, int]


def build_large(*, num_samples: int = 12, num_steps: int = 3) -> Workload:
    """Build a GPT in fp32 with some 290 thousand trainable elements, under AdamW."""
    model = GPT(vocabulary=_VOCABULARY, width=_WIDTH, heads=_HEADS, length=_LENGTH)
    randomise(model, seed=3)
    source = torch.Generator().manual_seed(5)
    batches = []
    for _ in range(num_steps):
        ids = torch.randint(0, _VOCABULARY, (num_samples, _LENGTH + 1), generator=source)
        batches.append((ids[:, :-1], ids[:, 1:]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return Workload(model=model, optimizer=optimizer, batches=batches, criterion=TokenLoss())


def build_warm(*, name: str, num_warm_steps: int = 2) -> Workload:
    """Build a workload that has taken some steps already, so that its optimizer has a state."""
    work = build_workload(name)
    for inputs, target in work.batches[:num_warm_steps]:
        work.criterion(work.model(inputs), target).backward()
        work.optimizer.step()
        work.optimizer.zero_grad()
    return attrs.evolve(work, batches=work.batches[num_warm_steps:])


def tell_impatiently(story: Story) -> StoryTrace:
    """Play a story, and find out soon when ranks wait for each other."""
    before = standstill.PATIENCE_SECONDS
    vars(standstill).update(PATIENCE_SECONDS=0.3)
    try:
        return tell(story)
    finally:
        vars(standstill).update(PATIENCE_SECONDS=before)


def tell_twice(story: Story) -> tuple[StoryTrace, StoryTrace]:
    """Play a story with buffers of the usual size, and with many small ones that leave during backward."""
    one_buffer = tell(story)
    with tiny_buffers():
        return one_buffer, tell(story)


def measure_step(
    recipe: Recipe, pieces: Sequence[object], settings: Mapping[str, object], registry: MakeRegistry | None
) -> StepCost:
    """Return what the last step of a run moved."""
    started_ns = time.time_ns()
    booster, work = boost_workload(recipe, pieces, settings, registry)
    num_elements = sum(parameter.numel() for parameter in work.model.parameters() if parameter.requires_grad)
    _train(booster, work)
    groups = list_groups(started_ns)
    counts = [group.num_collectives for group in groups]
    ledger = engine_of(booster).context.collectives.ledger
    return StepCost(
        num_elements=num_elements,
        traffic=measure_traffic(booster.last_traffic),
        num_booked=sum(ledger.counts.values()) - ledger.num_by_messages,
        num_issued=None if None in counts else sum(count or 0 for count in counts),
    )


def measure_live_bytes(
    recipe: Recipe, pieces: Sequence[object], settings: Mapping[str, object], registry: MakeRegistry | None
) -> HeldBytes:
    """Return what is alive after a step besides the batches, gradients included."""
    with LiveBytes() as live:
        booster, work = boost_workload(recipe, pieces, settings, registry)
        context, manager = engine_of(booster).context, engine_of(booster).manager
        num_elements = sum(entry.numel for entry in context.table if entry.trainable)
        estimate = manager.estimate(context.table, context.precision)
        _train(booster, work)
        live.label("batches", [tensor for batch in work.batches for tensor in batch])
        report = live.current()
    held = report.total_bytes - report.bytes_of("batches")
    return HeldBytes(num_elements=num_elements, held_bytes=held, estimated_bytes=sum(estimate.values()))


def measure_coverage(
    recipe: Recipe, pieces: Sequence[object], settings: Mapping[str, object], registry: MakeRegistry | None
) -> Coverage:
    """Return which elements of which state this rank publishes as places, after some steps."""
    booster, work = boost_workload(recipe, pieces, settings, registry)
    _train(booster, work)
    ranges: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for place in engine_of(booster).manager.places():
        held = ranges.setdefault((place.key[1], place.state), [])
        held.append((place.start, place.start + place.tensor.numel()))
    table = engine_of(booster).context.table
    return Coverage(
        ranges=ranges, num_elements={entry.name: entry.numel for entry in table if entry.trainable}
    )


def exchange_state(
    recipe: Recipe, pieces: Sequence[object], settings: Mapping[str, object], registry: MakeRegistry | None
) -> tuple[Trace, dict[str, torch.Tensor]]:
    """Take two steps, load the optimizer's own state dict, take the rest; return trace and last state."""
    booster, work = boost_workload(recipe, pieces, settings, registry)
    first, rest = (attrs.evolve(work, batches=part) for part in (work.batches[:2], work.batches[2:]))
    losses, norms = take_steps(recipe, booster, first)
    work.optimizer.load_state_dict(work.optimizer.state_dict())
    more_losses, more_norms = take_steps(recipe, booster, rest)
    slabs = collect_slabs(booster, work.model)
    trace = Trace(losses=[*losses, *more_losses], norms=[*norms, *more_norms], slabs=slabs)
    return trace, _flatten_state(work.optimizer)


def train_serial_state(recipe: Recipe) -> dict[str, torch.Tensor]:
    """Return the last optimizer state of the plain run."""
    work = recipe.build()
    for inputs, target in work.batches:
        work.criterion(work.model(inputs), target).backward()
        work.optimizer.step()
        work.optimizer.zero_grad()
    return _flatten_state(work.optimizer)


def _flatten_state(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return every tensor of a state dict by parameter number and name of the state."""
    state = optimizer.state_dict()["state"]
    return {
        f"{name} of parameter {number}": torch.as_tensor(value).clone()
        for number, values in state.items()
        for name, value in values.items()
    }


def watch_untouched(
    recipe: Recipe, pieces: Sequence[object], settings: Mapping[str, object], registry: MakeRegistry | None
) -> list[str]:
    """Return the parameters whose every bit is as before training."""
    before = {name: value.detach().clone() for name, value in recipe.build().model.named_parameters()}
    booster, work = boost_workload(recipe, pieces, settings, registry)
    _train(booster, work)
    with booster.full_parameters(work.model) as full:
        return sorted(name for name, value in full.items() if torch.equal(value, before[name]))


def watch_identities(
    recipe: Recipe, pieces: Sequence[object], settings: Mapping[str, object], registry: MakeRegistry | None
) -> list[str]:
    """Return what is another object after boosting and training: names of parameters, or the model."""
    work = recipe.build()
    model, kind = work.model, type(work.model)
    before = dict(model.named_parameters(remove_duplicate=False))
    groups = work.optimizer.param_groups
    booster, boosted = boost_workload(recipe, pieces, settings, registry, work=work)
    _train(booster, boosted)
    after = dict(boosted.model.named_parameters(remove_duplicate=False))
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) is not after.get(name))
    if boosted.model is not model or type(boosted.model) is not kind:
        changed.append("the model")
    if boosted.optimizer.param_groups is not groups:
        changed.append("the parameter groups")
    return changed


def meet_non_finite(
    recipe: Recipe,
    pieces: Sequence[object],
    settings: Mapping[str, object],
    registry: MakeRegistry | None,
    guilty: int,
) -> dict[str, Any]:
    """Train one step, then one in which a single data rank's gradients are NaN, then one more.

    Returns:
        ``raised``: the text of the error of the second step, or nothing; ``kept``: whether that step changed
        no weight; ``skipped``: how many steps the optimizer counts as skipped; ``finite``: whether all
        weights are finite in the end.
    """
    booster, work = boost_workload(recipe, pieces, settings, registry)
    optimizer: Any = work.optimizer
    raised, kept = "", False
    for step, batch in enumerate(work.batches[:3]):
        inputs, target = share_of(batch, booster.data_rank, booster.data_degree)
        if step == 1 and booster.data_rank == guilty:
            target = torch.full_like(target, math.nan)
        work.criterion(work.model(inputs), target).backward()
        before = _digest(booster, work.model)
        try:
            optimizer.step()
        except NonFiniteError as err:
            raised = str(err)
        if step == 1:
            kept = _digest(booster, work.model) == before
        optimizer.zero_grad()
    with booster.full_parameters(work.model) as full:
        finite = all(bool(torch.isfinite(value).all()) for value in full.values())
    return {"raised": raised, "kept": kept, "skipped": optimizer.skipped_steps, "finite": finite}


def keep_training_after_release(
    recipe: Recipe, pieces: Sequence[object], settings: Mapping[str, object], registry: MakeRegistry | None
) -> tuple[bool, bool]:
    """Release the model; return whether it has the values that it had, and whether it trains alone."""
    booster, work = boost_workload(recipe, pieces, settings, registry)
    _train(booster, work)
    before = _digest(booster, work.model)
    model = booster.release(work.model)
    same = digest_of(dict(model.named_parameters())) == before
    inputs, target = work.batches[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.zero_grad()
    losses = []
    for _ in range(2):
        loss = work.criterion(model(inputs), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return same, losses[1] < losses[0]


def _train(booster: Booster, work: Workload) -> None:
    """Take a step on every batch, with the Booster's backward; the gradients of the last one stay."""
    for batch in work.batches:
        work.optimizer.zero_grad()
        share = share_of(batch, booster.data_rank, booster.data_degree)
        booster.forward_backward(work.model, share, work.criterion)
        work.optimizer.step()
    gc.collect()


def _digest(booster: Booster, model: nn.Module) -> str:
    """Return a hash of the full weights; collective."""
    with booster.full_parameters(model) as full:
        return digest_of(full)
