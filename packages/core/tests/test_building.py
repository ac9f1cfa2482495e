"""Plans from objects, names, keywords, dicts and files, and what happens when these disagree."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from colossal_core import (
    ColossalError,
    Plan,
    PlanError,
    Replicated,
    UnknownNameError,
    UsageError,
    build_plan,
)
from colossal_core.plugins import PluginSettings, Registry

TOML = """\
precision = "bf16"
max_grad_norm = 1.0

[parallel]
data = "auto"
tensor = { degree = 2, mode = "1d", names = ["a"] }
pipeline = { degree = 2, microbatches = 8 }

[memory]
manager = "sharded1"
bucket_bytes = 5
"""


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that writes a plan file."""

    def write_text(text: str) -> Path:
        path = tmp_path / "plan.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write_text


def find_problems(registry: Registry, *pieces: object, **given: Any) -> list[str]:
    """Return the messages of everything that is wrong, each as users see it."""
    with pytest.raises(ColossalError) as caught:
        build_plan(registry, pieces, **given)
    return [str(part) for part in caught.value.parts or (caught.value,)]


def test_a_file_says_all_of_a_plan(
    registry: Registry, acme: ModuleType, write: Callable[[str], Path]
) -> None:
    """The spelling of the documentation."""
    plan = build_plan(registry, plan=write(TOML))

    assert [piece.options for piece in plan.pieces] == [
        acme.Stages(degree=2, microbatches=8),
        acme.Shards(degree=2, names=("a",)),
        acme.Sharded(stage=1, bucket_bytes=5.0),
    ]
    assert (plan.precision, plan.max_grad_norm, plan.data) == ("bf16", 1.0, "auto")


def test_the_path_may_be_a_string(registry: Registry, write: Callable[[str], Path]) -> None:
    """As the command line gives it."""
    path = write(TOML)

    assert build_plan(registry, plan=str(path)) == build_plan(registry, plan=path)


def test_origins_name_file_and_line(registry: Registry, write: Callable[[str], Path]) -> None:
    """A reader of a printed plan finds the place."""
    path = write(TOML)

    origins = {row.key: row.origin for row in build_plan(registry, plan=path).rows()}

    assert origins["precision"] == f"{path}:1 precision"
    assert origins["shards.degree"] == f"{path}:6 parallel.tensor.degree"
    assert origins["memory"] == f"{path}:10 memory.manager"
    assert origins["sharded1.bucket_bytes"] == f"{path}:11 memory.bucket_bytes"
    assert origins["accumulate"] == "default"


def test_pyproject_holds_a_plan_under_tool(registry: Registry, tmp_path: Path) -> None:
    """Other tools' tables are none of our business."""
    path = tmp_path / "pyproject.toml"
    path.write_text("[project]\nname = 'x'\n[tool.colossal]\nprecision = 'bf16'\n", encoding="utf-8")

    plan = build_plan(registry, plan=path)

    assert (plan.precision, plan.origins["precision"]) == ("bf16", f"{path}:4 tool.colossal.precision")


@pytest.mark.parametrize(
    "spelling",
    [
        {"parallel": {"tensor": 2, "data": 4}},
        {"parallel": {"tensor": {"degree": 2}}, "data": 4},
        {"pieces": {"shards": {"degree": 2}}, "data_parallel_size": 4},
        {"pieces": {"acme:shards": {"degree": 2}}, "parallel": {"data": 4}},
        {"tensor_parallel_size": 2, "data_parallel_size": 4, "pipeline_parallel_size": 1},
        {"tensor_parallel_size": 2, "parallel": {"data": 4, "tensor": 2, "sequence": 1}, "data": 4},
        {"parallel": {"tensor": {"strategy": "shards", "degree": 2}, "pipeline": None}, "data": 4},
    ],
)
def test_all_spellings_mean_the_same_plan(
    registry: Registry, acme: ModuleType, spelling: dict[str, Any]
) -> None:
    """People bring the names that they know; saying one thing twice is no contradiction."""
    assert build_plan(registry, plan=spelling) == build_plan(registry, [acme.Shards(degree=2)], data=4)


def test_a_name_is_the_piece_with_its_defaults(registry: Registry, acme: ModuleType) -> None:
    """``Booster("sharded2")``, qualified or not."""
    by_object = build_plan(registry, [acme.Sharded(stage=2)])

    assert build_plan(registry, ["sharded2"]) == by_object
    assert build_plan(registry, ["acme:sharded2"]) == by_object
    assert build_plan(registry, plan={"memory": {"manager": "sharded2"}}) == by_object


