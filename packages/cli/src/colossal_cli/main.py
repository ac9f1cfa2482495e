"""The ``colossal`` program: one group whose commands are imported when they run.

Start-up is the sum of what is imported, so this page knows the names and summaries of the commands and
nothing else about them. Commands of plugins come through the ``colossal_register_commands`` hook and are
imported as late as ours.

This is the border where errors become words and exit codes: 0 for success, 1 for failure, 2 for wrong usage.
Unexpected ones keep their traceback and say how to leave plugins out.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING

import click
from click import ClickException, Command, Context, Group

from colossal_cli.session import Session
from colossal_core.errors import ColossalError, PluginError, UnknownNameError
from colossal_core.plugins.layers import PluginFlags

if TYPE_CHECKING:
    from click import HelpFormatter

    from colossal_core.plugins.entries import Registered

__all__ = ["main"]

_COMMANDS = {
    "checkpoint": (
        "colossal_cli.commands.checkpoint:checkpoint",
        "Look at checkpoints, check, compare and export them.",
    ),
    "doctor": ("colossal_cli.commands.doctor:doctor", "Look for what is missing or broken on this machine."),
    "plan": ("colossal_cli.commands.plan:plan", "Look at plans without running them."),
    "plugins": ("colossal_cli.commands.plugins:plugins", "List, explain and switch plugins."),
    "run": ("colossal_cli.commands.run:run", "Run a script on many ranks."),
}

_EXIT_INTERRUPTED = 130


class _LazyGroup(Group):
    """A group that imports a command when it is asked for it."""

    def list_commands(self, ctx: Context) -> list[str]:
        """Return our commands and, by their names, those of active plugins."""
        return sorted({*_COMMANDS, *_list_foreign(ctx)})

    def get_command(self, ctx: Context, cmd_name: str) -> Command | None:
        """Import one command; say who may own an unknown one."""
        if cmd_name in _COMMANDS:
            return _load(_COMMANDS[cmd_name][0])
        session = ctx.ensure_object(Session)
        foreign = _list_foreign(ctx)
        if cmd_name in foreign or ":" in cmd_name:
            entry = session.registry.find("command", cmd_name)
            command = entry.load_target()
            if not isinstance(command, Command):
                raise PluginError(
                    f"plugin {entry.plugin!r} ({entry.provider}): "
                    f"the command {cmd_name!r} must be a click command, got {command!r}",
                    hint="decorate the function with @click.command()",
                )
            return command
        raise _explain_unknown(cmd_name, session, {*_COMMANDS, *foreign})

    def format_commands(self, ctx: Context, formatter: HelpFormatter) -> None:
        """Write names and summaries, without importing any command."""
        summaries = {name: summary for name, (_, summary) in _COMMANDS.items()}
        for name, entry in _list_foreign(ctx).items():
            summaries[name] = f"{_summarise(entry)} ({entry.provider})"
        with formatter.section("Commands"):
            formatter.write_dl(sorted(summaries.items()))


def _load(path: str) -> Command:
    """Import one of our own commands."""
    module, _, attribute = path.partition(":")
    command = vars(import_module(module))[attribute]
    assert isinstance(command, Command)
    return command


def _list_foreign(ctx: Context) -> dict[str, Registered]:
    """Return the commands of plugins by the name to type: short, unless it is ours or offered twice."""
    entries = ctx.ensure_object(Session).registry.commands()
    short = [entry.record.name for entry in entries]
    return {
        entry.qualified_name
        if entry.record.name in _COMMANDS or short.count(entry.record.name) > 1
        else entry.record.name: entry
        for entry in entries
    }


def _summarise(entry: Registered) -> str:
    """Return the one-line summary of a command's record."""
    from colossal_core.plugins.records import CommandSpec

    return entry.record.summary if isinstance(entry.record, CommandSpec) else ""


def _explain_unknown(name: str, session: Session, valid: set[str]) -> UnknownNameError:
    """Return the error for a command that nobody offers, naming inactive plugins: it may be theirs."""
    from colossal_core.plugins.answers import tell_state
    from colossal_core.spelling import join_names, suggest

    message = f"there is no command {name!r}; there are: {join_names(valid)}"
    for status in session.registry.statuses():
        if status.state != "enabled":
            message += f"\n  {tell_state(status)}, and may bring it"
    return UnknownNameError(message, hint=suggest(name, valid) or "colossal --help")


def _split_names(_ctx: Context, _parameter: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    """Split names at commas."""
    return None if value is None else tuple(name.strip() for name in value.split(",") if name.strip())


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="colossal-cli", prog_name="colossal")
@click.option("--plugins", "only", metavar="A,B", callback=_split_names, help="Use these plugins only.")
@click.option("--without-plugin", "without", metavar="NAME", multiple=True, help="Leave a plugin out.")
@click.option("--no-plugins", is_flag=True, help="Use nothing but what core brings.")
@click.option("--strict-plugins", is_flag=True, help="Let a failing plugin raise, with its traceback.")
@click.pass_context
def cli(
    ctx: Context,
    only: tuple[str, ...] | None,
    without: tuple[str, ...],
    *,
    no_plugins: bool,
    strict_plugins: bool,
) -> None:
    """Train models that do not fit, or train too slowly, on one process.

    Exit codes: 0 success, 1 failure, 2 wrong usage; `run` returns that of the rank that failed first.
    """
    flags = PluginFlags(only=only, without=without, no_plugins=no_plugins, is_strict=strict_plugins)
    ctx.obj = Session(flags)


def main() -> None:
    """Run the program and exit."""
    sys.exit(_run())


def _run() -> int:
    """Run the program and return the exit code."""
    try:
        code = cli.main(prog_name="colossal", standalone_mode=False)
    except ClickException as err:
        err.show()
        return err.exit_code
    except (KeyboardInterrupt, click.Abort):
        return _EXIT_INTERRUPTED
    except BrokenPipeError:
        # Nobody reads any more, as in `| head`. Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except ColossalError as err:
        _report(err)
        return err.exit_code
    except Exception:  # noqa: BLE001 - the border: whatever happens is shown with what to try next
        _report_crash()
        return 1
    return code if isinstance(code, int) else 0


def _report(error: ColossalError) -> None:
    """Write one of our errors; with its traceback where plugin authors asked for it."""
    if "--strict-plugins" in sys.argv or os.environ.get("COLOSSAL_STRICT_PLUGINS", "") not in {"", "0"}:
        import traceback

        click.echo("".join(traceback.format_exception(error)), err=True, nl=False)
    click.echo(error.render(), err=True)


def _report_crash() -> None:
    """Write the traceback of an unexpected error, and which plugins were there."""
    import traceback

    from colossal_core.plugins.discovery import find_installed

    click.echo(traceback.format_exc(), err=True, nl=False)
    names = ", ".join(f"{info.name} ({info.provider})" for info in find_installed()) or "none"
    click.echo(f"unexpected error; installed plugins: {names}\n  next: try again with --no-plugins", err=True)
