"""The plan: what a run does, as one frozen value.

A plan says which pieces are used with which options, in which precision, and how steps are clipped and
accumulated. It cannot exist in an invalid state, knows where each of its values came from, prints itself,
hashes itself, and is written into every checkpoint. It knows no tensors and no torch, so it can be made and
read on a laptop.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, final

import attrs

from colossal_core.arrangement import Degree, arrange, find_axis_problems, order_strategies
from colossal_core.errors import ColossalError, PlanError, join_errors
from colossal_core.options import write_options
from colossal_core.pieces import Replicated
from colossal_core.plugins.builtin import REPLICATED
from colossal_core.plugins.layers import CORE_PLUGIN
from colossal_core.plugins.records import MemoryManagerSpec, PieceSpec, StrategySpec

if TYPE_CHECKING:
    from colossal_core.mesh.layout import MeshLayout
    from colossal_core.plugins.registry import Registry

__all__ = [
    "DEFAULT_ORIGIN",
    "SETTINGS",
    "Plan",
    "PlanRow",
    "PlannedPiece",
    "Precision",
    "normalise_setting",
]

Precision: TypeAlias = Literal["fp64", "fp32", "bf16", "fp16"]

DEFAULT_ORIGIN = "default"
"""Origin of a value that nobody gave, and that others may therefore still give."""

_PRECISION_BY_DTYPE: Mapping[str, Precision] = {
    "float64": "fp64",
    "float32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
}
_HALF_PRECISIONS = ("bf16", "fp16")


@final
@attrs.frozen(kw_only=True)
class PlannedPiece:
    """A piece of a plan: a record with its options.

    Attributes:
        record: What the plugin registered.
        plugin: Name of that plugin.
        options: The frozen attrs object of options.
        origin: Who asked for the piece; not part of the plan's value.
    """

    record: PieceSpec
    plugin: str
    options: object
    origin: str = attrs.field(default=DEFAULT_ORIGIN, eq=False)

    @property
    def kind(self) -> str:
        """``"strategy"`` or ``"memory_manager"``."""
        return self.record.kind

    @property
    def name(self) -> str:
        """Name of the record."""
        return self.record.name

    @property
    def qualified_name(self) -> str:
        """Plugin and name: ``"zero:zero1"``."""
        return f"{self.plugin}:{self.record.name}"


class PlanRow(NamedTuple):
    """One line of a printed plan.

    Attributes:
        key: ``"precision"``, ``"memory"``, ``"zero1.bucket_bytes"``.
        value: A plain value.
        origin: Where it comes from.
    """

    key: str
    value: object
    origin: str


def normalise_setting(key: str, value: object, place: str = "") -> object:
    """Check one setting of a plan and return it in its one form.

    Args:
        key: A key of ``SETTINGS``.
        value: What was given.
        place: Where, the start of the message; the key by default.

    Raises:
        PlanError: The value means nothing for this key.
    """
    return SETTINGS[key](value, place or key)


def _normalise_precision(value: object, place: str) -> Precision:
    """Accept a name, or a torch dtype, recognised by its text so that torch need not be imported."""
    kind = type(value)
    text = str(value)
    if kind.__module__.partition(".")[0] == "torch" and kind.__name__ == "dtype":
        text = text.rpartition(".")[2]
        precision = _PRECISION_BY_DTYPE.get(text)
    else:
        precision = next((name for name in _PRECISION_BY_DTYPE.values() if name == value), None)
    if precision is None:
        meant = _PRECISION_BY_DTYPE.get(text.removeprefix("torch."))
        raise PlanError(
            f"{place} is {value!r}, expected 'fp64', 'fp32', 'bf16' or 'fp16', or the torch dtype",
            hint=f"write {meant!r}" if meant else "16-bit training that is robust without scaling is 'bf16'",
        )
    return precision


def _normalise_max_grad_norm(value: object, place: str) -> float | None:
    """Accept None or a positive finite number."""
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise PlanError(f"{place} is {value!r}, expected a number above 0, or None", hint=_unquote(value))
    return float(value)


def _normalise_accumulate(value: object, place: str) -> int:
    """Accept a positive integer."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise PlanError(f"{place} is {value!r}, expected an integer of at least 1", hint=_unquote(value))
    return value


def _normalise_data(value: object, place: str) -> Degree:
    """Accept "auto" or a degree."""
    if value == "auto":
        return "auto"
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        hint = "write 'auto' for what the other axes leave" if value == -1 else _unquote(value)
        raise PlanError(f"{place} is {value!r}, expected 'auto' or an integer of at least 1", hint=hint)
    return value


