"""What metadata says about installed plugins."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from colossal_core.plugins.discovery import (
    PluginInfo,
    describe_core,
    find_incompatibility,
    find_installed,
    find_local,
)

if TYPE_CHECKING:
    from ..conftest import Install


def test_entry_points_are_sorted_by_name(
    install: Install, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of directories differs between hosts, and ranks must agree."""
    for name in ("walnut", "almond", "cashew"):
        install(name, "")
    monkeypatch.syspath_prepend(str(site))

    names = [info.name for info in find_installed() if info.distribution.startswith("acme-")]

    assert names == ["almond", "cashew", "walnut"]


def test_metadata_tells_who_brings_a_plugin(
    install: Install, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it without importing the plugin, which could not be imported here."""
    install("my-nuts", "raise RuntimeError", version="2.1", requires="colossal-core<3", editable=True)
    monkeypatch.syspath_prepend(str(site))

    (info,) = [info for info in find_installed() if info.name == "my-nuts"]

    assert (info.module, info.package) == ("acme_my_nuts", "acme_my_nuts")
    assert info.provider == "acme-my-nuts 2.1"
    assert info.title == "plugin 'my-nuts' (acme-my-nuts 2.1)"
    assert info.is_editable
    assert info.requires == ("colossal-core<3",)


def test_the_first_of_two_copies_of_a_distribution_counts(
    install: Install, site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy that an earlier folder hides would not be imported either, so it is no second provider."""
    install("nuts", "", version="1.0")
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (site / "acme_nuts-1.0.dist-info").rename(hidden / "acme_nuts-1.0.dist-info")
    install("nuts", "", version="2.0")
    monkeypatch.syspath_prepend(str(hidden))
    monkeypatch.syspath_prepend(str(site))

    versions = [info.version for info in find_installed() if info.name == "nuts"]

    assert versions == ["2.0"]


@pytest.mark.parametrize(
    ("requirement", "version", "fault"),
    [
        ("colossal-core>=0.1,<1", "0.4.2", ""),
        ("colossal-core>=0.1,<1", "1.0", "needs colossal-core"),
        ("colossal-core", "0.1", ""),
        ("Colossal.Core (>=0.5)", "0.1", "needs colossal-core"),
        ("colossal-core>=0.5 ; python_version >= '3'", "0.1", "needs colossal-core"),
        ("colossal-core>=0.5 ; python_version < '3'", "0.1", ""),
        ("colossal-core>=0.5 ; extra == 'all'", "0.1", ""),
        ("colossal-core[cuda]>=0.5", "0.1", "needs colossal-core"),
        ("colossal-core>=0.2", "0.2.0.dev1", ""),
        ("colossal-core>=0.2", "0.2rc1", ""),
        ("colossal-core<0.2", "0.2rc1", "needs colossal-core"),
        ("colossal-core>=0.1", "0.2rc1", ""),
        ("colossal-core>=0.1", "", ""),
        ("colossal-cores>=9", "0.1", ""),
        ("torch>=9", "0.1", ""),
    ],
)
def test_the_requirement_on_core_decides(requirement: str, version: str, fault: str) -> None:
    """Pre-releases count as the release they lead to; other requirements are the installer's business."""
    info = PluginInfo(name="nuts", module="nuts", requires=("attrs", requirement))

    found = find_incompatibility(info, version)

    assert found.startswith(fault)
    assert bool(found) == bool(fault)
    assert not found or f"{version} is installed" in found


@pytest.mark.parametrize("name", ["My_Nuts", "nuts!", "9nuts", ""])
def test_a_wrong_name_is_found(name: str) -> None:
    """Names are typed by users, in commands and in files."""
    assert PluginInfo(name=name, module="x").find_fault()
    assert not PluginInfo(name="my-nuts2", module="x").find_fault()


def test_a_local_file_is_named_by_its_stem(tmp_path: Path) -> None:
    """What users type looks like any plugin name."""
    infos = find_local([tmp_path / "my_schedule.py", tmp_path / "cards.py"])

    assert [(info.name, info.module) for info in infos] == [
        ("cards", "cards"),
        ("my-schedule", "my_schedule"),
    ]
    assert infos[0].provider == str(tmp_path / "cards.py")


def test_core_describes_itself() -> None:
    """Its own pieces are listed with distribution and version too."""
    info = describe_core("colossal_core.plugins.builtin")

    assert (info.name, info.distribution, info.origin) == ("core", "colossal-core", "core")
    assert info.version
