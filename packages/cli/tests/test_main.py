"""The program itself: help, unknown commands, commands of plugins, errors, exit codes, imports."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import click
import pytest

from colossal_cli.commands.checkpoint import checkpoint
from colossal_cli.commands.doctor import doctor
from colossal_cli.commands.plan import plan
from colossal_cli.commands.plugins import plugins
from colossal_cli.commands.run import run
from colossal_cli.main import cli
from colossal_testkit.checkpoints import SampleTensor, write_checkpoint

if TYPE_CHECKING:
    from .conftest import Program

_GREETER = """
from colossal_core.plugins import CommandSpec, Target, hookimpl

@hookimpl
def colossal_register_commands():
    return [CommandSpec(name="{name}", summary="Say hello.", target=Target("acme_commands:greet"))]
"""

_COMMANDS = """
import click
print("imported")

@click.command()
@click.option("--name", default="you")
def greet(name):
    click.echo(f"hello {name}")
"""


def test_help_lists_commands_of_plugins_without_importing_them(program: Program) -> None:
    """The summary comes from the record; the module is imported when the command runs."""
    program.install("greeter", _GREETER.format(name="greet"))
    program.write("site/acme_commands.py", _COMMANDS)

    shown = program.run("--help")
    ran = program.run("greet", "--name", "ada")

    assert "Say hello. (acme-greeter 1.0)" in re.sub(r"\s+", " ", shown.out)
    assert "imported" not in shown.out
    assert (ran.code, ran.out) == (0, "imported\nhello ada\n")


def test_a_command_with_the_name_of_ours_is_reached_by_its_qualified_name(program: Program) -> None:
    """Nobody can replace ``colossal run`` silently."""
    program.install("greeter", _GREETER.format(name="run"))
    program.write("site/acme_commands.py", _COMMANDS)

    shown = program.run("--help")
    ran = program.run("greeter:run")

    assert "greeter:run" in shown.out
    assert ran.out == "imported\nhello you\n"


def test_a_typo_names_the_closest_command(program: Program) -> None:
    """Wrong usage is exit code 2."""
    done = program.run("plugin")

    assert done.code == 2
    named = done.err.partition("there is no command 'plugin'; there are: ")[2].partition("\n")[0].split(", ")
    assert {"checkpoint", "doctor", "plan", "plugins", "run"} <= {
        *named
    }  # and those of plugins that are here
    assert "did you mean 'plugins'?" in done.err


@pytest.mark.parametrize("state", ["failed", "disabled"])
def test_an_unknown_command_may_belong_to_a_plugin_that_is_not_active(program: Program, state: str) -> None:
    """The answer names the plugin, its state and the reason."""
    program.install("greeter", "raise ImportError('no such luck')" if state == "failed" else "")
    if state == "disabled":
        program.write("colossal.toml", '[plugins]\ndisabled = { greeter = "too polite" }\n')

    done = program.run("greet")

    assert done.code == 2
    assert "plugin 'greeter' (acme-greeter 1.0)" in done.err
    assert ("no such luck" if state == "failed" else "too polite") in done.err
    assert "may bring it" in done.err


def test_a_command_that_is_no_click_command_is_refused(program: Program) -> None:
    """The plugin is named, since its author has to mend it."""
    program.install("greeter", _GREETER.format(name="greet"))
    program.write("site/acme_commands.py", "def greet(): pass\n")

    done = program.run("greet")

    assert done.code == 1
    assert "plugin 'greeter' (acme-greeter 1.0)" in done.err
    assert "must be a click command" in done.err


def test_an_unexpected_error_keeps_its_traceback_and_names_a_way_out(program: Program) -> None:
    """A plugin's own bug is shown whole."""
    program.install("greeter", _GREETER.format(name="greet"))
    broken = "import click\n@click.command()\ndef greet(): raise KeyError('oops')\n"
    program.write("site/acme_commands.py", broken)

    done = program.run("greet")

    assert done.code == 1
    assert "KeyError: 'oops'" in done.err
    assert "greeter (acme-greeter 1.0)" in done.err
    assert "--no-plugins" in done.err