def _normalise_patterns(value: object, place: str) -> tuple[str, ...]:
    """Accept a sequence of patterns of module names."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        hint = f"write [{value!r}]" if isinstance(value, str) else "give patterns such as ['*norm*']"
        raise PlanError(f"{place} is {value!r}, expected a list of patterns", hint=hint)
    wrong = [pattern for pattern in value if not isinstance(pattern, str) or not pattern]
    if wrong:
        raise PlanError(
            f"{place} holds {wrong[0]!r}, expected patterns such as '*norm*'", hint="give strings"
        )
    repeated = sorted({pattern for pattern in value if value.count(pattern) > 1})
    if repeated:
        raise PlanError(f"{place} holds {repeated[0]!r} twice", hint="keep one of them")
    return tuple(value)


def _normalise_flag(value: object, place: str) -> bool:
    """Accept true or false."""
    if not isinstance(value, bool):
        raise PlanError(f"{place} is {value!r}, expected true or false", hint="write it without quotes")
    return value


def _normalise_nonfinite(value: object, place: str) -> Literal["skip"] | None:
    """Accept None, which raises, or "skip"."""
    if value is None:
        return None
    if value != "skip":
        hint = (
            "leave it out: raising is what None means"
            if value == "raise"
            else "write 'skip', or leave it out"
        )
        raise PlanError(f"{place} is {value!r}, expected None or 'skip'", hint=hint)
    return "skip"


def _unquote(value: object) -> str:
    """Return the remedy for a number that was written as a string."""
    is_number = isinstance(value, str) and value.strip().lstrip("+-").replace(".", "", 1).isdecimal()
    return f"write {value} without quotes" if is_number else "change the value"


SETTINGS = {
    "precision": _normalise_precision,
    "max_grad_norm": _normalise_max_grad_norm,
    "accumulate": _normalise_accumulate,
    "data": _normalise_data,
    "keep_float32": _normalise_patterns,
    "synchronise_batchnorm": _normalise_flag,
    "nonfinite": _normalise_nonfinite,
}
"""Settings of a plan that belong to no piece, and how each is checked."""


def _make_replicated() -> PlannedPiece:
    """Return the memory manager of a plan that names none."""
    return PlannedPiece(record=REPLICATED, plugin=CORE_PLUGIN, options=Replicated())


@final
@attrs.frozen(kw_only=True)
class Plan:
    """What a run does.

    Attributes:
        strategies: Pieces that cut the model, in the order in which they do.
        memory: The memory manager.
        precision: What the model computes in; masters and moments are fp32 below that.
        max_grad_norm: Clip the global gradient norm to this, or None.
        accumulate: Steps of a gradient window.
        data: Degree of the data axis, or ``"auto"``: what the other axes leave of the world.
        keep_float32: Patterns of module names that stay in fp32 in a 16-bit plan.
        synchronise_batchnorm: Whether batch statistics are those of the global batch.
        nonfinite: What happens to a step with non-finite gradients: None raises on all ranks, ``"skip"``
            skips it.
        origins: Key to where its value comes from; not part of the plan's value.

    Raises:
        PlanError: Something contradicts something else. Lists everything that was found.
    """

    strategies: tuple[PlannedPiece, ...] = attrs.field(default=(), converter=order_strategies)
    memory: PlannedPiece = attrs.field(factory=_make_replicated)
    precision: Precision = "fp32"
    max_grad_norm: float | None = None
    accumulate: int = 1
    data: Degree = "auto"
    keep_float32: tuple[str, ...] = ()
    synchronise_batchnorm: bool = True
    nonfinite: Literal["skip"] | None = None
    origins: Mapping[str, str] = attrs.field(factory=dict, eq=False)

    def __attrs_post_init__(self) -> None:
        """Bring settings into their one form and refuse everything that is wrong, in one error."""
        problems: list[ColossalError] = []
        # Converters would stop at the first problem, and a user would mend a plan one error at a time.
        for key in SETTINGS:
            try:
                object.__setattr__(self, key, normalise_setting(key, getattr(self, key)))
            except ColossalError as err:
                problems.append(err)
        if not problems:
            problems = self._find_problems()
        if problems:
            raise join_errors(problems, "the plan")

    @property
    def pieces(self) -> tuple[PlannedPiece, ...]:
        """All pieces: the strategies in their order, then the memory manager."""
        return (*self.strategies, self.memory)

    def layout(self, world_size: int) -> MeshLayout:
        """Return the mesh of this plan for a number of ranks.

        Raises:
            PlanError: The degrees do not multiply to the world. Shows the arithmetic and the next step.
        """
        return arrange(self.pieces, self.data, world_size)

    def rows(self) -> tuple[PlanRow, ...]:
        """Return the plan as lines of a table: settings first, then each piece with its options."""
        plain = self.to_dict()
        rows = [PlanRow(key, plain[key], self.origins.get(key, DEFAULT_ORIGIN)) for key in SETTINGS]
        for piece in self.pieces:
            kind = "memory" if piece is self.memory else "strategy"
            rows.append(PlanRow(kind, piece.qualified_name, piece.origin))
            for name, value in piece.record.presets.items():
                rows.append(PlanRow(f"{piece.name}.{name}", value, f"preset of {piece.name}"))
            for name, value in write_options(piece.options, piece.record.presets).items():
                key = f"{piece.name}.{name}"
                rows.append(PlanRow(key, value, self.origins.get(key, DEFAULT_ORIGIN)))
        return tuple(rows)

    def to_dict(self) -> dict[str, object]:
        """Return the plan as plain values, in the spelling that ``from_dict`` and plan files read."""
        plain: dict[str, object] = {key: getattr(self, key) for key in SETTINGS}
        plain["keep_float32"] = list(self.keep_float32)
        plain["memory"] = {"manager": self.memory.qualified_name}
        plain["pieces"] = {
            piece.qualified_name: write_options(piece.options, piece.record.presets) for piece in self.pieces
        }
        return plain

    @classmethod
    def from_dict(cls, plain: Mapping[str, object], registry: Registry) -> Plan:
        """Return the plan that was written by ``to_dict``, or any plan in the spelling of files.

        Args:
            plain: Plain values.
            registry: Where the names of pieces are looked up.

        Raises:
            ColossalError: As ``build_plan``.
        """
        from colossal_core.building import build_plan

        return build_plan(registry, plan=plain)

    def digest(self) -> str:
        """Return the SHA-256 of the plan's value, which ranks compare; origins do not count."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def _find_problems(self) -> list[ColossalError]:
        """Return contradictions between settings and pieces."""
        problems: list[ColossalError] = []
        if self.keep_float32 and self.precision not in _HALF_PRECISIONS:
            place = self.origins.get("keep_float32", "keep_float32")
            message = f"{place}: {list(self.keep_float32)!r} has no effect in precision {self.precision!r}"
            problems.append(PlanError(message, hint="leave it out, or use precision 'bf16'"))
        problems.extend(_find_piece_problems(self.strategies, self.memory))
        problems.extend(find_axis_problems(self.pieces, self.data))
        for piece in self.pieces:
            try:
                write_options(piece.options, piece.record.presets)
            except PlanError as err:
                problems.append(err)
        return problems


