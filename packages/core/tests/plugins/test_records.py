"""Records refuse what cannot work, when they are made."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from colossal_core.errors import PluginError
from colossal_core.plugins import (
    AxisSpec,
    CommandSpec,
    DiagnosticSpec,
    Finding,
    MemoryManagerSpec,
    StrategySpec,
    Target,
)

TARGET = Target("somewhere:Something")


def make_strategy(**changes: Any) -> StrategySpec:
    """Return a valid strategy with some fields changed."""
    fields: dict[str, Any] = {
        "name": "halves",
        "summary": "Cut it in halves.",
        "options": TARGET,
        "target": TARGET,
        "phase": "shard",
    }
    return StrategySpec(**{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "Halves"}, "name must be lower-case"),
        ({"name": "half_s"}, "name must be lower-case"),
        ({"name": ""}, "name must be lower-case"),
        ({"summary": " "}, "summary must be one line of text"),
        ({"summary": "two\nlines"}, "summary must be one line of text"),
        ({"options": "somewhere:Something"}, "options must be a Target"),
        ({"target": object}, "target must be a Target"),
        ({"phase": "cut"}, "phase must be one of 'partition', 'shard', 'transform', 'recompute', got 'cut'"),
        ({"excludes": "zero1"}, "expected a sequence of names, got the string 'zero1'"),
        ({"axes": (AxisSpec(name="tensor"), AxisSpec(name="tensor"))}, "lists the axis 'tensor' twice"),
    ],
)
def test_a_strategy_refuses_a_wrong_field(changes: dict[str, Any], message: str) -> None:
    """The message has the field, the value and what was expected."""
    with pytest.raises(PluginError, match=message) as caught:
        make_strategy(**changes)

    assert caught.value.code == "C011"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "Tensor"}, "the name of an axis"),
        ({"name": None}, "the name of an axis"),
        ({"name": "ring", "inside_of": "Data"}, "the name of an axis"),
        ({"name": "rows", "inside_of": "data", "part_of": "tensor"}, "give one"),
        ({"name": "rest", "takes_rest": True}, "takes_rest needs part_of"),
        ({"name": "ring", "divides_batch": True}, "gradients must be averaged or summed"),
        (
            {"name": "ring", "gradients": "mean"},
            "gradients must be one of 'average', 'sum', 'none', got 'mean'",
        ),
        ({"name": "ring", "divides_batch": 1}, "divides_batch must be True or False"),
        ({"name": "ring", "degree": ""}, "degree must be one line of text"),
    ],
)
def test_an_axis_refuses_a_wrong_field(fields: dict[str, Any], message: str) -> None:
    """An axis that means nothing would show only on many ranks."""
    with pytest.raises(PluginError, match=message):
        AxisSpec(**fields)


def test_records_are_frozen_values() -> None:
    """They can be compared and hashed, and nobody changes them behind the registry."""
    presets, field = {"stage": 1}, "name"
    record = MemoryManagerSpec(name="zero1", summary="x", options=TARGET, target=TARGET, presets=presets)
    presets["stage"] = 2

    assert record.presets == {"stage": 1}
    assert record == attrs.evolve(record)
    assert hash(record) == hash(attrs.evolve(record))
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        setattr(record, field, "zero2")


def test_sequences_become_tuples() -> None:
    """A list that is changed later does not reach the record."""
    record = make_strategy(axes=[AxisSpec(name="tensor")], excludes=["zero1"])

    assert record.axes == (AxisSpec(name="tensor"),)
    assert record.excludes == ("zero1",)


def test_every_kind_has_a_name() -> None:
    """The registry treats all records alike; a diagnostic is known by its code."""
    command = CommandSpec(name="draw", summary="Draw.", target=TARGET)
    diagnostic = DiagnosticSpec(code="compiler", title="A compiler", check=TARGET, fix="install one")

    kinds = [(record.kind, record.name) for record in (make_strategy(), command, diagnostic)]

    assert kinds == [("strategy", "halves"), ("command", "draw"), ("diagnostic", "compiler")]


def test_a_finding_has_a_known_severity() -> None:
    """The exit code of a check depends on it."""
    wrong: Any = "fatal"

    assert Finding(severity="note", code="x", message="all well").hint == ""
    with pytest.raises(PluginError, match="severity must be one of 'error', 'warning', 'note'"):
        Finding(severity=wrong, code="x", message="y")
