"""Pieces of every shape that a plan must handle, without implementations, in one plugin module."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import attrs

from colossal_core.plugins import AxisSpec, MemoryManagerSpec, StrategySpec, Target, hookimpl


@attrs.frozen(kw_only=True)
class Shards:
    """One axis with one degree."""

    degree: int
    mode: Literal["1d", "2d"] = "1d"
    names: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class Stages:
    """The outermost axis, with an option that has no default."""

    degree: int
    microbatches: int


@attrs.frozen(kw_only=True)
class Grid:
    """An axis in two parts, whose degree follows from theirs."""

    rows: int
    columns: int


@attrs.frozen(kw_only=True)
class Experts:
    """A part of the data axis, the other part being what is left; no axis at all with degree None."""

    degree: int | None = 2


@attrs.frozen(kw_only=True)
class Ring:
    """An axis that core does not know."""

    degree: int = 2


@attrs.frozen(kw_only=True)
class Again:
    """A piece without an axis."""

    every: int = 1


@attrs.frozen(kw_only=True)
class Sharded:
    """Options that several records preset."""

    stage: int = 1
    replicas: int | None = None
    bucket_bytes: float = 1e6


@hookimpl
def colossal_register_strategies() -> Iterable[StrategySpec]:
    """Offer the strategies."""
    target = Target("acme_pieces:Missing")
    yield StrategySpec(
        name="again",
        summary="No axis.",
        options=Target("acme_pieces:Again"),
        target=target,
        phase="recompute",
    )
    yield StrategySpec(
        name="shards",
        summary="One axis.",
        options=Target("acme_pieces:Shards"),
        target=target,
        axes=(AxisSpec(name="tensor", gradients="none"),),
        phase="shard",
        excludes=("grid",),
    )
    yield StrategySpec(
        name="stages",
        summary="The outermost axis.",
        options=Target("acme_pieces:Stages"),
        target=target,
        axes=(AxisSpec(name="pipeline", gradients="none"),),
        phase="partition",
    )
    yield StrategySpec(
        name="grid",
        summary="Two parts of one axis.",
        options=Target("acme_pieces:Grid"),
        target=target,
        axes=(
            AxisSpec(name="rows", part_of="tensor", degree="rows"),
            AxisSpec(name="columns", part_of="tensor", degree="columns"),
        ),
        phase="shard",
    )
    yield StrategySpec(
        name="experts",
        summary="A part of the data axis.",
        options=Target("acme_pieces:Experts"),
        target=target,
        axes=(
            AxisSpec(
                name="expert_data", part_of="data", takes_rest=True, divides_batch=True, gradients="average"
            ),
            AxisSpec(name="expert", part_of="data", divides_batch=True, gradients="average"),
        ),
        phase="shard",
    )
    yield StrategySpec(
        name="ring",
        summary="A new axis.",
        options=Target("acme_pieces:Ring"),
        target=target,
        axes=(AxisSpec(name="ring", inside_of="data", divides_batch=True, gradients="sum"),),
        phase="transform",
    )


@hookimpl
def colossal_register_memory_managers() -> Iterable[MemoryManagerSpec]:
    """Offer one manager under two presets."""
    for stage in (1, 2):
        yield MemoryManagerSpec(
            name=f"sharded{stage}",
            summary="Sharded state.",
            options=Target("acme_pieces:Sharded"),
            target=Target("acme_pieces:Missing"),
            presets={"stage": stage},
            axes=(AxisSpec(name="replica", degree="replicas", divides_batch=True, gradients="average"),),
        )
