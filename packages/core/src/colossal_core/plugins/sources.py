"""Where settings of plugins come from: the command line, the environment, project files, the user's file.

Files are searched and read here and nowhere else. A project is the nearest directory, from the working
directory upwards, with a ``colossal.toml`` or a ``pyproject.toml`` that has ``[tool.colossal]``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from colossal_core.errors import UsageError
from colossal_core.plugins.layers import PluginFlags, SettingsLayer
from colossal_core.spelling import join_names, suggest
from colossal_core.tomlfile import locate, read_toml, select_table

__all__ = [
    "find_project_file",
    "find_user_file",
    "read_environment",
    "read_file",
    "read_flags",
    "read_switch",
]

_FILE_KEYS = ("disabled", "enabled", "local")
_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"", "0", "false", "no", "off"}


def read_flags(flags: PluginFlags) -> SettingsLayer:
    """Return the layer of the command line."""
    return SettingsLayer(
        only=flags.only,
        only_source="--plugins",
        disabled={name: f"left out by --without-plugin {name}" for name in flags.without},
        disabled_source="--without-plugin",
        nothing=flags.no_plugins,
        nothing_source="--no-plugins",
    )


def read_environment(environ: Mapping[str, str]) -> SettingsLayer:
    """Return the layer of the environment; an empty variable counts as absent."""
    without = "COLOSSAL_WITHOUT_PLUGINS"
    return SettingsLayer(
        only=_split_names(environ.get("COLOSSAL_PLUGINS", "")) or None,
        only_source="COLOSSAL_PLUGINS",
        disabled=dict.fromkeys(_split_names(environ.get(without, "")), f"left out by {without}"),
        disabled_source=without,
        nothing=read_switch(environ, "COLOSSAL_NO_PLUGINS"),
        nothing_source="COLOSSAL_NO_PLUGINS",
    )


def _split_names(text: str) -> tuple[str, ...]:
    """Split names at commas."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def read_switch(environ: Mapping[str, str], name: str) -> bool:
    """Read a variable that is on or off.

    Raises:
        UsageError: It is neither.
    """
    value = environ.get(name, "").strip().lower()
    if value not in _TRUE | _FALSE:
        message = f"{name} is {environ[name]!r}, which is neither on nor off"
        raise UsageError(message, hint=f"set {name}=1, or leave it unset")
    return value in _TRUE


def read_file(path: Path) -> SettingsLayer:
    """Return the layer of one file; files without ``[plugins]`` say nothing.

    Raises:
        UsageError: The file is not TOML, or its ``[plugins]`` table has an unknown key or a value of the
            wrong kind.
    """
    table, keys = select_table(path, read_toml(path))
    plugins = table.get("plugins", {})
    keys = (*keys, "plugins")
    if not isinstance(plugins, Mapping):
        raise _refuse(path, keys, f"must be a table, got {plugins!r}", "write [plugins]")
    for key in plugins:
        if key not in _FILE_KEYS:
            hint = suggest(key, _FILE_KEYS) or "remove it"
            raise _refuse(path, (*keys, key), f"is no setting; there are {join_names(_FILE_KEYS)}", hint)
    disabled = plugins.get("disabled", {})
    if not isinstance(disabled, Mapping) or not all(isinstance(why, str) for why in disabled.values()):
        hint = 'write disabled = { gemini = "not on this cluster" }'
        raise _refuse(path, (*keys, "disabled"), f"must map plugins to reasons, got {disabled!r}", hint)
    return SettingsLayer(
        enabled=_read_list(path, (*keys, "enabled"), plugins.get("enabled", []), '["zero"]'),
        disabled={str(name): str(why) or "no reason given" for name, why in disabled.items()},
        disabled_source=str(path),
        only_source=str(path),
        local=tuple(
            (path.parent / Path(entry).expanduser()).resolve()
            for entry in _read_list(path, (*keys, "local"), plugins.get("local", []), '["./my_schedule.py"]')
        ),
        path=path,
    )


def _read_list(path: Path, keys: tuple[str, ...], value: object, example: str) -> tuple[str, ...]:
    """Require a list of strings."""
    if (
        not isinstance(value, Sequence)
        or isinstance(value, str)
        or not all(isinstance(v, str) for v in value)
    ):
        raise _refuse(
            path, keys, f"must be a list of strings, got {value!r}", f"write {keys[-1]} = {example}"
        )
    return tuple(value)


def _refuse(path: Path, keys: tuple[str, ...], problem: str, hint: str) -> UsageError:
    """Return the error for one key of a file, with its line."""
    return UsageError(f"{locate(path, keys)} {problem}", hint=hint)


def find_project_file(start_dir: Path | None = None) -> Path | None:
    """Return the nearest ``colossal.toml``, or ``pyproject.toml`` with ``[tool.colossal]``, upwards.

    Raises:
        UsageError: One directory has both, and both have ``[plugins]``.
    """
    start = Path.cwd() if start_dir is None else start_dir.resolve()
    for directory in (start, *start.parents):
        own, shared = directory / "colossal.toml", directory / "pyproject.toml"
        table = _read_pyproject(shared)
        if own.is_file():
            if "plugins" in table and "plugins" in read_toml(own):
                message = f"{str(own)!r} and {str(shared)!r} both have settings of plugins"
                raise UsageError(message, hint="keep [plugins] in one of them")
            return own
        if table:
            return shared
    return None


def _read_pyproject(path: Path) -> Mapping[str, object]:
    """Return ``[tool.colossal]`` of a pyproject.toml, empty when there is none."""
    # Most such files have nothing for us: looking for the word first saves the import of the parser. One that
    # cannot be read, in a folder further up, is somebody else's.
    try:
        content = path.read_bytes()
    except OSError:
        return {}
    if b"colossal" not in content:
        return {}
    return select_table(path, read_toml(path))[0]


def find_user_file() -> Path:
    """Return the path of the user's own file, which need not exist."""
    import platformdirs

    return Path(platformdirs.user_config_dir("colossal", appauthor=False)) / "config.toml"