def test_the_axis_of_several_pieces_goes_to_the_one_in_the_plan(registry: Registry) -> None:
    """Two managers bring the axis; the chosen one gets the option. Otherwise ``strategy`` chooses."""
    plan = build_plan(registry, plan={"replica_parallel_size": 2, "memory": {"manager": "sharded2"}})
    chosen = build_plan(registry, plan={"parallel": {"replica": {"strategy": "sharded2", "replicas": 2}}})
    problems = find_problems(registry, plan={"replica_parallel_size": 2})

    assert plan.layout(4).names == ("replica", "data")
    assert chosen == plan
    assert problems == [
        (
            "plan: replica_parallel_size: the axis 'replica' is brought by sharded1, sharded2\n"
            "  next: choose: replica = { strategy = 'sharded1', ... }"
        )
    ]


def test_a_plan_leaves_open_what_it_does_not_say(registry: Registry, acme: ModuleType) -> None:
    """Pieces and keywords of the call add it."""
    base = build_plan(registry, plan={"precision": "bf16"})

    for plan in (base, {"precision": "bf16"}):
        merged = build_plan(registry, [acme.Shards(degree=2), "sharded1"], plan=plan, max_grad_norm=1.0)
        assert merged == build_plan(
            registry, [acme.Shards(degree=2), acme.Sharded()], precision="bf16", max_grad_norm=1.0
        )


def test_a_hand_made_plan_can_be_given(registry: Registry) -> None:
    """Without origins, what differs from the default counts as said."""
    plan = build_plan(registry, plan=Plan(precision="bf16"), max_grad_norm=2.0)

    assert (plan.precision, plan.max_grad_norm) == ("bf16", 2.0)
    assert find_problems(registry, plan=Plan(precision="bf16"), precision="fp32") == [
        "precision is 'bf16' by plan, but 'fp32' by Booster(precision=...)\n  next: keep one of them"
    ]


def test_saying_the_same_twice_is_fine(
    registry: Registry, acme: ModuleType, write: Callable[[str], Path]
) -> None:
    """A script may repeat what its file says."""
    path = write(TOML)

    plan = build_plan(
        registry,
        ["sharded1", acme.Shards(degree=2, names=("a",))],
        plan=path,
        precision="bf16",
        max_grad_norm=1,
        data="auto",
    )

    assert plan == build_plan(registry, plan=path)


def test_a_disagreement_names_both_sides(
    registry: Registry, acme: ModuleType, write: Callable[[str], Path]
) -> None:
    """File and line on one side, the call on the other."""
    path = write(TOML)

    problems = find_problems(
        registry,
        acme.Shards(degree=4, names=("a",)),
        acme.Sharded(stage=2),
        plan=path,
        precision="fp32",
        data=2,
    )

    assert [problem.partition("\n")[0] for problem in problems] == [
        f"precision is 'bf16' by {path}:1 precision, but 'fp32' by Booster(precision=...)",
        f"data is 'auto' by {path}:5 parallel.data, but 2 by Booster(data=...)",
        f"shards.degree is 2 by {path}:6 parallel.tensor.degree, but 4 by Booster(Shards(...))",
        (
            f"the plan has 2 memory managers, 'sharded1' by {path}:10 memory.manager and 'sharded2' by "
            "Booster(Sharded(...)); it needs exactly one"
        ),
    ]


def test_an_explicit_default_still_disagrees(registry: Registry) -> None:
    """``precision="fp32"`` was typed, so it is not overruled in silence."""
    problems = find_problems(registry, plan={"precision": "bf16"}, precision="fp32")

    assert len(problems) == 1


def test_two_spellings_that_differ_are_a_disagreement(registry: Registry) -> None:
    """Also inside one dict."""
    problems = find_problems(
        registry,
        plan={"data": 2, "data_parallel_size": 4, "tensor_parallel_size": 2, "parallel": {"tensor": 4}},
    )

    assert problems == [
        "data is 2 by plan: data, but 4 by plan: data_parallel_size\n  next: keep one of them",
        (
            "shards.degree is 2 by plan: tensor_parallel_size, but 4 by plan: parallel.tensor"
            "\n  next: keep one of them; an object states all of its options"
        ),
    ]


