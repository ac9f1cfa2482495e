"""Names of objects that are imported only when they are needed.

A record says *where* something lives (``"colossal_zero.manager:Zero1"``) instead of holding it, so that a
plugin can be listed without importing its implementation, and torch with it.
"""

from __future__ import annotations

import re
from importlib import import_module
from typing import TYPE_CHECKING, final

import attrs

from colossal_core.errors import ColossalError, PluginError, PluginLoadError

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["Target", "describe_failure"]

_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")

_OWN_FRAMES = {__name__.partition(".")[0], "attr", "importlib", "pluggy"}


def _is_path(_target: object, _field: attrs.Attribute[str], value: object) -> None:
    """Require the form ``module:attribute``."""
    if not isinstance(value, str) or _PATH.fullmatch(value) is None:
        message = f"a target is 'module:attribute', for example 'colossal_zero.options:Zero', got {value!r}"
        raise PluginError(message, code="C011")


@final
@attrs.frozen
class Target:
    """The import path of one object, ``"package.module:attribute"``.

    Making a target imports nothing; ``load`` does. The attribute may be dotted (``"module:Class.method"``).

    Attributes:
        path: Module and attribute, separated by a colon.
    """

    path: str = attrs.field(validator=_is_path)

    def __str__(self) -> str:
        """Return the path."""
        return self.path

    @property
    def module(self) -> str:
        """The module's dotted name."""
        return self.path.partition(":")[0]

    @property
    def attribute(self) -> str:
        """The attribute inside the module, possibly dotted."""
        return self.path.partition(":")[2]

    @property
    def package(self) -> str:
        """The top-level package, which is what a plugin is recognised by when it cannot be imported."""
        return self.path.partition(":")[0].partition(".")[0]

    def load(self, provider: str = "") -> object:
        """Import the module and return the object.

        Args:
            provider: Who named this target, for the error: ``"plugin 'zero' (colossal-zero 0.1.0)"``.

        Raises:
            PluginLoadError: The module raises while it is imported, or has no such attribute. An error of
                ours that the module raises itself, such as a missing capability, passes unchanged.
        """
        try:
            value: object = import_module(self.module)
            for part in self.attribute.split("."):
                value = getattr(value, part)
        except ColossalError:
            raise
        except Exception as err:
            owner = f"{provider}: " if provider else ""
            message = f"{owner}cannot load {self.path!r}\n{describe_failure(err)}"
            raise PluginLoadError(message) from err
        return value


def describe_failure(error: BaseException, place: str = "") -> str:
    """Return two indented lines for an error raised by foreign code: what it was, and the file and line.

    Args:
        error: The error, with its traceback.
        place: Where to look when the traceback never left this package.
    """
    summary = f"{type(error).__name__}: {error}".replace("\n", "\n  ")
    place = _find_place(error) or place
    return f"  {summary}\n  at {place}" if place else f"  {summary}"


def _find_place(error: BaseException) -> str:
    """Return ``file:line`` of the deepest frame of the plugin, or of the syntax error itself, or nothing."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    places = _list_places(error.__traceback__)
    # A wrong record raises in our validators; the line to mend is the plugin's, just above.
    foreign = [place for module, place in places if module.partition(".")[0] not in _OWN_FRAMES]
    return foreign[-1] if foreign else ""


def _list_places(trace: TracebackType | None) -> list[tuple[str, str]]:
    """Return (module, ``file:line``) of every frame that comes from a file, outermost first."""
    places = []
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        module = str(trace.tb_frame.f_globals.get("__name__", ""))
        if not file.startswith("<"):
            places.append((module, f"{file}:{trace.tb_lineno}"))
        trace = trace.tb_next
    return places
