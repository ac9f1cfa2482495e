"""``colossal plugins``: listing, explaining, switching."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .conftest import Program

_STRATEGY = """
print("imported zoo", flush=True)
from colossal_core.plugins import MemoryManagerSpec, Target, hookimpl

@hookimpl
def colossal_register_memory_managers():
    yield MemoryManagerSpec(
        name="zebra", summary="Stripes.", options=Target("acme_options:Zebra"),
        target=Target("acme_manager:ZebraManager"), presets={"stripes": 2},
    )
"""

_QUIET = _STRATEGY.partition("\n")[2].partition("\n")[2]

_OPTIONS = """
import attrs

@attrs.frozen(kw_only=True)
class Zebra:
    stripes: int = 1
    colours: tuple[str, ...] = ()
    size: float
    tags: list = attrs.field(factory=list)
"""


def _find(text: str, name: str) -> dict[str, object]:
    """Return one plugin of the list in JSON."""
    found = [plugin for plugin in json.loads(text) if plugin["name"] == name]
    assert len(found) == 1
    assert isinstance(found[0], dict)
    return found[0]


def test_the_list_shows_pieces_distribution_version_and_state(program: Program) -> None:
    """One line for each plugin, core first."""
    program.install("zoo", _QUIET)
    program.install("broken", "raise ImportError('no such luck')")
    program.install("old", "", requires="colossal-core<0.1")

    done = program.run("plugins", "list")

    lines = {line.split()[0]: line for line in done.out.splitlines()}
    assert done.code == 0
    ours = {"gemini", "pipeline", "tensor-parallel", "zero"}  # members that may be installed beside it
    assert [name for name in lines if name not in ours] == ["plugin", "core", "broken", "old", "zoo"]
    assert "replicated" in lines["core"]
    assert all(word in lines["zoo"] for word in ("enabled", "zebra", "acme-zoo 1.0"))
    assert all(word in lines["broken"] for word in ("failed", "no such luck"))
    assert all(word in lines["old"] for word in ("incompatible", "<0.1"))


def test_info_shows_the_options_of_each_piece(program: Program) -> None:
    """Defaults, required ones, what the name presets, and where the implementation is."""
    program.install("zoo", _QUIET)
    program.write("site/acme_options.py", _OPTIONS)

    done = program.run("plugins", "info", "zoo")

    assert done.code == 0
    assert "colours = (), size, tags = ..." in done.out
    assert "stripes = 2" in done.out
    assert "acme_manager:ZebraManager" in done.out


def test_info_survives_options_that_cannot_be_imported(program: Program) -> None:
    """The rest is still worth showing."""
    program.install("zoo", _QUIET)

    done = program.run("plugins", "info", "zoo")

    assert done.code == 0
    assert "cannot be read" in done.out


@pytest.mark.parametrize("command", ["info", "enable", "disable"])
def test_an_unknown_plugin_is_refused_with_the_closest_name(program: Program, command: str) -> None:
    """Also for switching: a typo would do nothing, silently. Ours that are not installed are named."""
    program.install("zoo", _QUIET)

    typo = program.run("plugins", command, "zop")
    absent = program.run("plugins", command, "kernels")

    assert (typo.code, absent.code) == (2, 2)
    assert "did you mean 'zoo'?" in typo.err
    assert "pip install colossal-kernels" in absent.err


def test_disabling_edits_the_project_file_and_keeps_its_comments(program: Program) -> None:
    """The file is named, and the plugin is not imported any more."""
    program.install("zoo", _STRATEGY)
    file = program.write("colossal.toml", '# ours\nprecision = "bf16" # sixteen\n')
    program.write("deep/er/.keep", "")

    before = program.run("plugins", "list")
    done = program.run("plugins", "disable", "zoo", "--why", "breaks our resume")
    after = program.run("plugins", "list", "--json")

    assert "imported zoo" in before.out
    assert (done.code, done.out) == (0, "zoo is disabled in colossal.toml\n")
    text = file.read_text(encoding="utf-8")
    assert text.startswith('# ours\nprecision = "bf16" # sixteen\n')
    plugin = _find(after.out, "zoo")
    assert (plugin["state"], plugin["reason"], plugin["source"]) == (
        "disabled",
        "breaks our resume",
        str(file),
    )


def test_enabling_takes_the_disabling_back(program: Program) -> None:
    """Twice is once; what was never disabled leaves no trace."""
    program.install("zoo", _QUIET)
    file = program.write("colossal.toml", "# ours\n")

    untouched = program.run("plugins", "enable", "zoo")
    text = file.read_text(encoding="utf-8")
    program.run("plugins", "disable", "zoo")
    done = program.run("plugins", "enable", "zoo")
    after = program.run("plugins", "list", "--json")

    assert "nothing to change" in untouched.out
    assert text == "# ours\n"
    assert (done.code, done.out) == (0, "zoo is enabled in colossal.toml\n")
    assert _find(after.out, "zoo")["state"] == "enabled"


def test_outside_a_project_the_users_own_file_is_edited(program: Program) -> None:
    """It is made when it does not exist."""
    program.install("zoo", _QUIET)
    file = program.directory / "user" / "colossal" / "config.toml"

    done = program.run("plugins", "disable", "zoo")

    assert done.code == 0
    assert f"zoo is disabled in {file.relative_to(program.directory)}" in done.out
    assert "zoo" in file.read_text(encoding="utf-8")


def test_pyproject_is_a_project_file_too(program: Program) -> None:
    """Under ``[tool.colossal.plugins]``."""
    program.install("zoo", _QUIET)
    file = program.write("pyproject.toml", "[tool.colossal]\nprecision = 'fp32'\n\n[tool.other]\nkey = 1\n")

    done = program.run("plugins", "disable", "zoo", "--why", "later")
    after = program.run("plugins", "list", "--json")

    assert done.out == "zoo is disabled in pyproject.toml\n"
    assert "[tool.other]\nkey = 1\n" in file.read_text(encoding="utf-8")
    assert _find(after.out, "zoo")["reason"] == "later"


def test_a_stronger_source_that_still_wins_is_named(program: Program) -> None:
    """Exit code 1: the file was written, but the plugin is still off."""
    program.install("zoo", _QUIET)
    program.write("colossal.toml", '[plugins]\ndisabled = { zoo = "why not" }\n')

    done = program.run("plugins", "enable", "zoo", environ={"COLOSSAL_WITHOUT_PLUGINS": "zoo"})

    assert done.code == 1
    assert done.out == "zoo is enabled in colossal.toml\n"
    assert "COLOSSAL_WITHOUT_PLUGINS is stronger and says disabled" in done.err


def test_a_project_can_enable_what_the_user_has_disabled(program: Program) -> None:
    """The weaker file stays as it is, and the project's overrules it."""
    program.install("zoo", _QUIET)
    program.run("plugins", "disable", "zoo")
    program.write("colossal.toml", "")

    done = program.run("plugins", "enable", "zoo")
    after = program.run("plugins", "list", "--json")

    assert (done.code, done.out) == (0, "zoo is enabled in colossal.toml\n")
    assert _find(after.out, "zoo")["state"] == "enabled"


