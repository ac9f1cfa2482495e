"""Observers run in one order on every rank; errors are isolated only where no rank can wait for another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from colossal_core import Plan
from colossal_core.errors import PluginError
from colossal_core.plugins import PluginSettings, Registry, hookimpl


def make_plugin(name: str, calls: list[str], **marks: Any) -> object:
    """Return a plugin that notes when its observer is called."""

    def note(step: int) -> None:
        """Note the call."""
        calls.append(f"{name}{step}")

    return SimpleNamespace(colossal_before_step_taken=hookimpl(note, **marks))


@hookimpl
def fail_always() -> None:
    """Fail."""
    message = "no luck"
    raise RuntimeError(message)


def test_observers_run_in_the_order_of_plugin_names() -> None:
    """Whatever the order of registration; an observer may ask to come first or last."""
    calls: list[str] = []
    plugins = {
        "cherry": make_plugin("c", calls),
        "apple": make_plugin("a", calls),
        "damson": make_plugin("d", calls, tryfirst=True),
        "banana": make_plugin("b", calls),
    }

    Registry.isolated(plugins).observers.before_step_taken(7)

    assert calls == ["d7", "a7", "b7", "c7"]


def test_every_observer_gets_the_arguments_it_asks_for() -> None:
    """All hooks, with some arguments left out."""
    seen: dict[str, object] = {}

    def watch(hook: str, function: Callable[..., None]) -> Callable[..., None]:
        seen[hook] = None
        return hookimpl(function)

    plugin = SimpleNamespace(
        colossal_before_run_started=watch("start", lambda plan: seen.update(start=plan)),
        colossal_after_run_finished=watch("finish", lambda summary: seen.update(finish=summary)),
        colossal_before_step_taken=watch("before", lambda step: seen.update(before=step)),
        colossal_after_step_taken=watch("after", lambda metrics: seen.update(after=metrics)),
        colossal_after_checkpoint_saved=watch("saved", lambda step, path: seen.update(saved=(path, step))),
        colossal_on_run_error=watch("error", lambda error: seen.update(error=error)),
    )
    observers = Registry.isolated({"watch": plugin}).observers
    plan, error = Plan(), ValueError("x")

    observers.before_run_started(plan)
    observers.before_step_taken(1)
    observers.after_step_taken(2, {"grad_norm": 0.5})
    observers.after_checkpoint_saved(Path("step-2"), 2)
    observers.on_run_error(error, 3)
    observers.after_run_finished({"steps": 3})

    assert seen == {
        "start": plan,
        "before": 1,
        "after": {"grad_norm": 0.5},
        "saved": (Path("step-2"), 2),
        "error": error,
        "finish": {"steps": 3},
    }


def test_a_failing_step_observer_is_logged_once_and_skipped(caplog: pytest.LogCaptureFixture) -> None:
    """Training goes on, and the other observers are still called."""
    calls: list[str] = []
    broken = SimpleNamespace(colossal_before_step_taken=fail_always)
    observers = Registry.isolated({"broken": broken, "good": make_plugin("g", calls)}).observers

    for step in (1, 2, 3):
        observers.before_step_taken(step)

    assert calls == ["g1", "g2", "g3"]
    assert len(caplog.records) == 1
    text = caplog.records[0].message
    assert "plugin 'broken' (object 'broken') failed in colossal_before_step_taken" in text
    assert "RuntimeError: no luck" in text
    assert f"at {__file__}:" in text


def test_an_error_in_lock_step_is_not_swallowed() -> None:
    """The other ranks may be waiting in a collective of the same observer."""
    broken = SimpleNamespace(colossal_before_run_started=fail_always)
    observers = Registry.isolated({"broken": broken}).observers

    with pytest.raises(PluginError, match="failed in colossal_before_run_started\n  RuntimeError: no luck"):
        observers.before_run_started(Plan())


def test_strict_settings_raise_from_step_observers(caplog: pytest.LogCaptureFixture) -> None:
    """Except while another error is being reported, which must not be replaced."""
    broken = SimpleNamespace(colossal_before_step_taken=fail_always, colossal_on_run_error=fail_always)
    observers = Registry.isolated({"broken": broken}, PluginSettings(is_strict=True)).observers

    with pytest.raises(PluginError, match="no luck"):
        observers.before_step_taken(1)
    observers.on_run_error(ValueError("the real one"), 1)

    assert "failed in colossal_on_run_error" in caplog.records[-1].message
