"""Registering a plugin is all or nothing, and every refusal says which hook and which line."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from colossal_core.plugins import AxisSpec, PluginStatus, Registry, StrategySpec, Target, hookimpl

TARGET = Target("somewhere:Something")


def make_record(name: str = "halves", **fields: Any) -> StrategySpec:
    """Return a valid strategy."""
    return StrategySpec(name=name, summary="x", options=TARGET, target=TARGET, phase="shard", **fields)


def activate(**hooks: Any) -> tuple[PluginStatus, Registry]:
    """Return the status of a plugin with these attributes, and its registry."""
    registry = Registry.isolated({"nuts": SimpleNamespace(**hooks)})
    return registry.statuses()[1], registry


@hookimpl
def offer_nothing_of_the_kind() -> Iterable[object]:
    """Offer a good record and then something else."""
    yield make_record()
    yield "not a record"


@hookimpl
def offer_twice() -> Iterable[StrategySpec]:
    """Offer one name twice."""
    return [make_record(), make_record()]


@hookimpl
def offer_none() -> None:
    """Forget to return."""


@hookimpl
def offer_misplaced_axis() -> Iterable[StrategySpec]:
    """Offer an axis without a place."""
    return [make_record(axes=(AxisSpec(name="ring"),))]


@hookimpl
def offer_data_axis() -> Iterable[StrategySpec]:
    """Offer the axis of core."""
    return [make_record(axes=(AxisSpec(name="data"),))]


@hookimpl
def offer_wrong_record() -> Iterable[StrategySpec]:
    """Offer a record that refuses itself."""
    yield make_record()
    yield make_record("Not A Name")


@hookimpl
def ask_for_too_much(plan: object) -> None:
    """Take an argument that the hook does not have."""


@hookimpl(tryfirst=True)
def offer_first() -> Iterable[StrategySpec]:
    """Try to come first."""
    return ()


@hookimpl(wrapper=True)
def wrap_the_others() -> Any:
    """Try to see what others do."""
    return (yield)


@hookimpl
def do_something_new() -> None:
    """Implement a hook that does not exist."""


def not_marked() -> Iterable[StrategySpec]:
    """Lack the mark."""
    return ()


@pytest.mark.parametrize(
    ("hook", "function", "reason"),
    [
        (
            "colossal_register_strategies",
            offer_nothing_of_the_kind,
            "expected StrategySpec, got 'not a record'",
        ),
        ("colossal_register_memory_managers", offer_twice, "expected MemoryManagerSpec"),
        ("colossal_register_strategies", offer_twice, "it offers piece 'halves' twice"),
        ("colossal_register_strategies", offer_none, "expected an iterable of StrategySpec, got None"),
        ("colossal_register_strategies", offer_misplaced_axis, "axis 'ring' of record 'halves' has no place"),
        ("colossal_register_strategies", offer_data_axis, "brings the axis 'data', which is core's own"),
        ("colossal_register_strategies", offer_wrong_record, "name must be lower-case"),
        ("colossal_register_strategies", ask_for_too_much, "plan"),
        ("colossal_register_strategies", offer_first, "tryfirst and trylast are refused"),
        ("colossal_after_step_taken", wrap_the_others, "wrappers are refused"),
        ("colossal_register_stratgies", do_something_new, "did you mean 'colossal_register_strategies'?"),
        ("colossal_register_strategies", not_marked, "is not marked; write @hookimpl above it"),
        ("something_else", not_marked, "it implements no hook"),
    ],
)
def test_a_plugin_that_breaks_the_contract_has_failed(
    hook: str, function: Callable[..., Any], reason: str
) -> None:
    """Nothing of it stays behind, and the reason is in its status."""
    status, registry = activate(**{hook: function})

    assert status.state == "failed"
    assert reason in status.reason
    assert registry.records("piece") == Registry.isolated({}).records("piece")


def test_the_line_of_a_refused_record_is_the_plugins() -> None:
    """Not the line of our own validators, where the error is raised."""
    status, _ = activate(colossal_register_strategies=offer_wrong_record)

    line = make_record.__code__.co_firstlineno + 2
    assert status.reason.endswith(f"at {__file__}:{line}")


def test_a_hook_of_a_later_version_can_be_marked_optional() -> None:
    """A plugin that supports several versions of core says so."""

    @hookimpl(optionalhook=True)
    def future() -> None:
        """Implement what this version does not know."""

    @hookimpl
    def offer() -> list[StrategySpec]:
        """Offer one."""
        return [make_record()]

    status, registry = activate(colossal_after_dinner_served=future, colossal_register_strategies=offer)

    assert status.state == "enabled"
    assert registry.find("strategy", "halves").plugin == "nuts"


def test_registering_touches_no_other_attribute() -> None:
    """A lazy package that imports on attribute access stays lazy."""

    class Lazy:
        """A plugin with an attribute that must not be read."""

        @property
        def heavy(self) -> object:
            """Stand for an import of torch."""
            raise AssertionError

        @hookimpl
        def colossal_register_strategies(self) -> list[StrategySpec]:
            """Offer one."""
            return [make_record()]

    assert Registry.isolated({"lazy": Lazy()}).find("piece", "lazy:halves").plugin == "lazy"