def test_a_degree_of_one_disagrees_with_a_piece_on_that_axis(registry: Registry, acme: ModuleType) -> None:
    """The number said that the axis is not used."""
    problems = find_problems(registry, acme.Shards(degree=2), plan={"tensor_parallel_size": 1})

    assert problems[0].startswith(
        "axis 'tensor' has degree 1 by plan: tensor_parallel_size, but 2 by Booster(Shards(...))"
    )


def test_all_conflicts_are_named_together(registry: Registry, write: Callable[[str], Path]) -> None:
    """One error with key path, given value and remedy of each: nobody mends a plan one error at a time."""
    path = write(
        """\
precision = "half"
acumulate = 2
accumulate = "8"
fp16 = true
keep_float32 = ["*norm*"]

[parallel]
data = 0
tensor = { degre = 2 }
sequence = 2
pipelin = 2

[memory]
manager = "zero1"

[pieces.shard]
degree = 2
"""
    )

    problems = find_problems(registry, max_grad_norm="1", plan=path)

    lines = [line for problem in problems for line in problem.split("\n")]
    for expected in (
        f"{path}:1 precision is 'half', expected 'fp64', 'fp32', 'bf16' or 'fp16', or the torch dtype",
        f"{path}:2 acumulate is no key of a plan; ",
        "  next: did you mean 'accumulate'?",
        f"{path}:3 accumulate is '8', expected an integer of at least 1",
        "  next: write 8 without quotes",
        f"{path}:4 fp16 is no key of a plan; ",
        "  next: write precision = 'fp16'",
        f"{path}:8 data is 0, expected 'auto' or an integer of at least 1".replace(" data", " parallel.data"),
        f"{path}:9 parallel.tensor.degre is no option of 'shards'; there are degree, mode, names",
        "  next: did you mean 'degree'?",
        f"{path}:10 parallel.sequence: no piece brings the axis 'sequence'; ",
        "  next: pip install colossal-sequence-parallel",
        f"{path}:11 parallel.pipelin: no piece brings the axis 'pipelin'; ",
        "  next: did you mean 'pipeline'?",
        "there is no memory manager 'zero1'; ",
        "there is no piece 'shard'; ",
        "  next: did you mean 'shards'?",
        "Booster(max_grad_norm=...) is '1', expected a number above 0, or None",
    ):
        assert any(line.startswith(expected) for line in lines), expected
    assert not any("no effect" in line for line in lines)


def test_an_unknown_name_alone_stays_what_it_is(registry: Registry) -> None:
    """With its own class and remedy."""
    with pytest.raises(UnknownNameError) as caught:
        build_plan(registry, ["sharded"])

    assert caught.value.hint in {"did you mean 'sharded1'?", "did you mean 'sharded2'?"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"parallel": 2}, "plan: parallel is 2, expected a table"),
        ({"memory": "zero1"}, "plan: memory is 'zero1', expected a table"),
        ({"memory": {"bucket_bytes": 1}}, "plan: memory names no manager"),
        ({"memory": {"manager": 1}}, "plan: memory has manager 1, expected a name"),
        ({"pieces": {"shards": 2}}, "plan: pieces.shards is 2, expected a table of options"),
        ({"pieces": {"shards": {}}}, "piece 'shards' needs degree, which has no default"),
        ({"pieces": {"shards": {"degree": "2"}}}, "plan: pieces.shards.degree is '2', expected an integer"),
        (
            {"pieces": {"shards": {"degree": 2, "mode": "3d"}}},
            "plan: pieces.shards.mode is '3d', expected '1d' or '2d'",
        ),
        (
            {"pieces": {"sharded1": {"stage": 1}}},
            "plan: pieces.sharded1.stage cannot be given: 'sharded1' stands for",
        ),
        (
            {"parallel": {"tensor": "4"}},
            "plan: parallel.tensor is '4', expected an integer of at least 1, or a table",
        ),
        ({"parallel": {"tensor": 0}}, "plan: parallel.tensor is 0, expected"),
        ({"parallel": {"tensor": "auto"}}, "plan: parallel.tensor is 'auto', expected"),
        (
            {"parallel": {"tensor": {"strategy": 1}}},
            "plan: parallel.tensor.strategy is 1, expected the name of a piece",
        ),
        ({"parallel": {"tensr": 1}}, "plan: parallel.tensr: no piece brings the axis 'tensr'"),
        ({"plugins": {"disabled": {}}}, "plan: plugins has no effect in a dict"),
        ({"zero_optimization": {"stage": 2}}, "plan: zero_optimization is no key of a plan"),
    ],
)
def test_a_wrong_plan_is_refused_with_the_key(
    registry: Registry, given: dict[str, Any], message: str
) -> None:
    """The path of the key, the value, and what was expected."""
    (problem,) = find_problems(registry, plan=given)

    assert problem.startswith(message)
    assert "\n  next: " in problem


