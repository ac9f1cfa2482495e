"""States, names and lookups, with plugins installed from outside."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from colossal_core import Replicated
from colossal_core.errors import DuplicateNameError, PluginLoadError, UnknownNameError, UsageError
from colossal_core.plugins import (
    CommandSpec,
    DiagnosticSpec,
    PluginFlags,
    PluginSettings,
    PluginStatus,
    Registry,
    StrategySpec,
    Target,
    hookimpl,
)

if TYPE_CHECKING:
    from ..conftest import Install

STRATEGY = """
    from colossal_core.plugins import StrategySpec, Target, hookimpl

    @hookimpl
    def colossal_register_strategies():
        yield StrategySpec(
            name="NAME",
            summary="x",
            phase="shard",
            options=Target("MODULE:Options"),
            target=Target("MODULE:Impl"),
        )
"""


def write_strategy(name: str, module: str) -> str:
    """Return the source of a plugin with one strategy."""
    return STRATEGY.replace("NAME", name).replace("MODULE", module)


def find_status(registry: Registry, name: str) -> PluginStatus:
    """Return the status of one plugin."""
    return next(status for status in registry.statuses() if status.name == name)


def make_settings(**flags: Any) -> PluginSettings:
    """Return settings of flags alone, whatever files there are."""
    return PluginSettings.read(Path("/"), {}, PluginFlags(**flags))


pytestmark = pytest.mark.usefixtures("path")


@pytest.fixture
def path(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterable[Path]:
    """Put ``site`` on the path, and forget afterwards what was imported from it."""
    monkeypatch.syspath_prepend(str(site))
    before = set(sys.modules)
    yield site
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(site)):
            del sys.modules[name]


def test_a_plugin_from_outside_appears_with_its_pieces(install: Install) -> None:
    """Installing a distribution with an entry point is all that an author does."""
    install("halves", write_strategy("halves", "acme_halves"), version="0.3")

    registry = Registry.discover(make_settings())
    status = find_status(registry, "halves")
    entry = registry.find("strategy", "halves")

    assert (status.distribution, status.version, status.state) == ("acme-halves", "0.3", "enabled")
    assert (entry.qualified_name, entry.provider) == ("halves:halves", "acme-halves 0.3")
    assert registry.find("piece", "halves:halves") is entry


def test_describing_imports_nothing_of_a_plugin(install: Install) -> None:
    """The first tier reads metadata alone, so that what is broken can be seen and disabled."""
    install("halves", "raise RuntimeError")

    statuses = Registry.discover(make_settings()).describe()

    assert [status.state for status in statuses if status.name == "halves"] == ["enabled"]
    assert "acme_halves" not in sys.modules


def test_a_disabled_plugin_is_never_imported(install: Install) -> None:
    """Neither by listing, nor by asking for its piece, nor by giving its piece as an object."""
    install("halves", "raise RuntimeError")
    settings = make_settings(without=("halves",))
    registry = Registry.discover(settings)
    piece = type("Halves", (), {"__module__": "acme_halves.options", "__repr__": lambda _: "Halves()"})()

    with pytest.raises(UnknownNameError) as by_name:
        registry.find("piece", "halves")
    with pytest.raises(UsageError) as by_object:
        registry.record_for(piece)

    assert find_status(registry, "halves").state == "disabled"
    assert "acme_halves" not in sys.modules
    blame = "plugin 'halves' (acme-halves 1.0) is disabled by --without-plugin: left out by --without-plugin"
    assert blame in by_name.value.message
    assert f"Halves() cannot be used: {blame}" in by_object.value.message
    assert by_object.value.hint == "change --without-plugin"


def test_the_way_out_of_a_file_that_disables_is_the_command(install: Install, tmp_path: Path) -> None:
    """The reason is that of whoever wrote the file, and the file is named."""
    install("halves", write_strategy("halves", "acme_halves"))
    file = tmp_path / "colossal.toml"
    file.write_text('[plugins]\ndisabled = { halves = "issue 41" }\n', encoding="utf-8")
    registry = Registry.discover(PluginSettings.read(tmp_path, {}))

    with pytest.raises(UnknownNameError) as caught:
        registry.find("strategy", "halves")

    assert f"is disabled by {file}: issue 41, and brings it" in caught.value.message
    assert caught.value.hint == "colossal plugins enable halves"


def test_a_failing_plugin_stops_nothing_else(
    install: Install, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is listed with exception, file and line; one warning is logged; others work."""
    install("broken", "x = 1\nimport no_such_module_here\n")
    install("halves", write_strategy("halves", "acme_halves"))

    registry = Registry.discover(make_settings())
    status = find_status(registry, "broken")

    assert status.state == "failed"
    assert status.reason == (
        f"ModuleNotFoundError: No module named 'no_such_module_here' at {path / 'acme_broken.py'}:2"
    )
    assert registry.find("strategy", "halves").plugin == "halves"
    assert len(caplog.records) == 1
    assert caplog.records[0].message.startswith(
        "error[C012] plugin 'broken' (acme-broken 1.0) failed to load\n"
    )
    assert "next: colossal plugins doctor broken, or disable it" in caplog.records[0].message


