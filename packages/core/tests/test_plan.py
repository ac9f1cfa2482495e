"""A plan cannot exist in an invalid state, prints itself, hashes itself and can be read back."""

from __future__ import annotations

import copy
import json
import math
from types import ModuleType
from typing import Any

import attrs
import pytest
import torch

from colossal_core import Plan, PlanError, Replicated, build_plan
from colossal_core.plan import SETTINGS, PlannedPiece
from colossal_core.plugins import AxisSpec, MemoryManagerSpec, Registry, StrategySpec, Target

TARGET = Target("acme_pieces:Missing")


def test_a_plan_that_says_nothing_is_plain_data_parallelism() -> None:
    """One piece, and the defaults of the Booster."""
    plan = Plan()

    assert plan.memory.qualified_name == "core:replicated"
    assert plan.memory.options == Replicated()
    assert plan.pieces == (plan.memory,)
    assert [getattr(plan, key) for key in SETTINGS] == ["fp32", None, 1, "auto", (), True, None]


@pytest.mark.parametrize(
    ("given", "precision"),
    [
        ("fp64", "fp64"),
        ("fp32", "fp32"),
        ("bf16", "bf16"),
        (torch.float64, "fp64"),
        (torch.float32, "fp32"),
        (torch.float, "fp32"),
        (torch.bfloat16, "bf16"),
        (torch.float16, "fp16"),
    ],
)
def test_precision_is_a_name_or_a_dtype(given: Any, precision: str) -> None:
    """Both mean the same plan."""
    name: Any = precision

    assert Plan(precision=given) == Plan(precision=name)
    assert Plan(precision=given).precision == precision


@pytest.mark.parametrize(
    ("key", "value", "message", "hint"),
    [
        (
            "precision",
            "bfloat16",
            "precision is 'bfloat16', expected 'fp64', 'fp32', 'bf16' or 'fp16'",
            "write 'bf16'",
        ),
        ("precision", "16-mixed", "precision is '16-mixed'", "16-bit training"),
        ("precision", torch.int8, "precision is torch.int8", "16-bit"),
        ("precision", None, "precision is None", "16-bit"),
        ("max_grad_norm", 0, "max_grad_norm is 0, expected a number above 0, or None", "change the value"),
        ("max_grad_norm", -1.0, "max_grad_norm is -1.0", "change"),
        ("max_grad_norm", math.nan, "max_grad_norm is nan", "change"),
        ("max_grad_norm", math.inf, "max_grad_norm is inf", "change"),
        ("max_grad_norm", "1.0", "max_grad_norm is '1.0'", "write 1.0 without quotes"),
        ("max_grad_norm", True, "max_grad_norm is True", "change"),
        ("accumulate", 0, "accumulate is 0, expected an integer of at least 1", "change"),
        ("accumulate", "8", "accumulate is '8'", "write 8 without quotes"),
        ("accumulate", 1.0, "accumulate is 1.0", "change"),
        ("data", 0, "data is 0, expected 'auto' or an integer of at least 1", "change"),
        ("data", -1, "data is -1", "write 'auto'"),
        ("data", "4", "data is '4'", "write 4 without quotes"),
        (
            "keep_float32",
            "*norm*",
            "keep_float32 is '*norm*', expected a list of patterns",
            "write ['*norm*']",
        ),
        ("keep_float32", [""], "keep_float32 holds ''", "give strings"),
        ("keep_float32", ["a", "a"], "keep_float32 holds 'a' twice", "keep one"),
        ("synchronise_batchnorm", "yes", "synchronise_batchnorm is 'yes', expected true or false", "quotes"),
        ("synchronise_batchnorm", 1, "synchronise_batchnorm is 1", "quotes"),
        ("nonfinite", "raise", "nonfinite is 'raise', expected None or 'skip'", "raising is what None means"),
        ("nonfinite", True, "nonfinite is True", "write 'skip'"),
    ],
)
def test_a_wrong_setting_is_refused(key: str, value: object, message: str, hint: str) -> None:
    """Whoever makes the plan, with the value and the remedy."""
    values: dict[str, Any] = {key: value}

    with pytest.raises(PlanError) as caught:
        Plan(**values)

    assert caught.value.message.startswith(message)
    assert hint in caught.value.hint


