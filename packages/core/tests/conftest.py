"""Fixtures for the torch-free half of core: sample pieces, fake installations, fresh interpreters."""

from __future__ import annotations

import importlib
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Protocol

import pytest

from colossal_core.plugins import Registry

SAMPLES = Path(__file__).parent / "samples"


class Install(Protocol):
    """Put a distribution with one plugin into a folder, as an installer would leave it there."""

    def __call__(
        self,
        name: str,
        source: str,
        *,
        distribution: str = "",
        version: str = "1.0",
        module: str = "",
        requires: str = "colossal-core>=0.1",
        editable: bool = False,
    ) -> Path:
        """Write metadata and the light module, and return the folder that belongs on the path."""


@pytest.fixture
def acme(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return a module with pieces that need no implementation."""
    monkeypatch.syspath_prepend(str(SAMPLES))
    return importlib.import_module("acme_pieces")


@pytest.fixture
def registry(acme: ModuleType) -> Registry:
    """Return a registry of core and the sample pieces."""
    return Registry.isolated({"acme": acme})


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keep settings of whoever runs the tests out of them."""
    for name in ("PLUGINS", "WITHOUT_PLUGINS", "NO_PLUGINS", "STRICT_PLUGINS"):
        monkeypatch.delenv(f"COLOSSAL_{name}", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "no-config"))


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Return an empty folder that stands for site-packages."""
    folder = tmp_path / "site"
    folder.mkdir()
    return folder


@pytest.fixture
def install(site: Path) -> Install:
    """Return a function that installs a fake distribution into ``site``."""

    def write(
        name: str,
        source: str,
        *,
        distribution: str = "",
        version: str = "1.0",
        module: str = "",
        requires: str = "colossal-core>=0.1",
        editable: bool = False,
    ) -> Path:
        distribution = distribution or f"acme-{name}"
        module = module or f"acme_{name.replace('-', '_')}"
        (site / f"{module}.py").write_text(textwrap.dedent(source), encoding="utf-8")
        info = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        metadata = (
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\nRequires-Dist: {requires}\n"
        )
        (info / "METADATA").write_text(metadata, encoding="utf-8")
        points = f"[colossal.plugins]\n{name} = {module}\n"
        (info / "entry_points.txt").write_text(points, encoding="utf-8")
        if editable:
            url = '{"url": "file:///somewhere", "dir_info": {"editable": true}}'
            (info / "direct_url.json").write_text(url, encoding="utf-8")
        return site

    return write


@pytest.fixture
def run_python(site: Path, tmp_path: Path) -> Callable[[str], str]:
    """Return a function that runs a script in a fresh interpreter that sees ``site``."""

    def run(script: str) -> str:
        prelude = f"import sys; sys.path.insert(0, {str(site)!r})\n"
        done = subprocess.run(
            [sys.executable, "-c", prelude + textwrap.dedent(script)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run
