"""Plans as people write them: TOML files, dicts, and the names that other tools use.

Reading yields a draft, which holds what was written and where, and knows nothing about which pieces exist.
Everything that is wrong is collected, so that one error can name all of it.

::

    precision = "bf16"            settings of the plan, with the names of the Booster's keywords
    [parallel]
    data = "auto"                 the degree of the data axis
    tensor = { degree = 2 }       options of the piece that brings the axis; a number is its degree
    [memory]
    manager = "zero1"             the memory manager; other keys are its options
    [pieces.pipeline]             options of a piece by its name
    microbatches = 8

``{"tensor_parallel_size": 2}`` is another spelling of ``[parallel] tensor = 2``. A degree of 1 as a bare
number means that the axis is not used, whether or not its piece is installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import final

import attrs

from colossal_core.errors import ColossalError, PlanError
from colossal_core.mesh.axes import DATA_AXIS
from colossal_core.plan import SETTINGS
from colossal_core.spelling import join_names, suggest
from colossal_core.tomlfile import index_lines, locate, read_toml, select_table

__all__ = ["Draft", "DraftPiece", "Given", "Source", "read_plan"]

_SIZE = "_parallel_size"
_TABLES = ("memory", "parallel", "pieces", "plugins")

_ELSEWHERE: Mapping[str, str] = {
    "bf16": "write precision = 'bf16'",
    "dtype": "write precision = 'bf16', 'fp32' or 'fp64'",
    "fp16": "write precision = 'fp16'",
    "gradient_accumulation_steps": "write accumulate",
    "gradient_clipping": "write max_grad_norm",
    "mixed_precision": "write precision",
    "optimizer": "make the optimizer in Python and give it to boost",
    "scheduler": "make the scheduler in Python and give it to boost",
    "seed": "give the seed to launch",
    "train_batch_size": "the loader that you give to boost has the global batch size",
    "train_micro_batch_size_per_gpu": "the loader that you give to boost has the global batch size",
    "zero_optimization": "write [memory] manager = 'zero1', 'zero2' or 'zero3'",
    "zero_stage": "write [memory] manager = 'zero1', 'zero2' or 'zero3'",
}
"""Keys of other tools that people bring along, and where the thing is said here."""


@final
@attrs.define
class Source:
    """Where values were written: a file, whose lines are looked up when first needed, or a dict.

    Attributes:
        name: How messages call it.
        path: The file, or None.
        prefix: Keys of the table that holds the plan.
    """

    name: str
    path: Path | None = None
    prefix: tuple[str, ...] = ()
    _lines: dict[tuple[str, ...], int] | None = attrs.field(default=None, init=False)

    def place(self, *keys: str) -> str:
        """Return where a key is written: ``"plan.toml:7 parallel.tensor"``."""
        if self.path is None:
            return f"{self.name}: {'.'.join(keys)}"
        if self._lines is None:
            self._lines = index_lines(self.path)
        return locate(self.path, (*self.prefix, *keys), self._lines)


@final
@attrs.frozen
class Given:
    """A value and where it was given."""

    value: object
    origin: str


@final
@attrs.frozen(kw_only=True)
class DraftPiece:
    """A piece as it was asked for.

    Attributes:
        name: Name or qualified name; empty when only the axis is known.
        axis: The mesh axis under which it was written; empty otherwise.
        kind: ``"piece"``, or ``"memory_manager"`` where nothing else can be meant.
        degree: The degree, when the axis was given as a bare number.
        options: Option name to value and origin.
        origin: Where it was asked for.
    """

    name: str = ""
    axis: str = ""
    kind: str = "piece"
    degree: int | None = None
    options: Mapping[str, Given] = attrs.field(factory=dict)
    origin: str


@final
@attrs.define
class Draft:
    """What one source says about a plan.

    Attributes:
        settings: Key of ``SETTINGS`` to value and origin.
        pieces: Pieces in the order in which they were written.
        problems: What cannot be understood.
        plugins_file: The file, when it has settings of plugins.
    """

    settings: dict[str, Given] = attrs.field(factory=dict)
    pieces: list[DraftPiece] = attrs.field(factory=list)
    problems: list[ColossalError] = attrs.field(factory=list)
    plugins_file: Path | None = None

    def set(self, key: str, value: object, origin: str) -> None:
        """Take a setting; a second value for it is a problem."""
        known = self.settings.setdefault(key, Given(value, origin))
        if known.value != value:
            message = f"{key} is {known.value!r} by {known.origin}, but {value!r} by {origin}"
            self.problems.append(PlanError(message, hint="keep one of them"))

    def refuse(self, message: str, hint: str, code: str = "") -> None:
        """Take note of a problem."""
        self.problems.append(PlanError(message, hint=hint, code=code))


def read_plan(plan: Mapping[str, object] | str | Path) -> Draft:
    """Read a dict or a TOML file.

    Raises:
        UsageError: The file cannot be read or is not TOML. Problems inside it are collected in the draft.
    """
    if isinstance(plan, Mapping):
        return _read_table(plan, Source("plan"))
    path = Path(plan)
    table, prefix = select_table(path, read_toml(path))
    return _read_table(table, Source(str(path), path, prefix))


def _read_table(table: Mapping[str, object], source: Source) -> Draft:
    """Read the top level of a plan."""
    draft = Draft()
    for key, value in table.items():
        place = source.place(key)
        if key in SETTINGS:
            draft.set(key, value, place)
        elif key in _TABLES and not isinstance(value, Mapping):
            draft.refuse(f"{place} is {value!r}, expected a table", f"write [{key}]")
        elif key == "parallel" and isinstance(value, Mapping):
            for axis, given in value.items():
                _read_axis(draft, str(axis), given, source, ("parallel", str(axis)))
        elif key == "memory" and isinstance(value, Mapping):
            _read_memory(draft, value, source)
        elif key == "pieces" and isinstance(value, Mapping):
            for name, options in value.items():
                _read_piece(draft, str(name), options, source)
        elif key == "plugins":
            draft.plugins_file = source.path
            if source.path is None:
                draft.refuse(
                    f"{place} has no effect in a dict", "write it into colossal.toml, or use the environment"
                )
        elif key.endswith(_SIZE):
            _read_axis(draft, key.removesuffix(_SIZE), value, source, (key,))
        else:
            valid = (*SETTINGS, *_TABLES)
            hint = _ELSEWHERE.get(key) or suggest(key, valid) or "options of a piece go into [pieces.NAME]"
            draft.refuse(
                f"{place} is no key of a plan; there are {join_names(valid)}, AXIS{_SIZE}", hint, "C003"
            )
    return draft


def _read_axis(draft: Draft, axis: str, value: object, source: Source, keys: tuple[str, ...]) -> None:
    """Read one axis of ``[parallel]``, or ``AXIS_parallel_size``."""
    place = source.place(*keys)
    if axis == DATA_AXIS:
        draft.set("data", value, place)
    elif value is None:
        return
    elif isinstance(value, Mapping):
        strategy = value.get("strategy", "")
        if not isinstance(strategy, str):
            draft.refuse(
                f"{source.place(*keys, 'strategy')} is {strategy!r}, expected the name of a piece",
                "give its name",
            )
            return
        options = {
            str(name): Given(given, source.place(*keys, str(name)))
            for name, given in value.items()
            if name != "strategy"
        }
        draft.pieces.append(DraftPiece(name=strategy, axis=axis, options=options, origin=place))
    elif isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        draft.pieces.append(DraftPiece(axis=axis, degree=value, origin=place))
    else:
        hint = "only data can be 'auto'" if value in ("auto", -1) else "give a number, or a table of options"
        if isinstance(value, str) and value.isdecimal():
            hint = f"write {value} without quotes"
        draft.refuse(f"{place} is {value!r}, expected an integer of at least 1, or a table", hint)


def _read_memory(draft: Draft, table: Mapping[str, object], source: Source) -> None:
    """Read ``[memory]``."""
    place = source.place("memory")
    manager = table.get("manager")
    if not isinstance(manager, str) or not manager:
        problem = "names no manager" if manager is None else f"has manager {manager!r}, expected a name"
        draft.refuse(f"{place} {problem}", "write manager = 'replicated'")
        return
    options = {
        str(name): Given(value, source.place("memory", str(name)))
        for name, value in table.items()
        if name != "manager"
    }
    origin = source.place("memory", "manager")
    draft.pieces.append(DraftPiece(name=manager, kind="memory_manager", options=options, origin=origin))


def _read_piece(draft: Draft, name: str, options: object, source: Source) -> None:
    """Read ``[pieces.NAME]``."""
    place = source.place("pieces", name)
    if not isinstance(options, Mapping):
        draft.refuse(f"{place} is {options!r}, expected a table of options", f"write [pieces.{name}]")
        return
    given = {str(key): Given(value, source.place("pieces", name, str(key))) for key, value in options.items()}
    draft.pieces.append(DraftPiece(name=name, options=given, origin=place))
