"""Pipeline schedules as data: what each rank computes in which order, without a tensor in sight."""

from __future__ import annotations

from colossal_core.schedule.actions import Action, PipelineShape, Work, loop_placement, v_placement
from colossal_core.schedule.check import check_schedule, find_problems
from colossal_core.schedule.simulate import Span, StageTimes, Timeline, peak_activations, simulate

__all__ = [
    "Action",
    "PipelineShape",
    "Span",
    "StageTimes",
    "Timeline",
    "Work",
    "check_schedule",
    "find_problems",
    "loop_placement",
    "peak_activations",
    "simulate",
    "v_placement",
]
