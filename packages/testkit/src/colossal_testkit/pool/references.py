"""Functions travel by file and qualified name.

pytest's importlib mode imports ``tests/test_x.py`` under a name that no other process can import, so pickling
a test's function by module and name fails elsewhere. A `FunctionReference` therefore says which file holds
the function and under which module name pytest knows it; a worker loads the file itself, under the same name,
once for each state of the file. Packages above the file are made the way pytest makes them, so ``from
.sibling import x`` resolves in both places.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import cast

import attrs

from colossal_core.errors import UsageError

__all__ = ["FunctionReference", "ModuleLoader", "ModuleReference", "refer_to", "refer_to_modules"]


@attrs.frozen(kw_only=True)
class ModuleReference:
    """A module that a process which imported nothing yet can load, by name or from its file."""

    file: str
    name: str


@attrs.frozen(kw_only=True)
class FunctionReference:
    """Where a function lives."""

    module: ModuleReference
    qualname: str

    @property
    def text(self) -> str:
        """``file::qualname``, as pytest writes it."""
        return f"{self.module.file}::{self.qualname}"


def refer_to(function: Callable[..., object]) -> FunctionReference:
    """Return the reference of a module-level function, or of a static method.

    Raises:
        UsageError: The function is nested, a lambda, a bound method, or hidden behind another object of its
            name, so that a worker could not find it.
    """
    advice = "Define it at the top of the test file and pass what it needs as arguments of run_ranks."
    qualname: str | None = getattr(function, "__qualname__", None)
    if not inspect.isfunction(function) or qualname is None:
        raise UsageError(f"ranks run module-level functions, and {function!r} is not one.", hint=advice)
    if "<locals>" in qualname or "<lambda>" in qualname:
        message = (
            f"ranks cannot run {qualname!r}: a function made inside another one cannot be found by a worker."
        )
        raise UsageError(message, hint=advice)
    module = sys.modules.get(function.__module__)
    if module is None or lookup(module, qualname) is not function:
        message = (
            f"ranks cannot run {qualname!r}: {function.__module__!r} holds no such function, or "
            f"another object under its name (a decorator?)."
        )
        raise UsageError(message, hint=advice)
    file = inspect.getsourcefile(function)
    if file is None or not Path(file).is_file():
        raise UsageError(f"ranks cannot run {qualname!r}: it has no source file.", hint=advice)
    place = ModuleReference(file=str(Path(file).resolve()), name=function.__module__)
    return FunctionReference(module=place, qualname=qualname)


def refer_to_modules(names: Iterable[str]) -> tuple[ModuleReference, ...]:
    """Return references of those modules that come from a source file, sorted by name."""
    found = []
    for name in sorted(names):
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is not None and Path(file).suffix == ".py":
            found.append(ModuleReference(file=str(Path(file).resolve()), name=name))
    return tuple(found)


def lookup(module: ModuleType, qualname: str) -> object:
    """Return the object that ``qualname`` means inside a module, or None."""
    found: object = module
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found


class ModuleLoader:
    """Loads files as modules in a worker and keeps them until they change.

    It owns what it put into ``sys.modules``. When a loaded file, or a module found beside it, has changed,
    all of them are forgotten and loaded again, since one may have imported names from another.
    """

    def __init__(self) -> None:
        """Start with nothing loaded."""
        self._stamps: dict[str, tuple[str, tuple[int, int]]] = {}

    def resolve(self, reference: FunctionReference) -> Callable[..., object]:
        """Return the function, loading its file when that is new or has changed.

        Raises:
            ImportError: The file holds no such function (any error of the file itself comes through
                unchanged).
        """
        function = lookup(self.load(reference.module), reference.qualname)
        if not callable(function):
            message = f"{reference.module.file} has no function {reference.qualname!r}"
            raise ImportError(message)
        return cast("Callable[..., object]", function)

    def load(self, reference: ModuleReference) -> ModuleType:
        """Return a module from ``sys.modules``, by import, or from its file."""
        known = sys.modules.get(reference.name)
        if known is not None and _is_file_of(
            known.__spec__, reference.file, getattr(known, "__file__", None)
        ):
            return known
        if reference.name != "__main__" and _is_importable_as(reference):
            return importlib.import_module(reference.name)
        # A script run as ``__main__`` must not run its ``if __name__ == "__main__"`` part in a worker.
        name = "__ranks_main__" if reference.name == "__main__" else reference.name
        _make_parents(name, Path(reference.file).parent)
        spec = importlib.util.spec_from_file_location(name, reference.file)
        if spec is None or spec.loader is None:
            message = f"{reference.file} cannot be loaded as a Python module"
            raise ImportError(message)
        module = importlib.util.module_from_spec(spec)
        before = set(sys.modules)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            sys.modules.pop(name, None)
            raise
        self._remember({name, *(set(sys.modules) - before)}, Path(reference.file).parent)
        return module

    def _remember(self, names: set[str], folder: Path) -> None:
        """Note the state of each new module whose file lies in or below the folder."""
        for name in names:
            file = getattr(sys.modules.get(name), "__file__", None)
            if file is not None and Path(file).resolve().is_relative_to(folder):
                self._stamps[name] = (file, _stamp(file))

    def forget_changed(self) -> None:
        """Drop every module that this loader brought in, when the file of any of them has changed."""
        if all(_stamp(file) == stamp for file, stamp in self._stamps.values()):
            return
        for name in self._stamps:
            sys.modules.pop(name, None)
        self._stamps.clear()
        importlib.invalidate_caches()


def _stamp(file: str) -> tuple[int, int]:
    """Return modification time and length of a file, or zeros when it is gone."""
    try:
        status = Path(file).stat()
    except OSError:
        return (0, 0)
    return (status.st_mtime_ns, status.st_size)


def _is_file_of(spec: importlib.machinery.ModuleSpec | None, file: str, loaded_from: str | None) -> bool:
    """Say whether a module came from this file."""
    origin = loaded_from if spec is None or spec.origin is None else spec.origin
    return origin is not None and str(Path(origin).resolve()) == file


def _is_importable_as(reference: ModuleReference) -> bool:
    """Say whether an ordinary import of the module's name finds this very file."""
    try:
        spec = importlib.util.find_spec(reference.name)
    except (ImportError, ValueError, AttributeError):
        return False
    return spec is not None and _is_file_of(spec, reference.file, None)


def _make_parents(name: str, folder: Path) -> None:
    """Put a package for each dotted prefix of the name into ``sys.modules``, as pytest does."""
    prefix = name.rpartition(".")[0]
    while prefix:
        if prefix not in sys.modules:
            initial = folder / "__init__.py"
            if initial.is_file():
                spec = importlib.util.spec_from_file_location(prefix, initial)
            else:
                spec = importlib.machinery.ModuleSpec(prefix, None, is_package=True)
            if spec is None:
                return
            # Outer packages first: an ``__init__`` may import relatively from its own parent.
            _make_parents(prefix, folder.parent)
            spec.submodule_search_locations = [str(folder)]
            package = importlib.util.module_from_spec(spec)
            sys.modules[prefix] = package
            if spec.loader is not None:
                spec.loader.exec_module(package)
        prefix, folder = prefix.rpartition(".")[0], folder.parent