def test_strict_plugins_shows_where_a_plugin_failed(program: Program) -> None:
    """For authors and CI: the traceback, and a failure."""
    program.install("greeter", "raise ImportError('no such luck')")

    done = program.run("--strict-plugins", "plugins", "list")

    assert done.code == 1
    assert "acme_greeter.py" in done.err
    assert "Traceback" in done.err


_BLOCKER = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "triton", "numpy", "rich"}:
            raise ImportError(f"{name} is not to be imported here")

sys.meta_path.insert(0, Blocker())
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["plugins", "list"],
        ["plugins", "list", "--json"],
        ["plugins", "info", "core"],
        ["plan", "show", "p.toml", "--nproc", "2"],
        ["checkpoint", "inspect", "runs", "--tensors"],
        ["checkpoint", "verify", "runs", "--json"],
        ["checkpoint", "diff", "runs", "runs/step-1"],
        ["checkpoint", "export", "runs", "out"],
        ["run", "--help"],
        ["run", "--nproc", "1", "--plan", "p.toml", "s.py"],
    ],
)
def test_nothing_imports_torch_and_rich_is_for_terminals(program: Program, arguments: list[str]) -> None:
    """A finder that refuses both is in the way of every import."""
    program.write("blocked/sitecustomize.py", _BLOCKER)
    program.environ["PYTHONPATH"] = str(program.directory / "blocked")
    program.write("p.toml", 'precision = "bf16"\n')
    program.write("s.py", "print('fine')")
    write_checkpoint(program.directory / "runs", {"model": {"w": SampleTensor.make((3,))}})

    done = program.run(*arguments)

    assert done.code == 0, done.err


def test_output_has_no_colours_when_nobody_looks(program: Program) -> None:
    """Not in a pipe, whatever TERM says."""
    done = program.run("plugins", "list", environ={"TERM": "xterm-256color"})

    assert "\x1b" not in done.out


def test_the_flags_are_these_and_no_others() -> None:
    """Flags multiply and combine badly: a new one is added on purpose, here too."""
    groups = {
        "": cli,
        "run": run,
        "plan": plan,
        "plugins": plugins,
        "doctor": doctor,
        "checkpoint": checkpoint,
    }
    found: dict[str, list[str]] = {}
    for name, command in groups.items():
        found[name] = _list_flags(command)
        if isinstance(command, click.Group) and name:
            found |= {f"{name} {sub}": _list_flags(made) for sub, made in command.commands.items()}

    assert found == {
        "": ["--no-plugins", "--plugins", "--strict-plugins", "--version", "--without-plugin"],
        "run": ["--grace", "--master", "--nnodes", "--node-rank", "--nproc", "--plan", "-m"],
        "plan": [],
        "plan show": ["--json", "--nproc"],
        "plugins": [],
        "plugins list": ["--json"],
        "plugins info": ["--json"],
        "plugins enable": [],
        "plugins disable": ["--why"],
        "plugins doctor": ["--json"],
        "doctor": ["--json"],
        "checkpoint": [],
        "checkpoint inspect": ["--json", "--match", "--tensors"],
        "checkpoint verify": ["--json"],
        "checkpoint diff": ["--json"],
        "checkpoint export": ["--json", "--max-file-size", "--object"],
    }


def _list_flags(command: click.Command) -> list[str]:
    """Return the options of a command, sorted."""
    options = [parameter for parameter in command.params if isinstance(parameter, click.Option)]
    return sorted(option for parameter in options for option in parameter.opts)


def test_the_version_is_that_of_the_distribution(program: Program) -> None:
    """As installed."""
    done = program.run("--version")

    assert re.fullmatch(r"colossal, version \d+\.\d+\.\d+\S*\n", done.out)


def test_json_is_json_for_every_command_that_has_it(program: Program) -> None:
    """Programs need not parse tables."""
    program.write("p.toml", "")

    for arguments in (["plugins", "list"], ["plugins", "info", "core"], ["plan", "show", "p.toml"]):
        assert json.loads(program.run(*arguments, "--json").out)
