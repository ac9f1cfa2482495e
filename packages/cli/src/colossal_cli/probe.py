"""Import one plugin's light module in a fresh interpreter, and tell what that cost.

Run as ``python -m colossal_cli.probe``, with the plugin as JSON in the first argument; the answer is JSON
too. A process of its own, because modules that the program has imported already would look free.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import TYPE_CHECKING, final

from colossal_core.errors import PluginLoadError
from colossal_core.plugins.activation import import_plugin
from colossal_core.plugins.discovery import PluginInfo

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

__all__ = ["main"]

_HEAVY = ("torch", "triton", "numpy")


@final
class _Watcher(MetaPathFinder):
    """Notes which line first asks for a heavy package; finds nothing itself.

    Attributes:
        lines: Heavy package to ``file:line``.
    """

    def __init__(self) -> None:
        """Start with nothing."""
        self.lines: dict[str, str] = {}

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Note the importing line, the innermost one that is not Python's own machinery."""
        if fullname in _HEAVY and fullname not in self.lines:
            frames = [
                frame for frame in traceback.extract_stack()[:-1] if not frame.filename.startswith("<frozen")
            ]
            self.lines[fullname] = f"{frames[-1].filename}:{frames[-1].lineno}"
        return None


def main() -> None:
    """Import the plugin and print what it cost."""
    plain = json.loads(sys.argv[1])
    path = plain.pop("path")
    info = PluginInfo(**plain, path=None if path is None else Path(path))
    watcher = _Watcher()
    sys.meta_path.insert(0, watcher)
    before = set(sys.modules)
    error = ""
    began = time.perf_counter()
    try:
        import_plugin(info)
    except PluginLoadError as err:
        error = "".join(traceback.format_exception(err.__cause__ or err))
    seconds = time.perf_counter() - began
    added = set(sys.modules) - before
    packages = sorted({name.partition(".")[0] for name in added} - set(sys.stdlib_module_names))
    answer = {
        "seconds": seconds,
        "num_modules": len(added),
        "packages": packages,
        "heavy": watcher.lines,
        "error": error,
    }
    print(json.dumps(answer))  # noqa: T201 - the answer to the parent


if __name__ == "__main__":
    main()
