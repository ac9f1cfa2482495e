"""Who decides whether a plugin is on, and where a change is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from colossal_core.errors import UsageError
from colossal_core.plugins import PluginFlags, PluginSettings
from colossal_core.plugins.state import find_edit_place, set_state

OFF_IN_USER = '[plugins]\ndisabled = { gemini = "by the user file" }\n'
OFF_IN_PROJECT = '[plugins]\ndisabled = { gemini = "by the project file" }\n'
ON_IN_PROJECT = '[plugins]\nenabled = ["gemini"]\n'


@pytest.fixture
def user_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of the user's file, in a folder of its own."""
    monkeypatch.setattr("platformdirs.user_config_dir", lambda *_args, **_named: str(tmp_path / "user"))
    (tmp_path / "user").mkdir()
    return tmp_path / "user" / "config.toml"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return the file of a project, whose folder is otherwise empty."""
    (tmp_path / "project").mkdir()
    return tmp_path / "project" / "colossal.toml"


def read(project: Path, environ: dict[str, str] | None = None, **flags: Any) -> PluginSettings:
    """Read all sources from a project's folder."""
    return PluginSettings.read(project.parent, environ or {}, PluginFlags(**flags))


def test_without_a_word_a_plugin_is_enabled(project: Path, user_file: Path) -> None:
    """Installing a distribution is all that it takes."""
    verdict = read(project).judge("gemini")

    assert not user_file.exists()
    assert (verdict.is_enabled, verdict.reason, verdict.source) == (True, "", "default")


def test_the_user_file_counts_when_nothing_else_speaks(project: Path, user_file: Path) -> None:
    """The weakest source still decides over the default."""
    user_file.write_text(OFF_IN_USER, encoding="utf-8")

    verdict = read(project).judge("gemini")

    assert (verdict.is_enabled, verdict.reason, verdict.source) == (False, "by the user file", str(user_file))


def test_the_project_overrules_the_user(project: Path, user_file: Path) -> None:
    """``enabled`` exists to take back what a weaker source disables, and touches no other plugin."""
    user_file.write_text(OFF_IN_USER.replace("}", ', zero = "never" }'), encoding="utf-8")
    project.write_text(ON_IN_PROJECT, encoding="utf-8")

    settings = read(project)

    assert settings.judge("gemini").is_enabled
    assert settings.judge("gemini").source == str(project)
    assert settings.judge("zero").reason == "never"
    assert settings.judge("pipeline").is_enabled


def test_the_environment_overrules_the_project(project: Path, user_file: Path) -> None:
    """A job script has the last word over files that are shared with others."""
    project.write_text(OFF_IN_PROJECT, encoding="utf-8")
    user_file.write_text(ON_IN_PROJECT, encoding="utf-8")

    listed = read(project, {"COLOSSAL_PLUGINS": "gemini, zero"})
    without = read(project, {"COLOSSAL_WITHOUT_PLUGINS": "zero"})

    assert listed.judge("gemini").is_enabled
    assert listed.judge("pipeline").reason == "not among COLOSSAL_PLUGINS gemini,zero"
    assert without.judge("zero").reason == "left out by COLOSSAL_WITHOUT_PLUGINS"
    assert without.judge("gemini").reason == "by the project file"


def test_flags_overrule_the_environment(project: Path) -> None:
    """What was typed just now is meant."""
    environ = {"COLOSSAL_NO_PLUGINS": "1"}

    assert read(project, environ, only=("gemini",)).judge("gemini").is_enabled
    assert read(project, environ).judge("gemini").reason == "left out by COLOSSAL_NO_PLUGINS"
    assert read(project, {}, no_plugins=True).judge("gemini").source == "--no-plugins"
    assert (
        read(project, {}, without=("gemini",)).judge("gemini").reason == "left out by --without-plugin gemini"
    )
    assert read(project, {}, only=("zero",)).judge("gemini").reason == "not among --plugins zero"


def test_a_named_plan_file_stands_between_environment_and_project(project: Path) -> None:
    """Its [plugins] are honoured, and both files are known."""
    project.write_text(ON_IN_PROJECT, encoding="utf-8")
    plan = project.with_name("plan.toml")
    plan.write_text(
        'precision = "bf16"\n[plugins]\ndisabled = { gemini = "by the plan" }\n', encoding="utf-8"
    )

    settings = PluginSettings.read(project.parent, {}, plan_file=plan)

    assert settings.judge("gemini").reason == "by the plan"
    assert settings.files == (plan, project)


def test_a_plan_file_that_is_the_project_file_is_read_once(project: Path) -> None:
    """Naming it changes nothing."""
    project.write_text(OFF_IN_PROJECT, encoding="utf-8")

    settings = PluginSettings.read(project.parent, {}, plan_file=project)

    assert settings.files == (project,)