def test_a_bare_number_needs_an_option_that_holds_it(acme: ModuleType) -> None:
    """Where the degree follows from other options, they are named."""
    grid = ModuleType("grid_alone")
    grid.__dict__["colossal_register_strategies"] = _keep_only(acme, "grid")

    problems = find_problems(Registry.isolated({"grid": grid}), plan={"tensor_parallel_size": 4})

    assert problems == [
        (
            "plan: tensor_parallel_size is 4, but the degree follows from the options of 'grid'"
            "\n  next: write a table with columns, rows"
        )
    ]


def _keep_only(acme: ModuleType, name: str) -> Callable[[], list[Any]]:
    """Return a registration hook with one of the sample strategies."""
    from colossal_core.plugins import hookimpl

    @hookimpl
    def offer() -> list[Any]:
        """Offer it."""
        return [record for record in acme.colossal_register_strategies() if record.name == name]

    return offer


def test_a_piece_given_twice_is_refused(registry: Registry, acme: ModuleType) -> None:
    """As name and as object, or as two names."""
    problems = find_problems(registry, "sharded1", acme.Sharded(), "again", "again")

    assert [problem.partition("\n")[0] for problem in problems] == [
        "piece 'sharded1' is given twice, by Booster('sharded1') and by Booster(Sharded(...))",
        "piece 'again' is given twice, by Booster('again') and by Booster('again')",
    ]


def test_what_is_no_piece_is_refused(registry: Registry, acme: ModuleType) -> None:
    """A class, a number, an object of somebody else."""
    problems = find_problems(registry, acme.Again, 3, Path())

    assert [problem.partition(",")[0] for problem in problems] == [
        "a piece is an object",
        "3 is no piece: no plugin offers builtins:int; there are again",
        f"{Path()!r} is no piece: no plugin offers pathlib:{type(Path()).__name__}; there are again",
    ]


def test_a_plan_of_another_registry_is_looked_up_again(registry: Registry, acme: ModuleType) -> None:
    """A piece that is not active here cannot slip in with a plan."""
    plan = build_plan(registry, [acme.Shards(degree=2)])

    with pytest.raises(UnknownNameError, match="there is no piece 'acme:shards'"):
        build_plan(Registry.isolated({}), plan=plan)


def test_settings_of_plugins_count_or_are_refused(acme: ModuleType, write: Callable[[str], Path]) -> None:
    """A file that the registry was not made with cannot switch plugins, and must not pretend to."""
    path = write('precision = "bf16"\n[plugins]\ndisabled = { acme = "not here" }\n')
    blind = Registry.isolated({"acme": acme})
    seeing = Registry.isolated({"acme": acme}, PluginSettings.read(path.parent, {}, plan_file=path))

    problems = find_problems(blind, plan=path)
    plan = build_plan(seeing, plan=path)

    assert problems[0].startswith(f"[plugins] in {str(path)!r} has no effect")
    assert plan.precision == "bf16"
    with pytest.raises(UsageError, match=r"is disabled by .*plan.toml: not here"):
        build_plan(seeing, [acme.Again()], plan=path)


def test_an_object_of_core_is_a_piece_like_any_other(registry: Registry) -> None:
    """Core has no way of its own."""
    plan = build_plan(registry, [Replicated()])

    assert plan == Plan()
    assert plan.memory.origin == "Booster(Replicated(...))"


@pytest.mark.parametrize("content", ["precision =", None])
def test_a_file_that_cannot_be_read_is_a_usage_error(
    tmp_path: Path, registry: Registry, content: str | None
) -> None:
    """Before anything else is looked at."""
    path = tmp_path / "plan.toml"
    if content is not None:
        path.write_text(content, encoding="utf-8")

    with pytest.raises(UsageError, match=r"plan\.toml"):
        build_plan(registry, plan=path)


def test_the_options_class_is_told_apart_from_its_failure(registry: Registry) -> None:
    """A plan error keeps the cause of the piece's own refusal."""
    with pytest.raises(PlanError, match=r"plan: pieces.shards.degree is \[1\], expected an integer"):
        build_plan(registry, plan={"pieces": {"shards": {"degree": [1]}}})
