"""Which tensor goes from which stage to which: a flow, cut.

The one idea: a stage needs what its calls are made of and another stage computes. It gets it from the stage
that computes it, directly, also past stages in between.

# Note [Modules that are called again]
A module that is called again, with what a later stage computes, is computed there the second time, where its
parameters are held as well. So a norm or an embedding may begin and end a model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import final

from attrs import field, frozen

from colossal_core.errors import CapabilityError
from colossal_pipeline.flow import Flow, LeafKey

__all__ = ["Form", "Route", "Routes", "cut_flow", "stages_of_calls"]


@final
@frozen(order=True, cache_hash=True)
class Route:
    """What one stage sends to another for each micro-batch.

    Attributes:
        source: The stage that computes it.
        target: The stage that needs it.
        keys: The tensors, in the order of the program.
    """

    source: int
    target: int
    keys: tuple[LeafKey, ...]


@final
@frozen(kw_only=True)
class Routes:
    """Everything that stages send to each other for one micro-batch.

    Attributes:
        num_stages: Number of stages.
        stage_of: Stage of each call of the flow.
        last_calls: For each stage the last call that it computes, None for one that computes none.
        routes: All routes, in the order of sources and targets.
        gradients: The same routes with only those tensors whose gradient comes back.
        wanted: For each stage the tensors that others need of it.
        wanted_calls: For each stage the numbers of the calls that these come from.
    """

    num_stages: int
    stage_of: tuple[int, ...]
    last_calls: tuple[int | None, ...]
    routes: tuple[Route, ...]
    gradients: tuple[Route, ...]
    wanted: tuple[frozenset[LeafKey], ...] = field(init=False)
    wanted_calls: tuple[frozenset[int], ...] = field(init=False)

    def __attrs_post_init__(self) -> None:
        """Look up what is asked for with every micro-batch."""
        wanted = tuple(
            frozenset(key for route in self.out_of(stage) for key in route.keys)
            for stage in range(self.num_stages)
        )
        object.__setattr__(self, "wanted", wanted)
        calls = tuple(frozenset(key.call for key in keys) for keys in wanted)
        object.__setattr__(self, "wanted_calls", calls)

    def into(self, stage: int) -> tuple[Route, ...]:
        """Return what a stage receives in forward."""
        return tuple(route for route in self.routes if route.target == stage)

    def out_of(self, stage: int) -> tuple[Route, ...]:
        """Return what a stage sends in forward."""
        return tuple(route for route in self.routes if route.source == stage)

    def back_into(self, stage: int) -> tuple[Route, ...]:
        """Return what a stage receives in backward, as routes of forward."""
        return tuple(route for route in self.gradients if route.source == stage)

    def back_out_of(self, stage: int) -> tuple[Route, ...]:
        """Return what a stage sends in backward, as routes of forward."""
        return tuple(route for route in self.gradients if route.target == stage)


@final
@frozen(eq=False)
class Form:
    """What flows for one micro-batch, and where it goes; one object for all micro-batches of equal shapes.

    Attributes:
        flow: What flows between items.
        routes: What is sent.
    """

    flow: Flow
    routes: Routes


def stages_of_calls(
    flow: Flow, stages: Mapping[str, int], holders: Mapping[str, Iterable[int]] | None = None
) -> tuple[int, ...]:
    """Return the stage of each call; see Note [Modules that are called again].

    Args:
        flow: What flows between items.
        stages: Stage of each item.
        holders: For each parameter of an item, by any of its names, the stages whose rank holds it; None
            before anything is held.
    """
    found: list[int] = []
    for call in flow.calls:
        earliest = max((found[key.call] for key in call.needs), default=0)
        own = stages[call.item]
        is_held = holders is None or all(
            earliest in ranks for name, ranks in holders.items() if name.startswith(f"{call.item}.")
        )
        found.append(earliest if earliest > own and is_held else own)
    return tuple(found)


def cut_flow(
    flow: Flow,
    stages: Mapping[str, int],
    num_stages: int,
    holders: Mapping[str, Iterable[int]],
) -> Routes:
    """Return what has to be sent.

    Args:
        flow: What flows between items.
        stages: Stage of each item.
        num_stages: Number of stages.
        holders: For each parameter, by any of its names, the stages whose rank holds it.

    Raises:
        CapabilityError: A stage needs what a later one computes, or a parameter that it does not hold.
    """
    stage_of = stages_of_calls(flow, stages, holders)
    needs: list[set[LeafKey]] = [set() for _ in range(num_stages)]
    last_calls: list[int | None] = [None] * num_stages
    for number, call in enumerate(flow.calls):
        stage = stage_of[number]
        last_calls[stage] = number
        _check_order(flow, call.needs, stage_of, stage, repr(call.item))
        _check_parameters(call.parameters, holders, stage, repr(call.item))
        needs[stage].update(call.needs)
    _check_parameters(flow.parameters, holders, num_stages - 1, "the loss")
    needs[-1].update(flow.needs)
    found: dict[tuple[int, int], list[LeafKey]] = {}
    for target, keys in enumerate(needs):
        for key in sorted(keys):
            if stage_of[key.call] != target:
                found.setdefault((stage_of[key.call], target), []).append(key)
    routes = tuple(Route(source, target, tuple(keys)) for (source, target), keys in sorted(found.items()))
    backward = (
        Route(route.source, route.target, tuple(key for key in route.keys if key in flow.with_gradient))
        for route in routes
    )
    return Routes(
        num_stages=num_stages,
        stage_of=stage_of,
        last_calls=tuple(last_calls),
        routes=routes,
        gradients=tuple(route for route in backward if route.keys),
    )


def _check_order(
    flow: Flow, needs: Iterable[LeafKey], stage_of: Sequence[int], stage: int, what: str
) -> None:
    """Refuse a cut in which something is needed before it is computed."""
    for key in sorted(needs):
        if stage_of[key.call] > stage:
            raise CapabilityError(
                f"{what} on stage {stage} needs {flow.describe(key)}, which stage {stage_of[key.call]} "
                "computes",
                hint="the model calls its modules in another order than it registers them; register them in "
                "the order of forward, or name with Pipeline(balance=[...]) where stages begin, so that both "
                "are on one stage",
            )


def _check_parameters(
    names: Iterable[str], holders: Mapping[str, Iterable[int]], stage: int, what: str
) -> None:
    """Refuse a cut in which code between modules reads a parameter that is elsewhere."""
    for name in sorted(names):
        if stage not in holders[name]:
            raise CapabilityError(
                f"{what} on stage {stage} is made of parameter {name!r}, which code outside of its module "
                f"reads, and stages {sorted(holders[name])} hold it",
                hint=f"give every stage a copy with Pipeline(everywhere=({name!r},))",
            )
