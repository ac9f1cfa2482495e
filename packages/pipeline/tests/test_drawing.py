"""Pictures show every action, and the figures of the simulator."""

from __future__ import annotations

from xml.etree import ElementTree as ET

from colossal_core.schedule import PipelineShape
from colossal_pipeline.drawing import describe, draw_svg, draw_text, plan_timeline
from colossal_pipeline.schedules.one_forward_one_backward import OneForwardOneBackward
from colossal_pipeline.schedules.zero_bubble import ZeroBubbleV


def test_a_picture_has_a_box_for_each_action() -> None:
    """It is XML, with a title of each timeline."""
    shape = PipelineShape(4, 8, 2)
    timeline = plan_timeline("zbv", ZeroBubbleV(), shape)

    picture = ET.fromstring(draw_svg([("planned <zbv>", timeline), ("again", timeline)]))  # noqa: S314

    boxes = [box for box in picture.iter() if box.tag.endswith("rect") and len(box)]
    assert len(boxes) == 2 * 8 * 8 * 3
    assert "planned <zbv>" in [text.text for text in picture.iter() if text.tag.endswith("text")]


def test_text_shows_idling_and_work() -> None:
    """One line for each rank."""
    shape = PipelineShape(2, 2)
    timeline = plan_timeline("1f1b", OneForwardOneBackward(), shape)

    lines = draw_text(timeline, columns=18).splitlines()

    assert lines[0].startswith("rank 0  F0F1")
    assert lines[1].startswith("rank 1  ..F0")
    assert {len(line) for line in lines} == {8 + 18}
    assert describe(timeline, shape).startswith("step 9, bubble 3 (33.3% of all time)")
