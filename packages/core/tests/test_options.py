"""Plain values are checked against annotations, converted, and written down again."""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import attrs
import pytest

from colossal_core.errors import CapabilityError, ColossalError, PlanError
from colossal_core.options import build_options, check_value, write_options, write_plain


class Colour(enum.Enum):
    """A choice."""

    RED = "red"
    BLUE = "blue"


def parse_bytes(text: str | int) -> int:
    """Stand for a converter."""
    return int(str(text).removesuffix("KiB")) * (1024 if str(text).endswith("KiB") else 1)


def refuse_odd(_piece: object, _field: attrs.Attribute[int], value: int) -> None:
    """Stand for a validator."""
    if value % 2:
        message = f"{value} is odd"
        raise ValueError(message)
    if value > 10:
        raise CapabilityError(f"{value} is too much for now")


@attrs.frozen(kw_only=True)
class Options:
    """One field of every kind."""

    needed: int
    even: int = attrs.field(default=2, validator=refuse_odd)
    memory_bytes: int = attrs.field(default=0, converter=parse_bytes)
    rate: float | None = None
    names: tuple[str, ...] = ()
    colour: Colour = Colour.RED
    stage: int = 1
    anything: object = None


def build(given: Mapping[str, object], **presets: object) -> tuple[Any, list[ColossalError]]:
    """Build options from plain values at made-up places."""
    places = {name: f"plan.toml {name}" for name in given}
    return build_options(Options, given, places, presets, "sample")


@pytest.mark.parametrize(
    ("value", "expected", "result"),
    [
        (2, int, 2),
        (2, float, 2.0),
        (2, int | float, 2),
        (None, float | None, None),
        ("a", Literal["a", 1], "a"),
        (["a", "b"], tuple[str, ...], ("a", "b")),
        ([1, 2], tuple[float, ...], (1.0, 2.0)),
        ([1, "a"], tuple[int, str], (1, "a")),
        ([1], list[int], [1]),
        ("blue", Colour, Colour.BLUE),
        (Colour.BLUE, Colour, Colour.BLUE),
        ("auto", int | Literal["auto"], "auto"),
        ({"a": 1}, Mapping[str, int], {"a": 1}),
        ("whatever", Path, "whatever"),
    ],
)
def test_a_fitting_value_is_brought_into_form(value: object, expected: object, result: object) -> None:
    """Equal plans become equal values, whatever spelling they came in."""
    found = check_value(value, expected, "x")

    assert found == result
    assert type(found) is type(result)


@pytest.mark.parametrize(
    ("value", "expected", "message"),
    [
        ("8", int, "x is '8', expected an integer\n  next: write 8 without quotes"),
        ("0.5", float | None, "x is '0.5', expected a number or None\n  next: write 0.5 without quotes"),
        (True, int, "x is True, expected an integer"),
        (1, bool, "x is 1, expected true or false"),
        (2.5, int, "x is 2.5, expected an integer"),
        (1, Literal[True], "x is 1, expected True"),
        ("c", Literal["a", "b"], "x is 'c', expected 'a' or 'b'"),
        ("a", tuple[str, ...], "x is 'a', expected a list"),
        ([1], tuple[str, ...], "x is [1], expected a list"),
        ([1], tuple[int, int], "x is [1], expected a list"),
        ("green", Colour, "x is 'green', expected 'red' or 'blue'"),
        (None, int, "x is None, expected an integer"),
    ],
)
def test_a_value_of_another_kind_is_refused(value: object, expected: object, message: str) -> None:
    """With what was given, what was expected, and the remedy where it is known."""
    with pytest.raises(PlanError) as caught:
        check_value(value, expected, "x")

    assert str(caught.value).startswith(message)


def test_options_are_built_from_plain_values() -> None:
    """Converters see what was written; presets are filled in."""
    options, problems = build({"needed": 1, "memory_bytes": "4KiB", "names": ["a"], "rate": 1}, stage=3)

    assert problems == []
    assert options == Options(needed=1, memory_bytes=4096, names=("a",), rate=1.0, stage=3)


def test_everything_that_is_wrong_is_found_at_once() -> None:
    """Each problem has its place."""
    options, problems = build({"rate": "1", "colr": "red", "stage": 2}, stage=3)

    assert options is None
    assert [error.message for error in problems] == [
        "plan.toml rate is '1', expected a number or None",
        (
            "plan.toml colr is no option of 'sample'; there are "
            "anything, colour, even, memory_bytes, names, needed, rate"
        ),
        "plan.toml stage cannot be given: 'sample' stands for stage=3",
        "piece 'sample' needs needed, which has no default",
    ]
    assert problems[1].hint == "did you mean 'colour'?"


def test_the_pieces_own_refusal_becomes_a_problem() -> None:
    """With the places of what was given; an error of ours stays what it is."""
    _, odd = build({"needed": 1, "even": 3})
    _, much = build({"needed": 1, "even": 12})

    assert (
        odd[0].message == "options of piece 'sample' are refused (plan.toml needed, plan.toml even): 3 is odd"
    )
    assert isinstance(odd[0].__cause__, ValueError)
    assert isinstance(much[0], CapabilityError)


def test_options_are_written_as_plain_values() -> None:
    """What JSON can hold, without presets."""
    options = Options(needed=1, names=("a",), colour=Colour.BLUE, anything={"p": Path("a/b"), 1: {2, 1}})

    plain = write_options(options, {"stage": 1})

    assert plain == {
        "needed": 1,
        "even": 2,
        "memory_bytes": 0,
        "rate": None,
        "names": ["a"],
        "colour": "blue",
        "anything": {"p": "a/b", "1": [1, 2]},
    }
    assert json.loads(json.dumps(plain)) == plain


@pytest.mark.parametrize(
    ("value", "plain"), [(len, "builtins:len"), (Path, "pathlib:Path"), (Options(needed=1).names, [])]
)
def test_functions_and_classes_are_written_by_path(value: Callable[..., object], plain: object) -> None:
    """Two ranks write the same."""
    assert write_plain(value, "x") == plain


def test_what_has_no_plain_form_is_refused() -> None:
    """A plan with it could not be compared or stored."""
    with pytest.raises(PlanError, match=r"Options.anything\[0\] is <object .*cannot be written into a plan"):
        write_options(Options(needed=1, anything=[object()]), {})


def test_annotations_that_cannot_be_evaluated_are_not_checked() -> None:
    """Names that exist for type checkers only leave the work to the constructor."""
    annotated = attrs.make_class("Annotated", {"x": attrs.field(type=int)}, kw_only=True)
    annotated.__annotations__ = {"x": "OnlyForTypeCheckers"}

    options, problems = build_options(annotated, {"x": "8"}, {"x": "x"}, {}, "sample")

    assert problems == []
    assert options == annotated(x="8")
