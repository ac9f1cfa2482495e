"""Every member has the same shape, so whoever knows one finds the way in all of them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
MEMBERS = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))
FRAGMENT = re.compile(r"(\d+|\+[a-z0-9-]+)\.(breaking|feature|fix|hook|perf|doc)\.md")
MAX_LINES = 500

each_member = pytest.mark.parametrize("member", MEMBERS, ids=lambda member: member.name)


def read_toml(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file."""
    return tomllib.loads(path.read_text(encoding="utf-8"))


def package_of(member: Path) -> Path:
    """Return the one import package of a member, named after its folder."""
    return member / "src" / f"colossal_{member.name.replace('-', '_')}"


@each_member
def test_member_is_named_after_its_folder(member: Path) -> None:
    """Folder `x-y`, distribution `colossal-x-y`, import `colossal_x_y`."""
    project = read_toml(member / "pyproject.toml")["project"]

    packages = [
        path.name for path in (member / "src").iterdir() if path.is_dir() and path.name.isidentifier()
    ]

    assert project["name"] == f"colossal-{member.name}"
    assert packages == [package_of(member).name]


@each_member
def test_member_is_complete(member: Path) -> None:
    """A member can be read, installed, typed and tested by itself."""
    needed = [
        "README.md",
        "CHANGELOG.md",
        "LICENSE",
        "changelog.d",
        "tests",
        f"{package_of(member)}/py.typed",
    ]

    missing = [name for name in needed if not (member / name).exists()]

    assert not missing
    assert list((member / "tests").rglob("test_*.py"))
    assert (member / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


@each_member
def test_member_registers_pieces_in_its_plugin_module(member: Path) -> None:
    """What a member brings is found in one place: plugin.py, under the name of the folder."""
    entry_points = read_toml(member / "pyproject.toml")["project"].get("entry-points", {})

    plugins = entry_points.get("colossal.plugins", {})

    assert set(plugins.values()) <= {f"{package_of(member).name}.plugin"}
    assert set(plugins) <= {member.name}


@each_member
def test_member_depends_on_core_by_a_range_and_on_no_sibling(member: Path) -> None:
    """Members are versioned alone, so an exact pin or a sibling would tie their releases together."""
    dependencies = read_toml(member / "pyproject.toml")["project"]["dependencies"]

    ours = [dependency for dependency in dependencies if dependency.startswith("colossal-")]

    assert ours == ([] if member.name == "core" else ["colossal-core>=0.1,<1"])
    assert not [dependency for dependency in dependencies if "==" in dependency]


@each_member
def test_changelog_fragments_have_a_known_kind(member: Path) -> None:
    """A fragment with another name would silently be left out of the changelog."""
    names = [path.name for path in (member / "changelog.d").iterdir() if path.name != ".gitignore"]

    unknown = [name for name in names if not FRAGMENT.fullmatch(name)]

    assert not unknown


def test_no_file_is_longer_than_500_lines() -> None:
    """A file that outgrows one sitting is split by noun."""
    folders = ("packages", "tests", "examples", "benchmarks")
    files = [
        path for folder in folders for path in (ROOT / folder).rglob("*.py") if ".venv" not in path.parts
    ]

    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in files
    }

    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}


def test_no_package_stands_above_a_member() -> None:
    """A stray __init__.py would turn folders of the repository into packages, and hide or shadow members."""
    above = [ROOT, ROOT / "packages", ROOT / "tests", *MEMBERS, *(member / "src" for member in MEMBERS)]

    stray = [folder for folder in above if (folder / "__init__.py").exists()]

    assert not stray


def test_layer_contracts_know_every_member_and_module() -> None:
    """A new member or module of core is under the contracts from its first day."""
    settings = read_toml(ROOT / "pyproject.toml")["tool"]["importlinter"]
    core = package_of(ROOT / "packages" / "core")
    names = {path.stem for path in core.iterdir() if not path.stem.startswith(("_", "."))}
    light = {f"colossal_core.{name}" for name in names - {"runtime", "py"}}
    members = {package_of(member).name for member in MEMBERS}

    independence, core_alone, no_torch, no_runtime = settings["contracts"]

    assert set(settings["root_packages"]) == members
    assert set(independence["modules"]) == members - {"colossal_core"}
    assert set(core_alone["forbidden_modules"]) == members - {"colossal_core"}
    assert light <= set(no_torch["source_modules"])
    assert light == set(no_runtime["source_modules"])


def test_plugin_modules_and_pieces_are_under_the_torch_contract() -> None:
    """A light module that reached torch would make every `colossal plugins list` slow."""
    settings = read_toml(ROOT / "pyproject.toml")["tool"]["importlinter"]
    modules = {
        f"{package_of(member).name}.plugin"
        for member in MEMBERS
        if (package_of(member) / "plugin.py").exists()
    }
    modules -= {"colossal_testkit.plugin"}  # a plugin of pytest, not of colossal

    (contract,) = (contract for contract in settings["contracts"] if contract["name"].startswith("(c)"))

    assert modules <= set(contract["source_modules"])
