"""The pytest plugin: light until it is used, strict about markers, and clear about what was skipped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from colossal_testkit import plugin

if TYPE_CHECKING:
    import pytest

TESTS = """
import sys
import pytest

def test_torch_is_not_there():
    assert "torch" not in sys.modules

@pytest.mark.gpu(count=4096)
def test_many_accelerators():
    raise AssertionError

@pytest.mark.slow
def test_patience():
    assert "torch" not in sys.modules
"""


def _run_pytest(folder: Path, *options: str) -> str:
    """Run the tests above in a process of their own and return the report."""
    (folder / "test_them.py").write_text(TESTS)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:randomly",
        "-ra",
        "-c",
        os.devnull,
    ]
    run = subprocess.run(
        [*command, f"--rootdir={folder}", "--strict-markers", "test_them.py", *options],
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    return run.stdout


def test_the_plugin_is_light_and_runs_slow_tests_on_demand(tmp_path: Path) -> None:
    """A run without many-rank tests never pays for torch; ``--slow`` runs what is slow."""
    report = _run_pytest(tmp_path, "--slow", "--deselect", "test_them.py::test_many_accelerators")

    assert "2 passed" in report


def test_what_is_skipped_says_what_is_missing(tmp_path: Path) -> None:
    """Reasons name the number of accelerators, this torch, and the option that runs slow tests."""
    report = _run_pytest(tmp_path)

    assert "1 passed, 2 skipped" in report
    assert "needs 4096 accelerators: " in report
    assert "slow: run with --slow" in report


def test_one_accelerator_may_be_missing_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build with CUDA on a machine without a device is told apart from a build without."""
    import torch

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)

    assert "sees 0" in plugin._describe_missing_accelerators(1)
    assert plugin._describe_missing_accelerators(0) == ""
