"""The sessions that everything else is run by: environments, members, Python."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROBE = """
import json, runpy, sys
prepare = runpy.run_path("noxfile.py")["prepare_environment"]
print(json.dumps(prepare(json.loads(sys.argv[1]))))
"""


def prepare(environment: dict[str, str]) -> dict[str, str]:
    """Return what noxfile.py adds to an environment."""
    command = [sys.executable, "-c", PROBE, json.dumps(environment)]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    added: dict[str, str] = json.loads(printed)
    return added


def test_links_of_pip_are_handed_on_to_uv() -> None:
    """pip separates by spaces, uv by commas; a build of torch that was linked must not be overruled."""
    added = prepare({"PIP_FIND_LINKS": "/one  https://two.example/three"})

    assert added["UV_FIND_LINKS"] == "/one,https://two.example/three"
    assert "UV_TORCH_BACKEND" not in added


def test_links_of_uv_are_left_alone() -> None:
    """Who configured uv is not overruled by pip's settings."""
    added = prepare({"PIP_FIND_LINKS": "/one", "UV_FIND_LINKS": "/two"})

    assert not {"UV_FIND_LINKS", "UV_TORCH_BACKEND"} & added.keys()


def test_uv_chooses_the_build_of_torch_where_nothing_is_linked() -> None:
    """Without a GPU nobody downloads gigabytes for one; a choice of the caller stands."""
    assert prepare({})["UV_TORCH_BACKEND"] == "auto"
    assert prepare({"UV_TORCH_BACKEND": "cu130"})["UV_TORCH_BACKEND"] == "cu130"


@pytest.mark.timeout(60)
def test_every_member_has_its_sessions() -> None:
    """A new member is tested alone, built and described without anybody adding it to a list."""
    members = [path.parent.name for path in ROOT.glob("packages/*/pyproject.toml")]
    wanted = [f"{name}({member})" for name in ("tests_alone", "lowest", "build") for member in members]
    wanted += ["quickstart", "tests", "lint", "types", "layers"]
    command = [sys.executable, "-m", "nox", "--list", "--json", "--session", *wanted]

    environment = {**os.environ, "NO_COLOR": "1"}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)

    assert {session["session"] for session in json.loads(ended.stdout)} == set(wanted)