def test_core_is_enabled_whatever_anybody_says(project: Path) -> None:
    """A run without the pieces of core is no run."""
    assert read(project, {}, no_plugins=True).judge("core").is_enabled
    assert read(project, {}, only=("zero",)).judge("core").is_enabled


def test_the_project_is_found_from_below(project: Path) -> None:
    """Scripts in sub-folders obey the project, past a pyproject that says nothing about us."""
    project.write_text(OFF_IN_PROJECT, encoding="utf-8")
    below = project.parent / "src" / "deep"
    below.mkdir(parents=True)
    (below / "pyproject.toml").write_text("[project]\nname = 'x'\n", encoding="utf-8")

    settings = PluginSettings.read(below, {})

    assert not settings.judge("gemini").is_enabled


def test_pyproject_has_the_same_settings_under_tool(project: Path) -> None:
    """One file less for those who like that."""
    pyproject = project.with_name("pyproject.toml")
    pyproject.write_text('[tool.colossal.plugins]\ndisabled = { gemini = "here" }\n', encoding="utf-8")

    verdict = read(project).judge("gemini")

    assert (verdict.reason, verdict.source) == ("here", str(pyproject))


def test_two_files_of_one_project_contradict_each_other(project: Path) -> None:
    """Neither is silently ignored."""
    project.write_text(OFF_IN_PROJECT, encoding="utf-8")
    pyproject = project.with_name("pyproject.toml")
    pyproject.write_text("[tool.colossal.plugins]\nenabled = ['gemini']\n", encoding="utf-8")

    with pytest.raises(UsageError, match="both have settings of plugins"):
        read(project)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[plugins]\ndisable = {}\n", ":2 plugins.disable is no setting.*\n.*did you mean 'disabled'"),
        ("x = 1\n[plugins]\n\ndisabled = ['gemini']\n", ":4 plugins.disabled must map plugins to reasons"),
        ("[plugins]\ndisabled = { gemini = 1 }\n", "must map plugins to reasons"),
        ("[plugins]\nenabled = 'gemini'\n", ":2 plugins.enabled must be a list of strings, got 'gemini'"),
        ("[plugins]\nlocal = [1]\n", "plugins.local must be a list of strings"),
        ("plugins = 1\n", ":1 plugins must be a table"),
        ("[plugins\n", "is not valid TOML"),
        ("[plugins]\nenabled = ['x']\ndisabled = { x = 'y' }\n", "'x' is switched on and off by one source"),
        ("[plugins]\ndisabled = { core = 'y' }\n", "the records of 'core' cannot be disabled"),
    ],
)
def test_a_wrong_file_is_refused_with_its_line(project: Path, text: str, message: str) -> None:
    """A typo in settings must not pass for silence."""
    project.write_text(text, encoding="utf-8")

    with pytest.raises(UsageError, match=message) as caught:
        read(project)

    assert str(project) in str(caught.value)


@pytest.mark.parametrize(
    ("environ", "flags", "message"),
    [
        ({"COLOSSAL_NO_PLUGINS": "maybe"}, {}, "COLOSSAL_NO_PLUGINS is 'maybe', which is neither on nor off"),
        ({"COLOSSAL_STRICT_PLUGINS": "2"}, {}, "neither on nor off"),
        ({"COLOSSAL_WITHOUT_PLUGINS": "core"}, {}, "'core' cannot be disabled, but COLOSSAL_WITHOUT_PLUGINS"),
        ({}, {"only": ("a",), "without": ("a",)}, "'a' is switched on and off by one source"),
        ({}, {"only": ("a",), "no_plugins": True}, "--plugins a and --no-plugins contradict each other"),
    ],
)
def test_a_source_that_contradicts_itself_is_refused(
    project: Path, environ: dict[str, str], flags: dict[str, Any], message: str
) -> None:
    """Guessing which half was meant would be worse."""
    with pytest.raises(UsageError, match=message):
        read(project, environ, **flags)


@pytest.mark.parametrize(
    ("environ", "flags"),
    [
        ({"COLOSSAL_PLUGINS": "zreo"}, {}),
        ({}, {"only": ("zreo",)}),
        ({}, {"without": ("zreo",)}),
    ],
)
def test_an_allow_list_with_a_typo_is_refused(
    project: Path, environ: dict[str, str], flags: dict[str, Any]
) -> None:
    """Otherwise the plugin that was meant would be left out in silence."""
    settings = read(project, environ, **flags)

    with pytest.raises(UsageError, match="did you mean 'zero'"):
        settings.check_allow_lists(["zero", "gemini"])


def test_strictness_comes_from_flag_or_environment(project: Path) -> None:
    """Authors set it in their shell, CI in its command."""
    assert not read(project).is_strict
    assert read(project, {"COLOSSAL_STRICT_PLUGINS": "true"}).is_strict
    assert read(project, {}, is_strict=True).is_strict


