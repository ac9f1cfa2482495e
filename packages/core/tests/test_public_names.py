"""The package exports lazily."""

from __future__ import annotations

from collections.abc import Callable

import colossal_core
from colossal_core import errors


def test_public_names_are_sorted_and_have_homes() -> None:
    """Readers and tools find every name, in order."""
    assert colossal_core.__all__ == sorted(colossal_core.__all__)
    assert set(colossal_core.__all__) == set(colossal_core._HOMES)
    assert set(colossal_core.__all__) <= set(dir(colossal_core))


def test_a_name_is_the_object_of_its_home() -> None:
    """There is one class under one path."""
    assert colossal_core.UsageError is errors.UsageError
    assert colossal_core.Plan.__module__ == "colossal_core.plan"


def test_an_unknown_attribute_is_an_attribute_error() -> None:
    """``hasattr`` and tab completion work as with any module."""
    assert not hasattr(colossal_core, "Boster")


def test_importing_the_package_imports_nothing_else(run_python: Callable[[str], str]) -> None:
    """A plugin's light module pays nothing for ``import colossal_core``."""
    output = run_python("import colossal_core; print([m for m in sys.modules if 'colossal' in m])")

    assert output.strip() == "['colossal_core']"
