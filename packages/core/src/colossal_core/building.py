"""Making a plan from what people give: piece objects, names, keywords, and a plan, dict or file.

A plan that was given decides; pieces and keywords add what it leaves open, and where both speak they must
agree. All problems are found before one error names them together, each with where it was written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, final

import attrs

from colossal_core.choices import PieceChoice
from colossal_core.config import Draft, DraftPiece, Given, read_plan
from colossal_core.errors import ColossalError, PlanError, join_errors
from colossal_core.mesh.axes import BASE_AXES
from colossal_core.plan import DEFAULT_ORIGIN, SETTINGS, Plan, PlannedPiece, normalise_setting
from colossal_core.spelling import join_names

if TYPE_CHECKING:
    import torch

    from colossal_core.plugins.entries import Registered
    from colossal_core.plugins.registry import Registry

__all__ = ["UNSET", "Unset", "build_plan"]


@final
class Unset(Enum):
    """The default of keywords that nobody gave, so that giving the usual value still counts as giving one."""

    UNSET = "unset"


UNSET: Literal[Unset.UNSET] = Unset.UNSET
"""The only value of ``Unset``."""

PlanLike: TypeAlias = "Plan | Mapping[str, object] | str | Path"


def build_plan(
    registry: Registry,
    pieces: Sequence[object] = (),
    *,
    plan: PlanLike | None = None,
    precision: str | torch.dtype | Unset = UNSET,
    max_grad_norm: float | Unset | None = UNSET,
    accumulate: int | Unset = UNSET,
    data: int | str | Unset = UNSET,
    keep_float32: Sequence[str] | Unset = UNSET,
    synchronise_batchnorm: bool | Unset = UNSET,
    nonfinite: str | Unset | None = UNSET,
) -> Plan:
    """Return the effective plan.

    Args:
        registry: Where pieces are looked up.
        pieces: Objects of options, or names.
        plan: A plan that decides what it says: a ``Plan``, a dict, or the path of a TOML file.
        precision: See ``Plan``; as all that follow, ``UNSET`` leaves it to the plan, or to the default.
        max_grad_norm: See ``Plan``.
        accumulate: See ``Plan``.
        data: See ``Plan``.
        keep_float32: See ``Plan``.
        synchronise_batchnorm: See ``Plan``.
        nonfinite: See ``Plan``.

    Raises:
        PlanError: Unknown keys, values of the wrong kind, missing or preset options, pieces that are given
            twice or exclude each other, settings without effect, and disagreements, each with both origins.
            All at once.
        UnknownNameError: The one problem is a name that means nothing.
        CapabilityError: All that is asked for exists, but not yet in this version.
        UsageError: The file cannot be read, or an object is no piece.
    """
    keywords = {
        "precision": precision,
        "max_grad_norm": max_grad_norm,
        "accumulate": accumulate,
        "data": data,
        "keep_float32": keep_float32,
        "synchronise_batchnorm": synchronise_batchnorm,
        "nonfinite": nonfinite,
    }
    builder = _Builder(registry)
    if isinstance(plan, Plan):
        builder.take_plan(plan)
    elif plan is not None:
        builder.take_draft(read_plan(plan))
    builder.take_call(pieces, {key: value for key, value in keywords.items() if not isinstance(value, Unset)})
    return builder.finish()


@final
class _Builder:
    """Collects what every source says, and everything that is wrong with it."""

    def __init__(self, registry: Registry) -> None:
        """Start with nothing."""
        self._registry = registry
        self._settings: dict[str, Given] = {}
        self._choices: dict[str, PieceChoice] = {}
        self._refused: set[str] = set()
        self._unused: dict[str, str] = {}
        self._problems: list[ColossalError] = []

    def take_plan(self, plan: Plan) -> None:
        """Take a plan that was made before; what stands there by default stays open."""
        for key in SETTINGS:
            is_default = getattr(plan, key) == attrs.fields_dict(Plan)[key].default
            origin = plan.origins.get(key, DEFAULT_ORIGIN if is_default else "plan")
            if origin != DEFAULT_ORIGIN:
                self._take_setting(key, Given(getattr(plan, key), origin))
        for piece in plan.pieces:
            if piece is plan.memory and piece.origin == DEFAULT_ORIGIN:
                continue
            try:
                entry = self._registry.find("piece", piece.qualified_name)
            except ColossalError as err:
                self._problems.append(err)
            else:
                self._problems.extend(
                    self._choose(entry, piece.origin).add_whole(piece.options, piece.origin)
                )

    def take_draft(self, draft: Draft) -> None:
        """Take what a file or dict says: pieces by name first, since they may settle what an axis means."""
        self._problems.extend(draft.problems)
        file = draft.plugins_file
        if file is not None and file.resolve() not in self._registry.settings.files:
            message = (
                f"[plugins] in {str(file)!r} has no effect: settings of plugins were read without this file"
            )
            hint = "move it to colossal.toml of the project, or give the file when the registry is made"
            self._problems.append(PlanError(message, hint=hint))
        for key, given in draft.settings.items():
            self._take_setting(key, given)
        for piece in sorted(draft.pieces, key=lambda piece: bool(piece.axis)):
            try:
                self._take_piece(piece)
            except ColossalError as err:
                self._problems.append(err)

    def take_call(self, pieces: Sequence[object], keywords: Mapping[str, object]) -> None:
        """Take what the caller gave besides a plan."""
        for key, value in keywords.items():
            self._take_setting(key, Given(value, f"Booster({key}=...)"))
        seen: dict[str, str] = {}
        for piece in pieces:
            origin = (
                f"Booster({piece!r})" if isinstance(piece, str) else f"Booster({type(piece).__name__}(...))"
            )
            try:
                entry = self._find(piece)
            except ColossalError as err:
                self._problems.append(err)
                continue
            first = seen.setdefault(entry.qualified_name, origin)
            if first is not origin:
                message = f"piece {entry.record.name!r} is given twice, by {first} and by {origin}"
                self._problems.append(PlanError(message, hint="keep one of them"))
                continue
            choice = self._choose(entry, origin)
            if not isinstance(piece, str):
                self._problems.extend(choice.add_whole(piece, origin))

    def finish(self) -> Plan:
        """Return the plan.

        Raises:
            ColossalError: Everything that was found, as one error.
        """
        settings = {key: given.value for key, given in self._settings.items()}
        origins = {key: given.origin for key, given in self._settings.items()}
        if "precision" in self._refused:
            # What depends on the precision cannot be judged by the default that now stands in for it.
            settings.pop("keep_float32", None)
        planned = self._plan_pieces(origins)
        managers = [piece for piece in planned if piece.kind == "memory_manager"]
        self._check_managers(managers)
        self._check_unused(planned)
        values: dict[str, Any] = {
            "strategies": tuple(piece for piece in planned if piece.kind == "strategy"),
            **({"memory": managers[0]} if managers else {}),
            **settings,
            "origins": origins,
        }
        try:
            plan = Plan(**values)
        except ColossalError as err:
            raise join_errors([*self._problems, err], "the plan") from err
        if self._problems:
            raise join_errors(self._problems, "the plan") from self._problems[0].__cause__
        return plan

    def _take_setting(self, key: str, given: Given) -> None:
        """Take a setting in its one form; another value by another source is a problem."""
        try:
            value = normalise_setting(key, given.value, given.origin)
        except ColossalError as err:
            self._problems.append(err)
            self._refused.add(key)
            return
        known = self._settings.setdefault(key, Given(value, given.origin))
        if known.value != value:
            message = f"{key} is {known.value!r} by {known.origin}, but {value!r} by {given.origin}"
            self._problems.append(PlanError(message, hint="keep one of them"))

    def _find(self, piece: object) -> Registered:
        """Return the record of a name or an object."""
        return (
            self._registry.find("piece", piece)
            if isinstance(piece, str)
            else self._registry.record_for(piece)
        )

    def _choose(self, entry: Registered, origin: str) -> PieceChoice:
        """Return the choice of a piece, made when it is the first time that somebody asks for it."""
        return self._choices.setdefault(entry.qualified_name, PieceChoice(entry, origin))

    def _take_piece(self, piece: DraftPiece) -> None:
        """Take a piece of a draft.

        Raises:
            ColossalError: Its name or axis means nothing.
        """
        entry = self._find_drafted(piece)
        if entry is None:
            self._unused[piece.axis] = piece.origin
            return
        options = dict(piece.options)
        if piece.degree is not None:
            options[self._name_degree(entry, piece)] = Given(piece.degree, piece.origin)
        self._problems.extend(self._choose(entry, piece.origin).add_written(options))

    def _find_drafted(self, piece: DraftPiece) -> Registered | None:
        """Return the record of a drafted piece; None for an axis that is said to be unused.

        Raises:
            UnknownNameError: The name or the axis means nothing.
            PlanError: Several pieces bring the axis, and none is chosen.
        """
        if piece.name:
            kind: Literal["piece", "memory_manager"] = "piece" if piece.kind == "piece" else "memory_manager"
            return self._registry.find(kind, piece.name)
        owners = self._registry.find_axis_owners(piece.axis)
        if piece.degree == 1 and (owners or piece.axis in BASE_AXES):
            return None
        chosen = [entry for entry in owners if entry.qualified_name in self._choices]
        found = chosen or owners
        if len(found) == 1:
            return found[0]
        if not found:
            raise self._registry.explain_axis(piece.axis, piece.origin)
        names = join_names(entry.record.name for entry in found)
        message = f"{piece.origin}: the axis {piece.axis!r} is brought by {names}"
        raise PlanError(
            message, hint=f"choose: {piece.axis} = {{ strategy = {found[0].record.name!r}, ... }}"
        )

    def _name_degree(self, entry: Registered, piece: DraftPiece) -> str:
        """Return the option that holds the degree of an axis.

        Raises:
            PlanError: It follows from other options, so a bare number says too little.
        """
        fields = {field.alias for field in attrs.fields(entry.load_options()) if field.init}
        for axis in entry.piece.axes:
            if axis.name == piece.axis and axis.degree in fields:
                return axis.degree
        name = entry.record.name
        message = f"{piece.origin} is {piece.degree}, but the degree follows from the options of {name!r}"
        raise PlanError(message, hint=f"write a table with {join_names(fields - entry.piece.presets.keys())}")

    def _plan_pieces(self, origins: dict[str, str]) -> list[PlannedPiece]:
        """Return the pieces whose options are right, and add where their options come from."""
        planned = []
        for choice in self._choices.values():
            try:
                piece, problems = choice.plan()
            except ColossalError as err:
                piece, problems = None, [err]
            self._problems.extend(problems)
            if piece is not None:
                planned.append(piece)
                origins.update(choice.list_origins())
        return planned

    def _check_managers(self, managers: Sequence[PlannedPiece]) -> None:
        """Require at most one memory manager."""
        if len(managers) > 1:
            named = " and ".join(f"{piece.name!r} by {piece.origin}" for piece in managers)
            message = f"the plan has {len(managers)} memory managers, {named}; it needs exactly one"
            self._problems.append(PlanError(message, hint="keep one of them"))

    def _check_unused(self, planned: Iterable[PlannedPiece]) -> None:
        """Refuse a piece on an axis that somebody said has degree 1."""
        for piece in planned:
            for axis in piece.record.axes:
                degree = getattr(piece.options, axis.degree, None)
                if axis.name in self._unused and degree != 1:
                    unused = self._unused[axis.name]
                    message = f"axis {axis.name!r} has degree 1 by {unused}, but {degree} by {piece.origin}"
                    self._problems.append(PlanError(message, hint="keep one of them"))