def test_a_broken_plugin_can_be_disabled(program: Program) -> None:
    """Nothing of it is imported for that."""
    program.install("broken", "print('imported'); raise SystemExit(9)")

    done = program.run("plugins", "disable", "broken")
    after = program.run("plugins", "list")

    assert (done.code, after.code) == (0, 0)
    assert "imported" not in done.out + after.out


def test_core_cannot_be_disabled(program: Program) -> None:
    """Its pieces are what every plan falls back on."""
    done = program.run("plugins", "disable", "core")

    assert done.code == 2
    assert "cannot be disabled" in done.err


def test_a_file_that_is_no_toml_is_left_alone(program: Program) -> None:
    """The error names it with the line."""
    program.install("zoo", _QUIET)
    file = program.write("colossal.toml", "precision = \n")

    done = program.run("plugins", "disable", "zoo")

    assert done.code == 2
    assert "colossal.toml" in done.err
    assert file.read_text(encoding="utf-8") == "precision = \n"


_MANAGER = """
import torch
from colossal_core.interfaces import AbstractMemoryManager

class ZebraManager(AbstractMemoryManager):
    pass
"""


@pytest.mark.timeout(90)  # imports torch
def test_doctor_holds_what_a_plugin_names_against_the_interface(program: Program) -> None:
    """A piece that lacks methods, and one that cannot be imported at all."""
    program.install("zoo", _QUIET)
    program.write("site/acme_options.py", _OPTIONS)

    absent = program.run("plugins", "doctor", "zoo")
    program.write("site/acme_manager.py", _MANAGER)
    lacking = program.run("plugins", "doctor", "zoo", "--json")

    assert absent.code == 1
    assert "acme_manager" in absent.out
    findings = {finding["subject"]: finding for finding in json.loads(lacking.out)}
    assert lacking.code == 1
    assert findings["import"]["result"] == "ok"
    assert "lacks" in findings["memory manager zebra"]["finding"]


def test_doctor_names_the_line_that_pulls_torch_in(program: Program) -> None:
    """The usual way in which a plugin makes everybody's start slow."""
    program.install("zoo", "import acme_heavy\n" + _QUIET)
    program.write("site/acme_heavy.py", "x = 1\nimport torch\n")
    program.write("site/torch.py", "")  # stands for the real one, which takes seconds

    done = program.run("plugins", "doctor", "zoo")

    assert done.code == 1
    assert "acme_heavy.py:2 imports torch" in done.out


def test_doctor_shows_the_whole_traceback_of_a_plugin_that_fails(program: Program) -> None:
    """And exits with 1; of a disabled plugin it imports nothing."""
    program.install("broken", "def f():\n    raise ImportError('no such luck')\nf()\n")

    failed = program.run("plugins", "doctor", "broken")
    program.run("plugins", "disable", "broken")
    disabled = program.run("plugins", "doctor", "broken")

    assert failed.code == 1
    assert "line 2, in f" in failed.err
    assert "no such luck" in failed.err
    assert disabled.code == 0
    assert "nothing was imported" in disabled.out


@pytest.mark.timeout(90)  # imports torch
def test_doctor_finds_core_in_order(program: Program) -> None:
    """Core's own records are examined like everybody's."""
    done = program.run("plugins", "doctor", "core")

    assert done.code == 0, done.out
    assert "memory manager replicated" in done.out
