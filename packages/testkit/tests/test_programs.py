"""Programs in interpreters of their own."""

from __future__ import annotations

import subprocess

import pytest

from colossal_testkit.programs import run_program


@pytest.mark.parametrize("around", ["", "ignore:Failed to initialize NumPy", "ignore"])
def test_warnings_are_errors_but_for_the_one_about_numpy(
    monkeypatch: pytest.MonkeyPatch, around: str
) -> None:
    """Whatever the tests around it let pass."""
    monkeypatch.setenv("PYTHONWARNINGS", around)
    source = """
        import sys, warnings
        warnings.warn("Failed to initialize NumPy: No module named 'numpy'", stacklevel=1)
        print(*sys.argv[1:])
        warnings.warn("another", stacklevel=1)
        print("not here")
    """

    ended = run_program(source, "one", "two")

    assert ended.returncode == 1
    assert ended.stdout == "one two\n"
    assert "UserWarning: another" in ended.stderr


def test_a_program_that_does_not_end_is_killed() -> None:
    """After its time, with the exception of the standard library."""
    with pytest.raises(subprocess.TimeoutExpired):
        run_program("import time; time.sleep(60)", timeout=0.2)
