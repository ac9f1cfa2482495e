"""``colossal plan show``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .conftest import Program


def test_every_value_has_its_origin(program: Program) -> None:
    """File and line for what was written, "default" for the rest."""
    program.write("plan.toml", '# first\nprecision = "bf16"\n\n[parallel]\ndata = 2\n')

    done = program.run("plan", "show", "plan.toml")

    rows = {line.split()[0]: line for line in done.out.splitlines()}
    assert done.code == 0
    assert "bf16" in rows["precision"]
    assert "plan.toml:2" in rows["precision"]
    assert "plan.toml:5" in rows["data"]
    assert "default" in rows["accumulate"]
    assert "core:replicated" in rows["memory"]


def test_the_projects_file_is_the_default(program: Program) -> None:
    """Without one, the answer says so."""
    missing = program.run("plan", "show")
    program.write("colossal.toml", "max_grad_norm = 1.5\n")

    found = program.run("plan", "show")

    assert missing.code == 2
    assert "colossal plan show FILE" in missing.err
    assert "1.5" in found.out


def test_the_mesh_of_a_number_of_ranks_is_shown(program: Program) -> None:
    """The word "auto" becomes a number, and a product that does not fit shows its arithmetic."""
    program.write("auto.toml", "")
    program.write("two.toml", "[parallel]\ndata = 2\n")

    fits = program.run("plan", "show", "auto.toml", "--nproc", "6", "--json")
    fails = program.run("plan", "show", "two.toml", "--nproc", "3")

    assert json.loads(fits.out)["mesh"]["data"] == 6
    assert fails.code == 2
    assert "2" in fails.err
    assert "3" in fails.err


def test_json_holds_plan_origins_and_digest(program: Program) -> None:
    """The digest is what ranks compare; it depends on the values, not on who gave them."""
    program.write("a.toml", 'precision = "fp32"\n')
    program.write("b.toml", "")

    shown = [json.loads(program.run("plan", "show", name, "--json").out) for name in ("a.toml", "b.toml")]

    assert shown[0]["plan"] == shown[1]["plan"]
    assert shown[0]["digest"] == shown[1]["digest"]
    assert shown[0]["origins"] != shown[1]["origins"]


def test_all_that_is_wrong_is_told_at_once(program: Program) -> None:
    """Exit code 2, with every key."""
    program.write("plan.toml", 'precisoin = "bf16"\nmax_grad_norm = -1\n')

    done = program.run("plan", "show", "plan.toml")
    missing = program.run("plan", "show", "nowhere.toml")

    assert done.code == 2
    assert "precisoin" in done.err
    assert "max_grad_norm" in done.err
    assert (missing.code, "nowhere.toml" in missing.err) == (2, True)