def test_other_ranks_do_not_repeat_the_warning(
    install: Install, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One warning is enough for all processes of a run."""
    install("broken", "raise RuntimeError")
    monkeypatch.setenv("RANK", "3")

    state = find_status(Registry.discover(make_settings()), "broken").state

    assert state == "failed"
    assert not caplog.records


def test_asking_for_a_piece_of_a_failed_plugin_says_so(install: Install) -> None:
    """The cause is at hand instead of "no such piece"."""
    install("broken", "raise RuntimeError('no luck')")
    registry = Registry.discover(make_settings())

    with pytest.raises(UnknownNameError) as caught:
        registry.find("strategy", "broken")

    assert "plugin 'broken' (acme-broken 1.0) has failed: RuntimeError: no luck" in caught.value.message
    assert caught.value.hint == "colossal plugins doctor broken"
    assert isinstance(caught.value.__cause__, PluginLoadError)


def test_a_plugin_that_exits_has_failed(install: Install) -> None:
    """Not even ``sys.exit`` at import takes the tool down."""
    install("leaver", "import sys; sys.exit(3)")

    status = find_status(Registry.discover(make_settings()), "leaver")

    assert status.state == "failed"
    assert "SystemExit: 3" in status.reason


def test_strict_settings_raise_the_failure(install: Install) -> None:
    """Authors and CI want the traceback."""
    install("broken", "raise RuntimeError('no luck')")
    registry = Registry.discover(make_settings(is_strict=True))

    with pytest.raises(PluginLoadError, match="no luck") as caught:
        registry.activate()

    assert isinstance(caught.value.__cause__, RuntimeError)


def test_an_incompatible_plugin_is_not_imported(install: Install) -> None:
    """Its own requirement says that it would not work."""
    install("old", "raise RuntimeError", requires="colossal-core>=7,<8")

    status = find_status(Registry.discover(make_settings()), "old")

    assert status.state == "incompatible"
    assert status.reason.startswith("needs colossal-core>=7,<8, but ")
    assert "acme_old" not in sys.modules


def test_a_plugin_with_a_wrong_name_has_failed(install: Install) -> None:
    """It is not imported, since nobody could address it."""
    install("My_Nuts", "raise RuntimeError", distribution="acme-nuts", module="acme_nuts")

    status = find_status(Registry.discover(make_settings()), "My_Nuts")

    assert status.state == "failed"
    assert "lower-case letters and digits" in status.reason
    assert "acme_nuts" not in sys.modules


def test_nobody_takes_the_name_of_core(install: Install) -> None:
    """Its records can be neither replaced nor left out."""
    install("core", "raise RuntimeError")

    with pytest.raises(DuplicateNameError) as caught:
        Registry.discover(make_settings())

    assert caught.value.message.startswith("the plugin name 'core' is offered twice, by colossal-core ")
    assert caught.value.hint == "uninstall acme-core: that name is taken"


def test_two_distributions_with_one_plugin_name_are_an_error(install: Install) -> None:
    """Which one counts would depend on the order of directories. Leaving the name out is the way around."""
    install("nuts", "", distribution="acme-nuts", version="1.0", module="acme_nuts")
    install("nuts", "", distribution="other-nuts", version="2.0", module="other_nuts")

    with pytest.raises(DuplicateNameError) as caught:
        Registry.discover(make_settings())
    registry = Registry.discover(make_settings(without=("nuts",)))

    assert (
        caught.value.message
        == "the plugin name 'nuts' is offered twice, by acme-nuts 1.0 and by other-nuts 2.0"
    )
    assert "--without-plugin nuts" in caught.value.hint
    assert find_status(registry, "nuts").state == "disabled"


def test_one_piece_name_by_two_plugins_needs_the_qualified_name(install: Install) -> None:
    """The error names both providers; everything else goes on working."""
    install("left", write_strategy("halves", "acme_left"))
    install("right", write_strategy("halves", "acme_right"))
    registry = Registry.discover(make_settings())

    with pytest.raises(DuplicateNameError) as caught:
        registry.find("strategy", "halves")

    assert "acme-left 1.0 as 'left:halves' and acme-right 1.0 as 'right:halves'" in caught.value.message
    assert caught.value.hint == "use the qualified name"
    assert registry.find("strategy", "right:halves").plugin == "right"
    assert registry.find("piece", "replicated").plugin == "core"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("replicatd", "did you mean 'replicated'?"),
        ("zero2", "pip install colossal-zero"),
        ("zero:zero3", "pip install colossal-zero"),
        ("gemini", "pip install colossal-gemini"),
        ("pipeline", "pip install colossal-pipeline"),
        ("tensor-parallel", "pip install colossal-tensor-parallel"),
        ("qwertz", "see colossal plugins list"),
    ],
)
def test_an_unknown_name_says_what_to_do(name: str, hint: str) -> None:
    """A typo gets the closest name, a piece of ours its distribution."""
    registry = Registry.isolated({})

    with pytest.raises(UnknownNameError) as caught:
        registry.find("piece", name)

    assert caught.value.message.startswith(f"there is no piece {name!r}; there are: recompute, replicated")
    assert caught.value.hint == hint


def test_a_name_of_the_other_kind_is_recognised(registry: Registry) -> None:
    """``[memory] manager = "shards"`` is a likely mistake."""
    with pytest.raises(UnknownNameError, match="'shards' is a strategy"):
        registry.find("memory_manager", "shards")


def test_an_object_stands_for_the_record_with_its_presets(registry: Registry, acme: ModuleType) -> None:
    """One class of options serves several pieces."""
    assert registry.record_for(acme.Sharded(stage=1)).record.name == "sharded1"
    assert registry.record_for(acme.Sharded(stage=2, bucket_bytes=5.0)).record.name == "sharded2"
    assert registry.record_for(acme.Again()).qualified_name == "acme:again"
    assert registry.record_for(Replicated()).qualified_name == "core:replicated"


def test_an_object_that_is_no_piece_is_refused(registry: Registry, acme: ModuleType) -> None:
    """With the presets there are, with the call that was forgotten, or with the names of pieces."""
    with pytest.raises(UsageError, match="sharded1 is stage=1; sharded2 is stage=2"):
        registry.record_for(acme.Sharded(stage=3))
    with pytest.raises(UsageError, match="got the class Again") as caught:
        registry.record_for(acme.Again)
    with pytest.raises(UsageError, match="no plugin offers builtins:int; there are again,"):
        registry.record_for(3)

    assert caught.value.hint == "write Again(...)"


def test_a_record_may_name_a_reexport(acme: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages often show their options at the top."""

    class Plugin:
        """A plugin that names a re-export."""

        @hookimpl
        def colossal_register_strategies(self) -> Iterable[StrategySpec]:
            """Offer it."""
            target = Target("acme_pieces:Ring")
            yield StrategySpec(
                name="wheel", summary="x", phase="shard", target=target, options=Target("acme_pieces:Wheel")
            )

    monkeypatch.setattr(acme, "Wheel", acme.Ring, raising=False)

    entry = Registry.isolated({"wheels": Plugin()}).record_for(acme.Ring())

    assert entry.record.name == "wheel"


def test_axes_have_owners(registry: Registry) -> None:
    """``[parallel] AXIS`` means the piece that brings the axis, or, failing that, parts of it."""
    owners = {
        axis: [e.record.name for e in registry.find_axis_owners(axis)]
        for axis in ("tensor", "data", "replica")
    }

    assert owners == {"tensor": ["shards"], "data": ["experts"], "replica": ["sharded1", "sharded2"]}
    assert registry.find_axis_owners("nowhere") == ()


def test_commands_and_diagnostics_are_collected() -> None:
    """The command line asks the registry for both."""

    @hookimpl
    def commands() -> list[CommandSpec]:
        """Offer a command."""
        return [CommandSpec(name="draw", summary="Draw.", target=Target("shlex:split"))]

    @hookimpl
    def diagnostics() -> list[DiagnosticSpec]:
        """Offer a diagnostic."""
        return [DiagnosticSpec(code="shell", title="A shell", check=Target("shlex:quote"), fix="get one")]

    plugin = SimpleNamespace(colossal_register_commands=commands, colossal_register_diagnostics=diagnostics)
    registry = Registry.isolated({"drawing": plugin})

    assert [entry.qualified_name for entry in registry.commands()] == ["drawing:draw"]
    assert registry.find("command", "draw").load_target() is shlex.split
    assert registry.find("diagnostic", "shell").load_target() is shlex.quote
    assert registry.diagnostics()[-1].record.name == "shell"


def test_core_comes_first_and_then_names(registry: Registry) -> None:
    """The order of a list is the same everywhere."""
    twin = Registry.isolated({"zebra": _make_empty(), "ape": _make_empty()})

    assert [status.name for status in twin.statuses()] == ["core", "ape", "zebra"]
    assert [entry.plugin for entry in registry.records("memory_manager")] == ["core", "acme", "acme"]


def _make_empty() -> object:
    """Return a plugin that offers nothing."""

    @hookimpl
    def offer() -> tuple[()]:
        """Offer nothing."""
        return ()

    return SimpleNamespace(colossal_register_strategies=offer)


def test_a_local_file_is_a_plugin_of_runs_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Listing plugins in somebody's folder must not run what lies there."""
    file = tmp_path / "acme_local_one.py"
    file.write_text(write_strategy("halves", "acme_local_one").replace("\n    ", "\n"), encoding="utf-8")
    (tmp_path / "colossal.toml").write_text('[plugins]\nlocal = ["./acme_local_one.py"]\n', encoding="utf-8")
    settings = PluginSettings.read(tmp_path, {})

    listing = Registry.discover(settings)
    listed = find_status(listing, "acme-local-one")
    was_imported = "acme_local_one" in sys.modules
    running = Registry.discover(settings, load_local=True)

    assert (listed.state, was_imported) == ("enabled", False)
    assert "loaded by colossal run" in listed.reason
    assert "halves" not in [entry.record.name for entry in listing.records("strategy")]
    assert running.find("strategy", "halves").provider == str(file)
    assert any("plugin acme-local-one (local, source sha256:" in line for line in running.agreement_lines())
    monkeypatch.delitem(sys.modules, "acme_local_one")


@pytest.mark.parametrize(
    ("entry", "reason"), [("missing.py", "is not there"), ("wave.py", "would hide the module 'wave'")]
)
def test_a_local_file_that_cannot_be_loaded_has_failed(tmp_path: Path, entry: str, reason: str) -> None:
    """A missing file, and one that would hide a module, are told apart."""
    (tmp_path / "wave.py").write_text("", encoding="utf-8")
    (tmp_path / "colossal.toml").write_text(f"[plugins]\nlocal = ['{entry}']\n", encoding="utf-8")

    registry = Registry.discover(PluginSettings.read(tmp_path, {}), load_local=True)

    assert reason in find_status(registry, Path(entry).stem).reason


def test_an_editable_plugin_is_compared_by_its_source(install: Install, path: Path) -> None:
    """The version of a source tree stays the same while it is edited."""
    install("halves", write_strategy("halves", "acme_halves"), editable=True)
    first = Registry.discover(make_settings()).agreement_lines()
    with (path / "acme_halves.py").open("a", encoding="utf-8") as file:
        file.write("\n# edited\n")
    second = Registry.discover(make_settings()).agreement_lines()

    assert first == tuple(sorted(first))
    differing = set(first) ^ set(second)
    assert len(differing) == 2
    assert all(line.startswith("plugin halves 1.0 (editable, source sha256:") for line in differing)
    assert {line.split()[0] for line in first} >= {"core", "plugin", "python", "torch"}


def test_nothing_imports_torch(install: Install, run_python: Callable[[str], str]) -> None:
    """Describing, activating and planning work where torch cannot even be imported."""
    install("halves", write_strategy("halves", "acme_halves"))

    output = run_python(
        """
        class Refuse:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] in ("torch", "triton", "numpy"):
                    raise ImportError(f"{name} was imported")

        sys.meta_path.insert(0, Refuse())
        from colossal_core import Plan, Replicated, build_plan
        from colossal_core.plugins import Registry

        registry = Registry.discover(load_local=True)
        assert registry.find("strategy", "halves")
        assert registry.observers and registry.agreement_lines() and registry.commands() is not None
        plan = build_plan(registry, [Replicated()], precision="bf16", max_grad_norm=1.0)
        assert Plan.from_dict(plan.to_dict(), registry) == plan
        assert plan.layout(4).data_degree == 4 and plan.rows() and plan.digest()
        print("no torch" if "torch" not in sys.modules else "torch")
        """
    )

    assert output.strip() == "no torch"