def test_several_wrong_settings_are_one_error() -> None:
    """A user mends them at once."""
    values: dict[str, Any] = {"accumulate": "8", "precision": "half", "data": 0}

    with pytest.raises(PlanError) as caught:
        Plan(**values)

    assert [part.code for part in caught.value.parts] == ["C002", "C002", "C002"]


def test_a_setting_without_effect_is_refused() -> None:
    """Nothing would stay in fp32 that is not there already."""
    with pytest.raises(PlanError, match="has no effect in precision 'fp32'"):
        Plan(keep_float32=("*norm*",))

    assert Plan(keep_float32=("*norm*",), precision="bf16").keep_float32 == ("*norm*",)


def test_equal_plans_are_equal_values() -> None:
    """Spelling and origin do not count; neither for the hash that ranks compare."""
    one = Plan(max_grad_norm=1, keep_float32=("a",), precision="bf16", origins={"precision": "here"})
    patterns: Any = ["a"]
    other = Plan(max_grad_norm=1.0, keep_float32=patterns, precision="bf16")

    assert one == other
    assert one.digest() == other.digest()
    assert len(one.digest()) == 64
    assert attrs.evolve(one, max_grad_norm=2.0).digest() != one.digest()


def test_every_setting_and_option_is_in_the_hash(registry: Registry, acme: ModuleType) -> None:
    """Two ranks that differ in anything differ in the hash."""
    plans = [
        Plan(),
        Plan(precision="bf16"),
        Plan(max_grad_norm=1.0),
        Plan(data=2),
        Plan(precision="bf16", keep_float32=("x",)),
        Plan(synchronise_batchnorm=False),
        Plan(nonfinite="skip"),
        build_plan(registry, [acme.Shards(degree=2)]),
        build_plan(registry, [acme.Shards(degree=4)]),
        build_plan(registry, ["sharded1"]),
        build_plan(registry, ["sharded2"]),
    ]

    assert len({plan.digest() for plan in plans}) == len(plans)


def test_a_plan_is_read_back_as_it_was(registry: Registry, acme: ModuleType) -> None:
    """Through JSON, as it lies in a checkpoint."""
    pieces = [acme.Shards(degree=2, names=("a", "b")), acme.Again(), acme.Sharded(stage=2, bucket_bytes=7)]
    plan = build_plan(registry, pieces, precision="bf16", max_grad_norm=0.5, data=4, keep_float32=["n"])

    text = json.dumps(plan.to_dict())
    twin = Plan.from_dict(json.loads(text), registry)

    assert twin == plan
    assert twin.digest() == plan.digest()
    assert "stage" not in json.loads(text)["pieces"]["acme:sharded2"]


def test_a_plan_survives_copying() -> None:
    """It travels to other processes."""
    plan = Plan(precision="bf16")

    assert copy.deepcopy(plan) == plan


def test_rows_show_every_value_and_its_origin(registry: Registry, acme: ModuleType) -> None:
    """A printed plan answers where each value comes from."""
    plan = build_plan(
        registry, [acme.Shards(degree=2)], plan={"memory": {"manager": "sharded2"}, "precision": "bf16"}
    )

    rows = {row.key: (row.value, row.origin) for row in plan.rows()}

    assert rows["precision"] == ("bf16", "plan: precision")
    assert rows["accumulate"] == (1, "default")
    assert rows["strategy"] == ("acme:shards", "Booster(Shards(...))")
    assert rows["shards.degree"] == (2, "Booster(Shards(...))")
    assert rows["memory"] == ("acme:sharded2", "plan: memory.manager")
    assert rows["sharded2.stage"] == (2, "preset of sharded2")
    assert rows["sharded2.bucket_bytes"] == (1e6, "default")


def test_pieces_that_exclude_each_other_are_refused(registry: Registry, acme: ModuleType) -> None:
    """Also when only one of the two says so. Both bring the same axis besides, which is told as well."""
    with pytest.raises(PlanError) as caught:
        build_plan(registry, [acme.Grid(rows=1, columns=1), acme.Shards(degree=1)])

    assert "pieces 'grid' (Booster(Grid(...))) and 'shards' (Booster(Shards(...))) exclude each other" in str(
        caught.value
    )