def test_local_plugins_are_found_beside_the_file_that_names_them(project: Path) -> None:
    """The path does not depend on where the command is started."""
    project.write_text('[plugins]\nlocal = ["./my_schedule.py"]\n', encoding="utf-8")
    below = project.parent / "below"
    below.mkdir()

    assert PluginSettings.read(below, {}).local == (project.parent / "my_schedule.py",)


@pytest.mark.parametrize(
    ("environ", "flags"),
    [
        ({}, {}),
        ({}, {"only": ("zero",)}),
        ({}, {"without": ("zero",)}),
        ({}, {"no_plugins": True}),
        ({"COLOSSAL_PLUGINS": "zero,gemini"}, {"without": ("zero",)}),
        ({"COLOSSAL_PLUGINS": "zero"}, {"without": ("zero",)}),
        ({"COLOSSAL_WITHOUT_PLUGINS": "zero"}, {"only": ("zero",)}),
        ({"COLOSSAL_WITHOUT_PLUGINS": "gemini"}, {"without": ("zero",)}),
        ({"COLOSSAL_NO_PLUGINS": "1"}, {"only": ("gemini",)}),
        ({"COLOSSAL_NO_PLUGINS": "1"}, {"without": ("gemini",)}),
    ],
)
def test_workers_see_what_the_flags_of_their_launcher_say(
    project: Path, environ: dict[str, str], flags: dict[str, Any]
) -> None:
    """Workers get variables instead of flags, and must come to the same answers."""
    settings = read(project, environ, **flags)

    worker = read(project, {**environ, **settings.to_environ()})

    for name in ("zero", "gemini", "pipeline"):
        assert worker.judge(name).is_enabled == settings.judge(name).is_enabled, name


def test_a_change_goes_into_the_project_when_there_is_one(project: Path, user_file: Path) -> None:
    """Inside a project the change is meant for everybody who works on it."""
    outside = find_edit_place(project.parent)
    project.with_name("pyproject.toml").write_text("[tool.colossal]\nprecision = 'bf16'\n", encoding="utf-8")
    in_pyproject = find_edit_place(project.parent)
    project.touch()
    in_own_file = find_edit_place(project.parent)

    assert (outside.path, outside.table, outside.is_project) == (user_file, ("plugins",), False)
    assert (in_pyproject.path.name, in_pyproject.table) == ("pyproject.toml", ("tool", "colossal", "plugins"))
    assert (in_own_file.path, in_own_file.table, in_own_file.is_project) == (project, ("plugins",), True)


def test_disabling_writes_the_reason_and_keeps_the_rest() -> None:
    """Other settings in the file are untouched."""
    document: dict[str, Any] = {"precision": "bf16", "plugins": {"enabled": ["gemini", "zero"]}}

    set_state(document, "gemini", is_enabled=False, why="breaks our resume")

    assert document == {
        "precision": "bf16",
        "plugins": {"enabled": ["zero"], "disabled": {"gemini": "breaks our resume"}},
    }


def test_disabling_without_a_reason_writes_the_date() -> None:
    """Somebody will ask later."""
    document: dict[str, Any] = {}

    set_state(document, "gemini", is_enabled=False, table=("tool", "colossal", "plugins"))

    reason = document["tool"]["colossal"]["plugins"]["disabled"]["gemini"]
    assert reason.startswith("by hand, 20")


def test_enabling_takes_the_entry_away() -> None:
    """A file that says nothing is the usual state."""
    document: dict[str, Any] = {"plugins": {"disabled": {"gemini": "x", "zero": "y"}}}

    set_state(document, "gemini", is_enabled=True)

    assert document == {"plugins": {"disabled": {"zero": "y"}}}


def test_enabling_over_a_weaker_source_lists_the_plugin(project: Path, user_file: Path) -> None:
    """The project file must say ``enabled`` when the user's file would still disable it."""
    user_file.write_text(OFF_IN_USER, encoding="utf-8")
    project.write_text("", encoding="utf-8")
    settings = read(project)
    document: dict[str, Any] = {}

    overrules = settings.is_disabled_below(project, "gemini")
    set_state(document, "gemini", is_enabled=True, overrules=overrules)

    assert document == {"plugins": {"enabled": ["gemini"]}}
    assert not settings.is_disabled_below(user_file, "gemini")


def test_core_cannot_be_disabled_in_a_file() -> None:
    """The refusal comes before anything is written."""
    document: dict[str, Any] = {}

    with pytest.raises(UsageError, match="the records of 'core' cannot be disabled"):
        set_state(document, "core", is_enabled=False)

    assert document == {}


def test_a_file_with_something_else_in_place_of_the_table_is_refused() -> None:
    """Nothing of the user's is overwritten."""
    with pytest.raises(UsageError, match="'plugins' must be a table, got 3"):
        set_state({"plugins": 3}, "gemini", is_enabled=False)
