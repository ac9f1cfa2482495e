"""What this plugin offers. Light by rule: the standard library and ``colossal_core.plugins`` only."""

from __future__ import annotations

from collections.abc import Iterable

from colossal_core.plugins import AxisSpec, CommandSpec, ScheduleSpec, StrategySpec, Target, hookimpl

_SCHEDULES = {
    "gpipe": ("All forwards, then all backwards.", "gpipe:GPipe"),
    "1f1b": ("One forward and one backward in turn.", "one_forward_one_backward:OneForwardOneBackward"),
    "interleaved": ("1F1B with several stages on each rank.", "one_forward_one_backward:Interleaved"),
    "zbh1": ("1F1B whose weight gradients fill the end of the bubble.", "zero_bubble:ZeroBubbleH1"),
    "zbv": ("Two stages on each rank in a V, without idling.", "zero_bubble:ZeroBubbleV"),
}


@hookimpl
def colossal_register_pipeline_schedules() -> Iterable[ScheduleSpec]:
    """Offer the schedules."""
    for name, (summary, path) in _SCHEDULES.items():
        yield ScheduleSpec(name=name, summary=summary, target=Target(f"colossal_pipeline.schedules.{path}"))


@hookimpl
def colossal_register_strategies() -> Iterable[StrategySpec]:
    """Offer the strategy ``pipeline``."""
    yield StrategySpec(
        name="pipeline",
        summary="Put stages of the model on different ranks, and send micro-batches through them.",
        options=Target("colossal_pipeline.options:Pipeline"),
        target=Target("colossal_pipeline.strategy:PipelineStrategy"),
        axes=(AxisSpec(name="pipeline"),),
        phase="partition",
        # Parameters that come and go need more than shapes to find flows.
        excludes=("zero3", "gemini"),
    )


@hookimpl
def colossal_register_commands() -> Iterable[CommandSpec]:
    """Offer ``colossal pipeline``."""
    yield CommandSpec(
        name="pipeline",
        summary="Draw pipeline schedules.",
        target=Target("colossal_pipeline.commands:pipeline"),
    )
