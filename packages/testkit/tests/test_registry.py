"""Isolated registries: core and what the test put there, in every process."""

from __future__ import annotations

import pytest

from colossal_core.building import build_plan
from colossal_core.errors import UnknownNameError
from colossal_core.plugins import CommandSpec, DiagnosticSpec, Target
from colossal_testkit.ranks import run_ranks
from colossal_testkit.registry import isolated_registry, target_of

from .broken_managers import Broken, BrokenManager, make_registry


def load_on_rank(piece: Broken) -> tuple[str, bool]:
    """Resolve a piece of this folder in a process that never collected it."""
    planned = build_plan(make_registry(), [piece]).memory
    return planned.name, planned.record.target.load() is BrokenManager


def test_records_are_offered_and_nothing_else() -> None:
    """Installed plugins take no part."""
    registry = make_registry()

    assert [entry.record.name for entry in registry.records("memory_manager")] == ["replicated", "broken"]
    assert registry.record_for(Broken()).record.name == "broken"


def test_every_kind_of_record_is_registered() -> None:
    """Commands and diagnostics too."""
    registry = isolated_registry(
        CommandSpec(name="greet", summary="Say hello.", target=Target("somewhere:greet")),
        DiagnosticSpec(code="a-test", title="A test", check=Target("somewhere:check"), fix="Do nothing."),
        plugin="mine",
    )

    assert [entry.record.name for entry in registry.commands() if entry.plugin == "mine"] == ["greet"]
    diagnostics = [entry.record for entry in registry.diagnostics() if entry.plugin == "mine"]
    assert [record.title for record in diagnostics if isinstance(record, DiagnosticSpec)] == ["A test"]


def test_unknown_names_are_unknown() -> None:
    """A registry without records knows core's pieces only."""
    with pytest.raises(UnknownNameError):
        isolated_registry().find("memory_manager", "broken")


def test_targets_in_test_files_resolve_on_ranks() -> None:
    """A class of a test folder is found wherever the file was loaded."""
    assert target_of(Broken).attribute == "Broken"
    assert run_ranks(load_on_rank, 2, Broken(fault="norm")) == [("broken", True)] * 2