def _find_piece_problems(strategies: Iterable[PlannedPiece], memory: PlannedPiece) -> list[ColossalError]:
    """Return wrong kinds of pieces, repeated ones, and pairs that exclude each other."""
    problems: list[ColossalError] = []
    pieces = (*strategies, memory)
    seen: dict[str, PlannedPiece] = {}
    for piece in pieces:
        wanted = MemoryManagerSpec if piece is memory else StrategySpec
        if not isinstance(piece.record, wanted):
            kind, used = (name.replace("_", " ") for name in (piece.kind, wanted.kind))
            message = f"{piece.name!r} ({piece.origin}) is a {kind}, but used as a {used}"
            problems.append(PlanError(message, hint=f"give it as the {kind}"))
        first = seen.setdefault(piece.qualified_name, piece)
        if first is not piece:
            message = f"piece {piece.name!r} is given twice, by {first.origin} and by {piece.origin}"
            problems.append(PlanError(message, hint="keep one of them"))
    for first, second in itertools.combinations(pieces, 2):
        if _excludes(first, second) or _excludes(second, first):
            named = " and ".join(f"{piece.name!r} ({piece.origin})" for piece in (first, second))
            problems.append(PlanError(f"pieces {named} exclude each other", hint="keep one of them"))
    return problems


def _excludes(piece: PlannedPiece, other: PlannedPiece) -> bool:
    """Return whether the record of a piece excludes another one, by either name."""
    return bool({other.name, other.qualified_name} & set(piece.record.excludes))
