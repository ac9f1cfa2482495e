"""What the ranks do for the contract of strategies. Module-level, so that workers find it."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, final

import attrs
import torch
from torch import nn

from colossal_core.boxes import Box
from colossal_core.building import build_plan
from colossal_core.errors import ColossalError
from colossal_core.interfaces import AbstractStrategy
from colossal_core.plugins import Registry
from colossal_testkit.engine import engine_of
from colossal_testkit.parity import Recipe, boost_workload, share_of
from colossal_testkit.pool.groups import list_groups
from colossal_testkit.traffic import measure_traffic

if TYPE_CHECKING:
    from colossal_core.plan import Plan

__all__ = [
    "HeldPart",
    "Moved",
    "compare_local_values",
    "list_parts",
    "measure_moved",
    "propose_for_every_rank",
    "refuse_to_boost",
    "watch_identities",
]

MakeRegistry = Callable[[], Registry]


@final
@attrs.frozen(kw_only=True)
class HeldPart:
    """One part of the table on one rank.

    Attributes:
        name: Serial name.
        box: Where it is in the whole parameter or buffer.
        holders: Global ranks that the table says hold this very box.
    """

    name: str
    box: Box
    holders: tuple[int, ...]


@final
@attrs.frozen(kw_only=True)
class Moved:
    """What one rank moved in a step, as measured and as its strategies had announced.

    Attributes:
        words: By phase, from the ledger.
        volumes: By phase, from the proposals.
        num_booked: Collectives of the ledger in the whole run, without those that are made of messages.
        num_issued: Collectives that torch saw in the whole run; None when its record was too short.
    """

    words: Mapping[str, float]
    volumes: Mapping[str, float]
    num_booked: int
    num_issued: int | None


def propose_for_every_rank(
    recipe: Recipe,
    piece: object,
    settings: Mapping[str, object],
    registry: MakeRegistry | None,
    world_size: int,
) -> list[str]:
    """Call ``propose`` for each rank of a world that does not exist; return what was wrong.

    That is what it changed, or did not repeat. No process group runs here, so a collective would raise.
    """
    plan = _plan_of(recipe, piece, settings, registry)
    layout = plan.layout(world_size)
    strategy = _strategy_of(plan, piece, registry)
    work = recipe.build()
    before = _describe_state(work.model)
    problems = []
    for rank in range(world_size):
        proposals = [strategy.propose({"model": work.model}, plan, layout, rank) for _ in range(2)]
        if proposals[0] != proposals[1]:
            problems.append(f"the proposal for rank {rank} differs when it is asked for again")
        after = _describe_state(work.model)
        problems.extend(
            f"propose for rank {rank} changed {key}" for key in after if after[key] != before.get(key)
        )
        problems.extend(f"propose for rank {rank} removed {key}" for key in before if key not in after)
    return problems


def watch_identities(
    recipe: Recipe, piece: object, settings: Mapping[str, object], registry: MakeRegistry | None
) -> list[str]:
    """Boost, take a step, and return what is another object, or of another class, than before."""
    work = recipe.build()
    parameters = dict(work.model.named_parameters(remove_duplicate=False))
    modules = {name: type(module) for name, module in work.model.named_modules()}
    model = work.model
    booster, boosted = boost_workload(recipe, [piece], settings, registry, work=work)
    share = share_of(boosted.batches[0], booster.data_rank, booster.data_degree)
    booster.forward_backward(boosted.model, share, boosted.criterion)
    boosted.optimizer.step()
    changed = [] if boosted.model is model and type(model) is modules[""] else ["the model"]
    held = dict(boosted.model.named_parameters(remove_duplicate=False))
    # A pipeline stage lacks names; what it has must be what it was.
    changed += [f"parameter {name}" for name, value in held.items() if value is not parameters.get(name)]
    changed += [
        f"class of module {name}"
        for name, module in boosted.model.named_modules()
        if name in modules and not isinstance(module, modules[name])
    ]
    return changed


def list_parts(
    recipe: Recipe, piece: object, settings: Mapping[str, object], registry: MakeRegistry | None
) -> tuple[dict[str, tuple[int, ...]], list[HeldPart]]:
    """Boost; return the shape of every serial parameter and buffer, and the parts that this rank holds."""
    serial = recipe.build().model
    named = [*serial.named_parameters(), *serial.named_buffers()]
    shapes = {name: tuple(tensor.shape) for name, tensor in named}
    booster, _ = boost_workload(recipe, [piece], settings, registry)
    context = engine_of(booster).context
    parts = [
        HeldPart(
            name=entry.name,
            box=part.box,
            holders=context.mesh.layout.members(part.holders, context.mesh.rank),
        )
        for entry in context.table
        for part in entry.parts
    ]
    return shapes, parts


def compare_local_values(
    recipe: Recipe, piece: object, settings: Mapping[str, object], registry: MakeRegistry | None
) -> list[str]:
    """Boost and return the parts whose local values are not those of the serial model."""
    serial = recipe.build().model
    values = {**dict(serial.named_parameters()), **dict(serial.named_buffers())}
    booster, _ = boost_workload(recipe, [piece], settings, registry)
    table = engine_of(booster).context.table
    wrong = []
    for entry in table:
        local = table.tensor(entry)
        for part in entry.parts:
            inside = tuple(slice(at, at + n) for at, n in zip(part.local, part.box.size, strict=True))
            if not torch.equal(local[inside], values[entry.name][part.box.slices]):
                wrong.append(f"{entry.name} at {part.box}")
    return wrong


def measure_moved(
    recipe: Recipe, piece: object, settings: Mapping[str, object], registry: MakeRegistry | None
) -> Moved:
    """Take two steps and return what the second one moved."""
    started_ns = time.time_ns()
    plan = _plan_of(recipe, piece, settings, registry)
    booster, work = boost_workload(recipe, [piece], settings, registry)
    context = engine_of(booster).context
    serial = {"model": recipe.build().model}
    proposal = _strategy_of(plan, piece, registry).propose(
        serial, plan, context.mesh.layout, context.mesh.rank
    )
    for batch in work.batches[:2]:
        share = share_of(batch, booster.data_rank, booster.data_degree)
        booster.forward_backward(work.model, share, work.criterion)
        work.optimizer.step()
        work.optimizer.zero_grad()
    counts = [group.num_collectives for group in list_groups(started_ns)]
    traffic = measure_traffic(booster.last_traffic)
    ledger = context.collectives.ledger
    return Moved(
        words={name: phase.words for name, phase in traffic.phases.items()},
        volumes=dict(proposal.volumes),
        num_booked=sum(ledger.counts.values()) - ledger.num_by_messages,
        num_issued=None if None in counts else sum(count or 0 for count in counts),
    )


def refuse_to_boost(
    recipe: Recipe, piece: object, settings: Mapping[str, object], registry: MakeRegistry | None
) -> tuple[str, list[str]]:
    """Try to boost; return the error's text, or nothing, and what the attempt changed in the user's model."""
    work = recipe.build()
    before = _describe_state(work.model)
    try:
        boost_workload(recipe, [piece], settings, registry, work=work)
    except ColossalError as err:
        after = _describe_state(work.model)
        return str(err), sorted(
            key for key in before.keys() | after.keys() if before.get(key) != after.get(key)
        )
    return "", []


def _plan_of(
    recipe: Recipe, piece: object, settings: Mapping[str, object], registry: MakeRegistry | None
) -> Plan:
    """Return the plan of a run."""
    keywords: dict[str, Any] = {"precision": "fp64", "max_grad_norm": recipe.max_grad_norm, **settings}
    return build_plan(Registry.discover() if registry is None else registry(), [piece], **keywords)


def _strategy_of(plan: Plan, piece: object, registry: Callable[[], Registry] | None) -> AbstractStrategy:
    """Return the strategy that a plan makes of a piece, connected to the registry."""
    (planned,) = (one for one in plan.strategies if piece in (one.options, one.name, one.qualified_name))
    kind: Any = planned.record.target.load()
    strategy: AbstractStrategy = kind(planned.options)
    strategy.connect(Registry.discover() if registry is None else registry())
    return strategy


def _describe_state(model: nn.Module) -> dict[str, object]:
    """Return everything about a model, and about the process, that a pure function leaves alone."""
    state: dict[str, object] = {
        "the random state": hashlib.sha256(bytes(torch.get_rng_state().tolist())).hexdigest()
    }
    for name, module in model.named_modules():
        hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)  # noqa: SLF001
        attributes = sorted(vars(module))
        state[f"module {name!r}"] = (
            id(module),
            type(module),
            module.training,
            attributes,
            [len(h) for h in hooks],
        )
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in tensors:
        digest = hashlib.sha256(str(tensor.detach().flatten().tolist()).encode()).hexdigest()
        gradient = tensor.grad is None if tensor.is_leaf else None
        facts = (
            id(tensor),
            type(tensor),
            tensor.data_ptr(),
            tuple(tensor.shape),
            tensor.dtype,
            tensor.requires_grad,
        )
        state[f"tensor {name!r}"] = (*facts, tensor._version, gradient, digest)
    return state
