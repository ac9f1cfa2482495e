"""The hooks of Colossal, version 1: every door through which a plugin comes in.

Names follow one grammar. ``colossal_register_<plural>`` offers records;
``colossal_before_<noun>_<participle>``, ``colossal_after_<noun>_<participle>`` and
``colossal_on_<noun>_error`` observe. Everything else that a plugin does is a method of an interface that its
record names, not a hook.

A plugin is a module (or any object) whose functions carry these names and the ``hookimpl`` mark; an
implementation may leave out arguments that it does not need. An installed plugin is announced by an entry
point of the group ``colossal.plugins``, whose name is the plugin's name. Order is never a means of choice:
pieces are chosen by name in the plan, and ``tryfirst``, ``trylast`` and wrappers are refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

from colossal_core.plugins.records import (
    CommandSpec,
    DiagnosticSpec,
    MemoryManagerSpec,
    Record,
    ScheduleSpec,
    ShardingPolicySpec,
    StrategySpec,
)
from colossal_core.plugins.registrations import (
    PROJECT,
    colossal_register_commands,
    colossal_register_diagnostics,
    colossal_register_memory_managers,
    colossal_register_pipeline_schedules,
    colossal_register_sharding_policies,
    colossal_register_strategies,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from colossal_core.plan import Plan

__all__ = [
    "GROUP",
    "OBSERVERS",
    "PROJECT",
    "REGISTRATIONS",
    "colossal_after_checkpoint_saved",
    "colossal_after_run_finished",
    "colossal_after_step_taken",
    "colossal_before_run_started",
    "colossal_before_step_taken",
    "colossal_on_run_error",
    "colossal_register_commands",
    "colossal_register_diagnostics",
    "colossal_register_memory_managers",
    "colossal_register_pipeline_schedules",
    "colossal_register_sharding_policies",
    "colossal_register_strategies",
    "hookimpl",
]

GROUP = "colossal.plugins"
"""The entry-point group. There is one only: what a plugin brings is told by its hooks, not by packaging."""

hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a function of a plugin as the implementation of the hook of the same name."""

_hookspec = pluggy.HookspecMarker(PROJECT)

REGISTRATIONS: Mapping[str, type[Record]] = {
    "colossal_register_strategies": StrategySpec,
    "colossal_register_memory_managers": MemoryManagerSpec,
    "colossal_register_commands": CommandSpec,
    "colossal_register_diagnostics": DiagnosticSpec,
    "colossal_register_pipeline_schedules": ScheduleSpec,
    "colossal_register_sharding_policies": ShardingPolicySpec,
}
"""Registration hooks and the record that each of them offers."""

OBSERVERS: Mapping[str, bool] = {
    "colossal_before_run_started": False,
    "colossal_after_run_finished": True,
    "colossal_before_step_taken": True,
    "colossal_after_step_taken": True,
    "colossal_after_checkpoint_saved": True,
    "colossal_on_run_error": True,
}
"""Observer hooks, and whether an error in one is isolated: logged once, the observer skipped from then on.

Where observers may communicate, nothing is isolated: a rank that swallows an error leaves the others waiting.
"""


@_hookspec
def colossal_before_run_started(plan: Plan) -> None:
    """Observe that a run is about to start.

    Example:
        ::

            from colossal_core.plugins import hookimpl

            @hookimpl
            def colossal_before_run_started(plan):
                print(f"training in {plan.precision}")

    Called:
        Once, in ``Booster.boost`` before anything of the user's is touched, on every rank in lock-step,
        built-in observers first and then in the order of plugin names. The process group exists.

    May:
        Issue collectives, if all ranks issue the same ones. An error is not isolated: it ends the run, since
        a rank that swallowed it would leave the others waiting. The plan is frozen.

    Args:
        plan: The effective plan.

    Returns:
        None.

    Added in:
        0.1
    """


@_hookspec
def colossal_after_run_finished(summary: Mapping[str, object]) -> None:
    """Observe that a run has ended without an error.

    Example:
        ::

            from colossal_core.plugins import hookimpl

            @hookimpl
            def colossal_after_run_finished(summary):
                print(f"{summary['steps']} steps")

    Called:
        Once, when a process that boosted ends without an error, on every rank that does, while the
        interpreter shuts down; in the order of ``colossal_before_run_started``.

    May:
        Write files, close what it opened. It must not issue collectives: other ranks may be gone. An error is
        isolated: logged once with the plugin's name.

    Args:
        summary: Name to value; at least ``steps``, the real optimizer steps of this run.

    Returns:
        None.

    Added in:
        0.1
    """


@_hookspec
def colossal_before_step_taken(step: int) -> None:
    """Observe that the optimizer is about to take a step.

    Example:
        ::

            from colossal_core.plugins import hookimpl

            @hookimpl
            def colossal_before_step_taken(step):
                marks.append(step)

    Called:
        On every rank, at the start of each ``optimizer.step()`` that closes a gradient window; accumulated
        calls that do nothing are not seen. All observers together have 50 microseconds.

    May:
        Read. It must not issue collectives, wait for a device, or change parameters. An error is isolated:
        logged once with the plugin's name, then this observer is skipped.

    Args:
        step: Number of steps taken before this one, 0 for the first.

    Returns:
        None.

    Added in:
        0.1
    """


@_hookspec
def colossal_after_step_taken(step: int, metrics: Mapping[str, object]) -> None:
    """Observe that the optimizer has taken a step.

    Example:
        ::

            from colossal_core.plugins import hookimpl

            @hookimpl
            def colossal_after_step_taken(step, metrics):
                if step % 100 == 0:
                    log(step, float(metrics["grad_norm"]))

    Called:
        On every rank, at the end of each ``optimizer.step()`` that updated parameters; a step that was
        skipped or raised is not seen. All observers together have 50 microseconds.

    May:
        Read. It must not issue collectives; turning a metric into a Python number may wait for the device. An
        error is isolated: logged once with the plugin's name, then this observer is skipped.

    Args:
        step: Number of steps taken before this one, 0 for the first.
        metrics: Name to number or detached 0-d tensor, equal on all ranks; at least ``grad_norm``, before
            clipping.

    Returns:
        None.

    Added in:
        0.1
    """


@_hookspec
def colossal_after_checkpoint_saved(path: Path, step: int) -> None:
    """Observe that a checkpoint is complete on disk.

    Example:
        ::

            from colossal_core.plugins import hookimpl

            @hookimpl
            def colossal_after_checkpoint_saved(path, step):
                uploads.put(path)

    Called:
        On every rank, after the barrier that follows the manifest: readers on any rank see a complete
        checkpoint.

    May:
        Read the checkpoint. It must not issue collectives or change what is in the folder. An error is
        isolated: logged once with the plugin's name, then this observer is skipped.

    Args:
        path: The checkpoint's folder.
        step: Number of real optimizer steps that it holds.

    Returns:
        None.

    Added in:
        0.1
    """


@_hookspec
def colossal_on_run_error(error: BaseException, step: int) -> None:
    """Observe that a run ends with an error.

    Example:
        ::

            from colossal_core.plugins import hookimpl

            @hookimpl
            def colossal_on_run_error(error, step):
                page(f"failed at step {step}: {error}")

    Called:
        On the rank that fails, before the error leaves it. Other ranks are usually inside a collective and
        see nothing.

    May:
        Read and report. It must not issue collectives, since no other rank would take part. An error in it is
        isolated and never replaces the one that is reported.

    Args:
        error: What ends the run.
        step: Number of real optimizer steps taken before.

    Returns:
        None.

    Added in:
        0.1
    """
