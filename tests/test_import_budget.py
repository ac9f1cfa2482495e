"""What a person types to look around costs milliseconds, because nothing on the way imports torch.

``nox -s startup`` measures the time itself, on installed wheels. Here the imports are counted, which is as
good and never depends on what else the machine is doing.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

MAX_MODULES = 400
"""Modules that a light command may have loaded in the end; most are the standard library's."""

GUARDED = """
import sys

class Guard:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "triton", "numpy"}:
            raise AssertionError(f"{name} must not be imported here")

sys.meta_path.insert(0, Guard())
sys.argv = ["colossal", *sys.argv[1:]]
from colossal_cli.main import main
try:
    main()
finally:
    print(len(sys.modules), file=sys.stderr)
"""

LIGHT_COMMANDS = [
    ("--help",),
    ("run", "--help"),
    ("plugins", "--help"),
    ("plugins", "list"),
    ("plugins", "list", "--json"),
    ("plugins", "info", "core"),
    ("checkpoint", "--help"),
    ("plan", "--help"),
    ("plan", "show"),
    ("plan", "show", "plan.toml"),
]


@pytest.mark.parametrize("arguments", LIGHT_COMMANDS, ids=" ".join)
def test_looking_around_imports_no_torch(arguments: tuple[str, ...], tmp_path: Path) -> None:
    """Help, lists and plans are made from records and integers."""
    for name in ("plan.toml", "colossal.toml"):
        (tmp_path / name).write_text(
            'precision = "bf16"\n[memory]\nmanager = "replicated"\n', encoding="utf-8"
        )

    ended = subprocess.run(
        [sys.executable, "-c", GUARDED, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
    )

    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert int(ended.stderr.split()[-1]) <= MAX_MODULES


def test_public_names_are_found_without_importing_them() -> None:
    """`import colossal_core` and looking at its names is free; only use is not."""
    code = "import sys, colossal_core as c; print({*c.__all__} - {*dir(c)}, 'torch' in sys.modules)"

    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    assert printed == "set() False\n"
