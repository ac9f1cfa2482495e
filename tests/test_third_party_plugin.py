"""A plugin of somebody else, built and installed as its author would, is used, switched off and survived.

The plugin is examples/plugin-template: its wheel is unpacked into a folder on the path of fresh processes,
which is all that an installer does with a pure wheel.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

TEMPLATE = Path(__file__).parents[1] / "examples" / "plugin-template"
COLOSSAL = Path(sys.executable).with_name("colossal")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the wheel of a copy of the template."""
    source, target = tmp_path_factory.mktemp("plugin") / "source", tmp_path_factory.mktemp("dist")
    shutil.copytree(TEMPLATE, source)
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(target)]
    subprocess.run(build, cwd=source, check=True, capture_output=True)
    (built,) = target.glob("*.whl")
    return built


class Machine:
    """A folder of installed distributions, and a project folder in which commands run."""

    def __init__(self, wheel: Path, folder: Path) -> None:
        """Install the wheel."""
        self.site, self.project = folder / "site", folder / "project"
        self.project.mkdir()
        zipfile.ZipFile(wheel).extractall(self.site)
        (self.project / "colossal.toml").write_text("", encoding="utf-8")
        config = {"HOME": str(folder), "XDG_CONFIG_HOME": str(folder / "config")}
        kept = {name: value for name, value in os.environ.items() if not name.startswith("COLOSSAL_")}
        self._environment = kept | config | {"PYTHONPATH": str(self.site), "PYTHONWARNINGS": "ignore"}

    def run(self, *command: str, exit_code: int = 0) -> str:
        """Run a command in the project and return what it printed, errors when it is to fail."""
        ended = subprocess.run(
            command, cwd=self.project, env=self._environment, capture_output=True, text=True, check=False
        )
        assert ended.returncode == exit_code, ended.stdout + ended.stderr
        return ended.stderr if exit_code else ended.stdout

    def colossal(self, *arguments: str, exit_code: int = 0) -> str:
        """Run the ``colossal`` command."""
        return self.run(str(COLOSSAL), *arguments, exit_code=exit_code)

    def python(self, code: str, exit_code: int = 0) -> str:
        """Run Python code."""
        return self.run(sys.executable, "-c", code, exit_code=exit_code)

    def status(self) -> dict[str, Any]:
        """Return what `colossal plugins list --json` says about the plugin."""
        plugins = json.loads(self.colossal("plugins", "list", "--json"))
        (status,) = (plugin for plugin in plugins if plugin["name"] == "softcap")
        found: dict[str, Any] = status
        return found


@pytest.fixture
def machine(wheel: Path, tmp_path: Path) -> Machine:
    """Return a machine on which the plugin is installed."""
    return Machine(wheel, tmp_path)


CAPPED = """
import torch
from torch import nn
from colossal_core import Booster
{line}
outputs = booster.boost(nn.Linear(1, 1))(torch.full((1, 1), 1e6))
print("largest", float(outputs.abs()))
"""


def test_installed_plugin_is_listed(machine: Machine) -> None:
    """Installing is enough; the list says what it brings, from which distribution."""
    status = machine.status()

    assert status["state"] == "enabled"
    assert status["distribution"] == "colossal-softcap"
    assert status["version"] == "0.1.0"


@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    ("line", "largest"),
    [
        ('booster = Booster("softcap")', 30.0),
        ("from colossal_softcap import SoftCap; booster = Booster(SoftCap(cap=2.0))", 2.0),
        ('booster = Booster(plan={"pieces": {"softcap": {"cap": 3.0}}})', 3.0),
        ('booster = Booster(plan="plan.toml")', 4.0),
    ],
    ids=["name", "object", "dict", "toml"],
)
def test_plugin_is_used_however_it_is_spelled(machine: Machine, line: str, largest: float) -> None:
    """A bare name, an object, a dict and a file mean the same piece, each with its options."""
    (machine.project / "plan.toml").write_text("[pieces.softcap]\ncap = 4.0\n", encoding="utf-8")

    printed = machine.python(CAPPED.format(line=line))

    assert f"largest {largest}" in printed


def test_disabled_plugin_is_not_imported(machine: Machine) -> None:
    """What is switched off is left alone, also when somebody asks for it, and the reason is shown."""
    machine.colossal("plugins", "disable", "softcap", "--why", "breaks our resume")
    (machine.site / "colossal_softcap" / "plugin.py").write_text(
        "raise SystemExit('imported')", encoding="utf-8"
    )

    status = machine.status()
    printed = machine.python('from colossal_core import Booster; Booster("softcap")', exit_code=1)

    assert (status["state"], status["reason"]) == ("disabled", "breaks our resume")
    assert "breaks our resume" in printed
    assert "SystemExit" not in printed


def test_plugin_that_raises_is_failed_and_the_rest_works(machine: Machine) -> None:
    """A broken plugin costs itself only, and the list says why and where."""
    (machine.site / "colossal_softcap" / "plugin.py").write_text("1 / 0\n", encoding="utf-8")

    status = machine.status()
    printed = machine.python('from colossal_core import Booster; Booster(); print("made")')

    assert status["state"] == "failed"
    assert "ZeroDivisionError" in status["reason"]
    assert "plugin.py:1" in status["reason"]
    assert "made" in printed


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_template_passes_its_own_tests(machine: Machine) -> None:
    """Who copies the template starts with tests that pass."""
    folder = shutil.copytree(TEMPLATE / "tests", machine.project / "tests")

    printed = machine.run(sys.executable, "-m", "pytest", "-q", str(folder))

    assert "passed" in printed
