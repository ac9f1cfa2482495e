"""Targets name objects and load them when asked."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from colossal_core.errors import CapabilityError, PluginError, PluginLoadError
from colossal_core.plugins import Target


def test_a_target_imports_nothing_until_it_is_loaded() -> None:
    """Listing a piece costs no import of its implementation."""
    target = Target("wave:Wave_read")
    sys.modules.pop("wave", None)

    before = "wave" in sys.modules
    loaded = target.load()

    assert not before
    assert loaded is sys.modules["wave"].Wave_read
    assert (target.module, target.attribute, target.package, str(target)) == (
        "wave",
        "Wave_read",
        "wave",
        "wave:Wave_read",
    )


def test_the_attribute_may_be_dotted() -> None:
    """A method or a nested class can be named."""
    assert Target("pathlib:Path.exists").load() is Path.exists


@pytest.mark.parametrize("path", ["wave", "wave.Wave_read", ":x", "wave:", "wave: x", "1a:b", 7, None])
def test_anything_but_module_and_attribute_is_refused(path: Any) -> None:
    """The mistake shows where it is made, not when a plan uses the piece."""
    with pytest.raises(PluginError, match="a target is 'module:attribute'"):
        Target(path)


@pytest.mark.parametrize(
    ("path", "reason"),
    [("no_such_module:x", "ModuleNotFoundError"), ("wave:NoSuchName", "AttributeError")],
)
def test_a_failing_load_names_the_provider_and_the_cause(path: str, reason: str) -> None:
    """Whoever wrote the target learns that it is theirs."""
    with pytest.raises(PluginLoadError, match=reason) as caught:
        Target(path).load("plugin 'zero' (colossal-zero 0.1.0)")

    assert caught.value.message.startswith(f"plugin 'zero' (colossal-zero 0.1.0): cannot load {path!r}")
    assert caught.value.__cause__ is not None


def test_a_failing_load_names_the_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line is that of the module, not of our own loader."""
    (tmp_path / "breaks_here.py").write_text("x = 1\n\nx = x / 0\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))

    with pytest.raises(PluginLoadError) as caught:
        Target("breaks_here:x").load()

    assert (
        f"ZeroDivisionError: division by zero\n  at {tmp_path / 'breaks_here.py'}:3" in caught.value.message
    )


def test_a_missing_capability_passes_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module may say by itself that it cannot work on this machine."""
    source = "from colossal_core import CapabilityError\nraise CapabilityError('no such device')\n"
    (tmp_path / "lacks_device.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))

    with pytest.raises(CapabilityError, match="no such device"):
        Target("lacks_device:x").load()
