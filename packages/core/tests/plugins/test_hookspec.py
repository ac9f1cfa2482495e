"""The hooks are a contract: their signatures are frozen, and every one of them is documented in full."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest

from colossal_core.plugins import hookspec
from colossal_core.plugins.hookspec import OBSERVERS, PROJECT, REGISTRATIONS

SNAPSHOT = Path(__file__).with_name("hookspec.snapshot.json")
HOOKS = sorted(name for name in dir(hookspec) if name.startswith("colossal_"))
PARTS = ("Example:", "Called:", "May:", "Args:", "Returns:", "Added in:")


def describe_hooks() -> dict[str, list[str]]:
    """Return every hook with the names of its arguments."""
    return {name: list(inspect.signature(getattr(hookspec, name)).parameters) for name in HOOKS}


def test_signatures_equal_the_snapshot() -> None:
    """A changed hook breaks plugins that we do not know, so the change must be visible in a file."""
    snapshot = json.loads(SNAPSHOT.read_text(encoding="utf-8"))

    assert describe_hooks() == snapshot


def test_every_hook_either_registers_or_observes() -> None:
    """The registry treats the two differently, and a hook in neither table would never be called."""
    assert sorted([*REGISTRATIONS, *OBSERVERS]) == HOOKS
    assert all(hasattr(getattr(hookspec, name), f"{PROJECT}_spec") for name in HOOKS)


@pytest.mark.parametrize("name", HOOKS)
def test_every_hook_is_documented_in_all_parts(name: str) -> None:
    """Plugin authors learn from the docstring alone when a hook is called and what it may do."""
    text = inspect.getdoc(getattr(hookspec, name)) or ""

    positions = [text.find(f"\n{part}\n") for part in PARTS]

    assert all(position > 0 for position in positions)
    assert positions == sorted(positions)
    assert f"def {name}(" in text


@pytest.mark.parametrize("name", HOOKS)
def test_the_example_of_every_hook_is_a_whole_plugin(name: str) -> None:
    """What stands in the docstring can be copied: it compiles and marks the hook."""
    text = inspect.getdoc(getattr(hookspec, name)) or ""
    example = inspect.cleandoc(text.partition("::\n")[2].partition("\nCalled:")[0])

    compile(example, name, "exec")

    assert "import" in example
    assert f"@hookimpl\ndef {name}(" in example
