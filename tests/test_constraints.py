"""pip and uv read the tested versions from two places, which must say the same."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def read_constraints() -> list[str]:
    """Return the lines of constraints.txt that are no comments."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_uv_and_pip_see_the_same_versions() -> None:
    """constraints.txt is for pip, [tool.uv] for uv."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

    assert settings["tool"]["uv"]["constraint-dependencies"] == read_constraints()


def test_every_constraint_is_one_exact_version_and_sorted() -> None:
    """A tested version is a version, not a range; sorted lists merge without conflicts."""
    names = [line.partition("==")[0] for line in read_constraints()]

    assert all("==" in line for line in read_constraints())
    assert names == sorted(names)


def test_no_lock_file_is_tracked() -> None:
    """A lock file would carry the addresses of whoever's package registry wrote it."""
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()

    assert "uv.lock" in ignored
