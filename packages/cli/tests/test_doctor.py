"""``colossal doctor``: findings of core and of plugins, with remedies and an exit code."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .conftest import Program

# The checks of core import torch, which takes seconds on a busy machine.
pytestmark = pytest.mark.timeout(90)

_PLUGIN = """
from colossal_core.plugins import DiagnosticSpec, Target, hookimpl

@hookimpl
def colossal_register_diagnostics():
    for code in ("weather", "lazy", "crash"):
        check = Target(f"acme_checks:{code}")
        yield DiagnosticSpec(code=code, title="T.", check=check, fix="carry an umbrella")
"""

_CHECKS = """
from colossal_core.plugins import Finding

def weather():
    return [Finding(severity="warning", code="rain", message="it rains")]

def lazy():
    return None

def crash():
    raise RuntimeError("the barometer exploded")
"""


def test_a_machine_in_order_is_told_what_was_seen(program: Program) -> None:
    """Only notes, and exit code 0; torch is imported by the checks, not by the program."""
    done = program.run("doctor", "--json")

    findings = json.loads(done.out)
    assert done.code == 0, done.out
    assert any(finding["check"] == "torch" and "torch" in finding["message"] for finding in findings)
    assert {finding["severity"] for finding in findings} <= {"note", "warning"}


def test_checks_of_plugins_run_and_a_broken_one_is_a_finding(program: Program) -> None:
    """The record's remedy stands beside a finding that has none, and one crash hides nothing."""
    program.install("meteo", _PLUGIN)
    program.write("site/acme_checks.py", _CHECKS)
    program.install("broken", "raise ImportError('no such luck')")

    done = program.run("doctor")

    lines = {line.split()[1]: line for line in done.out.splitlines()}
    assert done.code == 1
    assert lines["weather"].startswith("warning")
    assert "carry an umbrella" in lines["weather"]
    assert "the barometer exploded" in lines["crash"]
    assert "must be a function that returns findings" in lines["lazy"]
    assert "no such luck" in lines["plugins"]
    assert "torch" in lines
