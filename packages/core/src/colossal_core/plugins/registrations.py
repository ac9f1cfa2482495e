"""The hooks by which plugins offer records; see :mod:`~.hookspec`, which holds them against their records."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from collections.abc import Iterable

    from colossal_core.plugins.records import (
        CommandSpec,
        DiagnosticSpec,
        MemoryManagerSpec,
        ScheduleSpec,
        ShardingPolicySpec,
        StrategySpec,
    )

__all__ = [
    "PROJECT",
    "colossal_register_commands",
    "colossal_register_diagnostics",
    "colossal_register_memory_managers",
    "colossal_register_pipeline_schedules",
    "colossal_register_sharding_policies",
    "colossal_register_strategies",
]

PROJECT = "colossal"
"""The project name of pluggy, and the prefix of every hook."""

_hookspec = pluggy.HookspecMarker(PROJECT)


@_hookspec
def colossal_register_strategies() -> Iterable[StrategySpec]:
    """Offer pieces that cut the model.

    Example:
        ::

            from colossal_core.plugins import AxisSpec, StrategySpec, Target, hookimpl

            @hookimpl
            def colossal_register_strategies():
                yield StrategySpec(
                    name="halves",
                    summary="Put one half of the model on each rank.",
                    options=Target("acme_halves.options:Halves"),
                    target=Target("acme_halves.strategy:HalvesStrategy"),
                    axes=(AxisSpec(name="tensor", gradients="none"),),
                    phase="shard",
                )

    Called:
        Once for each registry, when the plugin is activated: in every process, on every rank, in the order of
        plugin names. No process group exists yet.

    May:
        Only make records. It must not import torch, communicate, read files, or depend on the rank: ranks
        compare what is active. If it raises, the whole plugin is ``failed`` and none of its records count.

    Args:
        None.

    Returns:
        Any iterable of ``StrategySpec``; a generator is the usual form.

    Added in:
        0.1
    """
    return ()


@_hookspec
def colossal_register_memory_managers() -> Iterable[MemoryManagerSpec]:
    """Offer pieces that own parameters, gradients and optimizer state; a plan uses exactly one.

    Example:
        ::

            from colossal_core.plugins import MemoryManagerSpec, Target, hookimpl

            @hookimpl
            def colossal_register_memory_managers():
                yield MemoryManagerSpec(
                    name="zero2",
                    summary="Shard gradients and optimizer state.",
                    options=Target("colossal_zero.options:Zero"),
                    presets={"stage": 2},
                    target=Target("colossal_zero.manager:Zero2"),
                )

    Called:
        Once for each registry, when the plugin is activated: in every process, on every rank, in the order of
        plugin names. No process group exists yet.

    May:
        Only make records. It must not import torch, communicate, read files, or depend on the rank. If it
        raises, the whole plugin is ``failed`` and none of its records count.

    Args:
        None.

    Returns:
        Any iterable of ``MemoryManagerSpec``.

    Added in:
        0.1
    """
    return ()


@_hookspec
def colossal_register_commands() -> Iterable[CommandSpec]:
    """Offer commands of the ``colossal`` program.

    Example:
        ::

            from colossal_core.plugins import CommandSpec, Target, hookimpl

            @hookimpl
            def colossal_register_commands():
                yield CommandSpec(
                    name="pipeline",
                    summary="Draw pipeline schedules.",
                    target=Target("colossal_pipeline.commands:pipeline"),
                )

    Called:
        Once for each registry, when the plugin is activated, in the order of plugin names. Only the process
        of the ``colossal`` program uses the records; the target is imported when its command runs.

    May:
        Only make records. It must not import torch or click: every ``colossal --help`` would pay for it. If
        it raises, the whole plugin is ``failed``.

    Args:
        None.

    Returns:
        Any iterable of ``CommandSpec``. A name of ours, or of another plugin, is an error that names both
        providers.

    Added in:
        0.1
    """
    return ()


@_hookspec
def colossal_register_diagnostics() -> Iterable[DiagnosticSpec]:
    """Offer checks for ``colossal doctor``.

    Example:
        ::

            from colossal_core.plugins import DiagnosticSpec, Target, hookimpl

            @hookimpl
            def colossal_register_diagnostics():
                yield DiagnosticSpec(
                    code="kernels-compiler",
                    title="A C++ compiler for the CPU kernels",
                    check=Target("colossal_kernels.probe:check_compiler"),
                    fix="install g++ or clang, or set CXX",
                )

    Called:
        Once for each registry, when the plugin is activated, in the order of plugin names. Only ``colossal
        doctor`` uses the records: it imports each check, calls it once, and prints the findings.

    May:
        Only make records. The check itself may import torch, run compilers and touch devices; it must not
        start a process group.

    Args:
        None.

    Returns:
        Any iterable of ``DiagnosticSpec``; each check takes no argument and returns an iterable of
        ``Finding``.

    Added in:
        0.1
    """
    return ()


@_hookspec
def colossal_register_pipeline_schedules() -> Iterable[ScheduleSpec]:
    """Offer orders in which the stages of a pipeline compute.

    Example:
        ::

            from colossal_core.plugins import ScheduleSpec, Target, hookimpl

            @hookimpl
            def colossal_register_pipeline_schedules():
                yield ScheduleSpec(
                    name="eager",
                    summary="Run as many forwards as memory allows.",
                    target=Target("acme_eager.schedule:Eager"),
                )

    Called:
        Once for each registry, when the plugin is activated: in every process, on every rank, in the order of
        plugin names. No process group exists yet.

    May:
        Only make records. It must not import torch, communicate, read files, or depend on the rank. If it
        raises, the whole plugin is ``failed`` and none of its records count.

    Args:
        None.

    Returns:
        Any iterable of ``ScheduleSpec``.

    Added in:
        0.1
    """
    return ()


@_hookspec
def colossal_register_sharding_policies() -> Iterable[ShardingPolicySpec]:
    """Offer plans by which layers of models of some classes are cut.

    Example:
        ::

            from colossal_core.plugins import ShardingPolicySpec, hookimpl

            @hookimpl
            def colossal_register_sharding_policies():
                yield ShardingPolicySpec(
                    name="acme-ranker",
                    summary="Cut the towers of rankers, and leave their calibration whole.",
                    models=("acme_models.ranker:Ranker",),
                    plan={"towers.*.qkv": "column:3", "towers.*.out": "row", "calibration": "whole"},
                )

    Called:
        Once for each registry, when the plugin is activated: in every process, on every rank, in the order of
        plugin names. No process group exists yet.

    May:
        Only make records. It must not import torch or the models, communicate, read files, or depend on the
        rank. If it raises, the whole plugin is ``failed`` and none of its records count.

    Args:
        None.

    Returns:
        Any iterable of ``ShardingPolicySpec``. Patterns of the user go before those of a policy; what neither
        speaks of is found as without one. Two policies that say different things about a layer are an error.

    Added in:
        0.1
    """
    return ()