def make_piece(
    name: str, *axes: AxisSpec, kind: type[Any] = StrategySpec, options: object = None
) -> PlannedPiece:
    """Return a planned piece with these axes."""
    more: dict[str, Any] = {"phase": "shard"} if kind is StrategySpec else {}
    record = kind(name=name, summary="x", options=TARGET, target=TARGET, axes=axes, **more)
    return PlannedPiece(record=record, plugin="acme", options=options, origin=f"asked for {name}")


@attrs.frozen
class Two:
    """Options with a degree."""

    degree: int = 2


def test_two_owners_of_one_axis_are_refused() -> None:
    """Ranks cannot differ along one axis in two ways."""
    pieces = [make_piece(name, AxisSpec(name="tensor"), options=Two()) for name in ("left", "right")]

    with pytest.raises(PlanError, match="pieces 'left' and 'right' both bring the axis 'tensor'"):
        Plan(strategies=tuple(pieces))


def test_an_axis_beside_nothing_is_refused() -> None:
    """The anchor is brought by a piece that is not in the plan."""
    lost = make_piece("lost", AxisSpec(name="ring", inside_of="wheel"), options=Two())
    part = make_piece("part", AxisSpec(name="half", part_of="wheel"), options=Two())

    with pytest.raises(
        PlanError, match="axis 'ring' of piece 'lost' goes with 'wheel', which no piece brings"
    ):
        Plan(strategies=(lost,))
    with pytest.raises(PlanError, match="axis 'half' of piece 'part' goes with 'wheel'"):
        Plan(strategies=(part,))


def test_chains_of_new_axes_are_placed() -> None:
    """An axis may stand inside another new one, in whatever order they come."""
    inner = make_piece("a", AxisSpec(name="inner", inside_of="outer"), options=Two())
    outer = make_piece("b", AxisSpec(name="outer", inside_of="data"), options=Two())

    layout = Plan(strategies=(inner, outer)).layout(8)

    assert layout.names == ("data", "outer", "inner")


def test_only_one_part_takes_the_rest() -> None:
    """And only where the whole is known."""
    rest = AxisSpec(name="rest", part_of="data", takes_rest=True)
    more = AxisSpec(name="more", part_of="data", takes_rest=True)
    real = AxisSpec(name="real", part_of="data")
    lost = [
        AxisSpec(name="half", part_of="tensor"),
        AxisSpec(name="other", part_of="tensor", takes_rest=True),
    ]

    with pytest.raises(PlanError, match="'rest' and 'more' both take the rest of axis 'data'"):
        Plan(strategies=(make_piece("a", rest, more, real, options=Two()),))
    with pytest.raises(
        PlanError, match="'other' takes the rest of axis 'tensor', whose degree no piece gives"
    ):
        Plan(strategies=(make_piece("a", *lost, options=Two()),))


def test_a_degree_that_the_options_lack_is_the_plugins_fault() -> None:
    """The error says whose."""
    piece = make_piece("a", AxisSpec(name="tensor", degree="width"), options=Two())

    with pytest.raises(PlanError, match=r"has no 'width'.*\n.*fault of plugin 'acme'"):
        Plan(strategies=(piece,))


def test_a_piece_in_the_wrong_place_is_refused() -> None:
    """Exactly one memory manager, and strategies besides."""
    strategy = make_piece("a", options=Two())
    manager = make_piece("b", kind=MemoryManagerSpec, options=Two())

    with pytest.raises(PlanError, match=r"'a' .* is a strategy, but used as a memory manager"):
        Plan(memory=strategy)
    with pytest.raises(PlanError, match=r"'b' .* is a memory manager, but used as a strategy"):
        Plan(strategies=(manager,))
    with pytest.raises(PlanError, match="piece 'a' is given twice, by asked for a and by asked for a"):
        Plan(strategies=(strategy, copy.copy(strategy)))


def test_options_that_cannot_be_written_are_refused() -> None:
    """A plan that could not be stored does not exist."""
    degree: Any = object()
    manager = make_piece("b", kind=MemoryManagerSpec, options=Two(degree=degree))

    with pytest.raises(PlanError, match=r"Two.degree is <object .* cannot be written into a plan"):
        Plan(memory=manager)
