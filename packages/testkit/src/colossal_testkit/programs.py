"""Run a program in an interpreter of its own, for what a test does to a whole process: limits, signals, exit.

::

    def test_a_full_disk_is_named(tmp_path: Path) -> None:
        ended = run_program("import sys; print(sys.argv[1])", str(tmp_path))

        assert ended.returncode == 0, ended.stderr
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

__all__ = ["run_program"]

_FILTERS = "error,ignore:Failed to initialize NumPy"
"""Later ones are stronger. torch complains where numpy is missing, which it does not need.

As a variable and not as options, since an interpreter leaves out an option that the variable holds already,
and with it the order.
"""


def run_program(source: str, *arguments: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """Run ``source`` with warnings as errors, and return its exit code and what it printed.

    Args:
        source: The program; it may be indented.
        arguments: Its ``sys.argv[1:]``.
        timeout: Seconds.

    Raises:
        subprocess.TimeoutExpired: It did not end in time, and was killed.
    """
    return subprocess.run(  # noqa: S603 - the test's own program
        [sys.executable, "-c", textwrap.dedent(source), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
        env={**os.environ, "PYTHONWARNINGS": _FILTERS},
    )
