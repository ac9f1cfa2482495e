"""What this plugin offers. Light by rule: the standard library and ``colossal_core.plugins`` only."""

from __future__ import annotations

from collections.abc import Iterable

from colossal_core.plugins import ScheduleSpec, Target, hookimpl

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
