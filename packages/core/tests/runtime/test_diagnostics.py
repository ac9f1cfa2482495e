"""What ``colossal doctor`` finds in core."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from colossal_core.plugins.builtin import colossal_register_diagnostics
from colossal_core.plugins.records import Finding
from colossal_core.runtime import diagnostics

if TYPE_CHECKING:
    import pytest


def _list_severe(findings: list[Finding]) -> list[str]:
    """Return the messages of errors and warnings."""
    return [finding.message for finding in findings if finding.severity != "note"]


def test_every_registered_check_runs_and_returns_findings() -> None:
    """The records of core name functions that exist, one for each public check."""
    names = set()

    for record in colossal_register_diagnostics():
        check = record.check.load()
        assert callable(check)
        assert all(isinstance(finding, Finding) for finding in check())
        names.add(record.check.attribute)

    assert names == set(diagnostics.__all__)


def test_an_old_torch_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the version that is there and the oldest that would do."""
    monkeypatch.setattr(torch, "__version__", "2.4.1+cpu")

    (message,) = _list_severe(list(diagnostics.check_torch()))

    assert "2.4.1" in message
    assert "2.11" in message


def test_a_compiler_that_does_not_exist_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Both the one in CXX and one that is simply not there."""
    monkeypatch.setenv("CXX", "/nowhere/clang++ -O2")
    assert "/nowhere/clang++" in _list_severe(list(diagnostics.check_compilers()))[0]

    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no c++ or g++ on PATH" in _list_severe(list(diagnostics.check_compilers()))[0]


def test_an_interface_that_does_not_exist_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo would only say that it cannot bind."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth77")

    (message,) = _list_severe(list(diagnostics.check_network()))

    assert "GLOO_SOCKET_IFNAME names 'eth77'" in message


def test_stale_variables_of_a_launcher_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``launch`` would stumble over is found before."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "4")

    (finding,) = diagnostics.check_environment()

    assert finding.severity == "error"
    assert "RANK is not set" in finding.message
    assert finding.hint
