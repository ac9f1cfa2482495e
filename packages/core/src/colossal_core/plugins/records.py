"""Records: what a plugin offers, as frozen values that name objects without importing them.

A registration hook returns records. They are all that core knows about a piece before a plan uses it: how it
is called, which options it takes, which mesh axes it brings, and where its implementation lives.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Literal, TypeAlias, final, get_args

import attrs

from colossal_core.errors import PluginError
from colossal_core.mesh.axes import GradientRule
from colossal_core.plugins.target import Target

__all__ = [
    "PHASES",
    "AxisSpec",
    "CommandSpec",
    "DiagnosticSpec",
    "Finding",
    "MemoryManagerSpec",
    "Phase",
    "PieceSpec",
    "Record",
    "ScheduleSpec",
    "Severity",
    "ShardingPolicySpec",
    "StrategySpec",
]

Phase: TypeAlias = Literal["partition", "shard", "transform", "recompute"]
Severity: TypeAlias = Literal["error", "warning", "note"]

PHASES: tuple[Phase, ...] = get_args(Phase)
"""Phases of cutting a model, in the order in which they are applied."""

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_AXIS = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")


def _refuse(record: object, field: str, value: object, expected: str) -> PluginError:
    """Return the error for a wrong field of a record."""
    return PluginError(f"{type(record).__name__}: {field} must be {expected}, got {value!r}", code="C011")


def _is_name(record: object, field: attrs.Attribute[str], value: object) -> None:
    """Require a lower-case, hyphenated name."""
    if not isinstance(value, str) or _NAME.fullmatch(value) is None:
        raise _refuse(record, field.name, value, "lower-case letters and digits, joined by hyphens")


def _is_schedule_name(record: object, field: attrs.Attribute[str], value: object) -> None:
    """Require a name that may begin with a digit: schedules are called 1f1b."""
    if not isinstance(value, str) or _NAME.fullmatch(value.lstrip("0123456789")) is None:
        raise _refuse(record, field.name, value, "lower-case letters and digits, joined by hyphens")


def _is_axis_name(record: object, field: attrs.Attribute[str], value: object) -> None:
    """Require a lower-case name of a mesh axis, or None where the field allows it."""
    if value is None and field.default is None:
        return
    if not isinstance(value, str) or _AXIS.fullmatch(value) is None:
        raise _refuse(record, field.name, value, "the name of an axis: lower-case, joined by underscores")


def _is_text(record: object, field: attrs.Attribute[str], value: object) -> None:
    """Require one line of text."""
    if not isinstance(value, str) or not value.strip() or "\n" in value:
        raise _refuse(record, field.name, value, "one line of text")


def _is_target(record: object, field: attrs.Attribute[Target], value: object) -> None:
    """Require a ``Target``, since an object or a bare string would mean an import or a guess."""
    if not isinstance(value, Target):
        raise _refuse(record, field.name, value, "a Target('module:attribute')")


def _is_flag(record: object, field: attrs.Attribute[bool], value: object) -> None:
    """Require True or False."""
    if not isinstance(value, bool):
        raise _refuse(record, field.name, value, "True or False")


def _is_one_of(*choices: str) -> Callable[[object, attrs.Attribute[Any], object], None]:
    """Return a validator that requires one of the choices."""

    def check(record: object, field: attrs.Attribute[Any], value: object) -> None:
        """Refuse any other value."""
        if value not in choices:
            raise _refuse(record, field.name, value, f"one of {', '.join(map(repr, choices))}")

    return check


def _copy_mapping(value: Mapping[str, object]) -> dict[str, object]:
    """Copy, so that a later change of the caller's mapping does not reach the record."""
    return dict(value)


def _as_strings(value: Iterable[str]) -> tuple[str, ...]:
    """Freeze a sequence of names; a single string would be taken apart letter by letter."""
    if isinstance(value, str):
        message = f"expected a sequence of names, got the string {value!r}"
        raise PluginError(message, hint=f"write ({value!r},)", code="C011")
    return tuple(value)


def _as_axes(value: Iterable[AxisSpec]) -> tuple[AxisSpec, ...]:
    """Freeze a sequence of axes."""
    return tuple(value)


@final
@attrs.frozen(kw_only=True)
class AxisSpec:
    """One axis of the mesh that a piece brings.

    Axes are, outermost to innermost, ``pipeline, replica, data, sequence, tensor``; an axis with another name
    says where it goes. ``data`` is core's own and always there.

    Attributes:
        name: Lower-case, joined by underscores; what users write in ``[parallel]`` and
            ``NAME_parallel_size``.
        inside_of: Places a new axis just inside this one (ranks along it are closer together).
        part_of: Makes this a named sub-axis: the degrees of all parts multiply to the degree of that axis,
            and the parts stand in its place in the layout, in the order in which they are listed.
        divides_batch: Ranks along the axis bring different samples.
        gradients: What becomes of gradients along the axis: averaged, summed, or nothing, because each rank
            holds parameters of its own.
        degree: The attribute of the options object, a field or a property, that holds the degree. Its value
            is an integer of at least 1, or None: under these options the axis does not exist.
        takes_rest: For a part: the degree is what the other parts leave of the whole axis, so options need
            not know it.
    """

    name: str = attrs.field(validator=_is_axis_name)
    inside_of: str | None = attrs.field(default=None, validator=_is_axis_name)
    part_of: str | None = attrs.field(default=None, validator=_is_axis_name)
    divides_batch: bool = attrs.field(default=False, validator=_is_flag)
    gradients: GradientRule = attrs.field(default="none", validator=_is_one_of(*get_args(GradientRule)))
    degree: str = attrs.field(default="degree", validator=_is_text)
    takes_rest: bool = attrs.field(default=False, validator=_is_flag)

    def __attrs_post_init__(self) -> None:
        """Refuse combinations that mean nothing."""
        if self.inside_of is not None and self.part_of is not None:
            message = (
                f"axis {self.name!r} is inside_of {self.inside_of!r} and part_of {self.part_of!r}; give one"
            )
            raise PluginError(message, code="C011")
        if self.takes_rest and self.part_of is None:
            message = f"axis {self.name!r} takes the rest of no axis; takes_rest needs part_of"
            raise PluginError(message, code="C011")
        if self.divides_batch and self.gradients == "none":
            message = (
                f"axis {self.name!r} divides the batch, so gradients must be averaged or summed along it"
            )
            raise PluginError(message, code="C011")


@attrs.frozen(kw_only=True)
class PieceSpec:
    """What strategies and memory managers have in common: a name, options, an implementation.

    Attributes:
        name: What users type, in ``Booster("name")`` and ``[pieces.name]``; unique among all pieces.
        summary: One sentence for ``colossal plugins list``.
        options: The frozen attrs class of options. Its module must not import torch.
        target: The implementation, a subclass of the kind's interface. Imported when a plan uses the piece.
        presets: Options that this name fixes (``{"stage": 2}``) and that users then cannot give.
        axes: Mesh axes that the piece brings.
        excludes: Names of pieces that cannot be in the same plan.
    """

    kind: ClassVar[str] = "piece"

    name: str = attrs.field(validator=_is_name)
    summary: str = attrs.field(validator=_is_text)
    options: Target = attrs.field(validator=_is_target)
    target: Target = attrs.field(validator=_is_target)
    presets: Mapping[str, object] = attrs.field(factory=dict, converter=_copy_mapping, hash=False)
    axes: tuple[AxisSpec, ...] = attrs.field(default=(), converter=_as_axes)
    excludes: tuple[str, ...] = attrs.field(default=(), converter=_as_strings)

    def __attrs_post_init__(self) -> None:
        """Refuse an axis that is listed twice."""
        names = [axis.name for axis in self.axes]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            message = f"{type(self).__name__} {self.name!r} lists the axis {repeated[0]!r} twice"
            raise PluginError(message, code="C011")


@final
@attrs.frozen(kw_only=True)
class StrategySpec(PieceSpec):
    """A piece that cuts the model: pipeline stages, sharded layers, recomputed blocks.

    The target is a subclass of ``colossal_core.interfaces.AbstractStrategy``.

    Attributes:
        phase: When it cuts: all of ``"partition"`` come before ``"shard"``, then ``"transform"``, then
            ``"recompute"``; inside a phase, the outermost axis comes first.
    """

    kind: ClassVar[str] = "strategy"

    phase: Phase = attrs.field(validator=_is_one_of(*PHASES))


@final
@attrs.frozen(kw_only=True)
class MemoryManagerSpec(PieceSpec):
    """A piece that owns parameters, gradients and optimizer state of this rank. A plan has exactly one.

    The target is a subclass of ``colossal_core.interfaces.AbstractMemoryManager``.
    """

    kind: ClassVar[str] = "memory_manager"


@final
@attrs.frozen(kw_only=True)
class CommandSpec:
    """A command of the ``colossal`` program.

    Attributes:
        name: The word after ``colossal``.
        summary: One sentence for ``colossal --help``.
        target: A click command or group. Imported only when the command runs.
    """

    kind: ClassVar[str] = "command"

    name: str = attrs.field(validator=_is_name)
    summary: str = attrs.field(validator=_is_text)
    target: Target = attrs.field(validator=_is_target)


@final
@attrs.frozen(kw_only=True)
class DiagnosticSpec:
    """A check that ``colossal doctor`` runs.

    Attributes:
        code: Stable name of the check, lower-case and hyphenated.
        title: What is checked, in one line.
        check: A callable without arguments that returns an iterable of ``Finding``.
        fix: What to do when it finds something.
    """

    kind: ClassVar[str] = "diagnostic"

    code: str = attrs.field(validator=_is_name)
    title: str = attrs.field(validator=_is_text)
    check: Target = attrs.field(validator=_is_target)
    fix: str = attrs.field(validator=_is_text)

    @property
    def name(self) -> str:
        """The code, under the attribute that every record has."""
        return self.code


@final
@attrs.frozen(kw_only=True)
class ScheduleSpec:
    """An order in which the stages of a pipeline compute.

    Attributes:
        name: What users type, in ``Pipeline(schedule="name")``; unique among schedules.
        summary: One sentence.
        target: A subclass of ``colossal_core.interfaces.AbstractSchedule``. Its module must not import torch.
    """

    kind: ClassVar[str] = "pipeline_schedule"

    name: str = attrs.field(validator=_is_schedule_name)
    summary: str = attrs.field(validator=_is_text)
    target: Target = attrs.field(validator=_is_target)


@final
@attrs.frozen(kw_only=True)
class ShardingPolicySpec:
    """How the layers of models of some classes are cut among ranks that share each layer.

    Attributes:
        name: What errors and explanations call it; unique among policies.
        summary: One sentence.
        models: Classes of models, or of modules inside models, as ``"module:Class"``; subclasses count, too.
            Nothing is imported: the names of the classes of a model are compared.
        plan: Roles by patterns of names inside such a model, as in ``TensorParallel(plan=...)``.
    """

    kind: ClassVar[str] = "sharding_policy"

    name: str = attrs.field(validator=_is_name)
    summary: str = attrs.field(validator=_is_text)
    models: tuple[str, ...] = attrs.field(converter=_as_strings)
    plan: Mapping[str, str] = attrs.field(converter=_copy_mapping, hash=False)

    def __attrs_post_init__(self) -> None:
        """Refuse what names no class, and a plan that says nothing."""
        for path in self.models or ("",):
            if re.fullmatch(r"[^:\s]+:[^:\s]+", path) is None:
                raise _refuse(self, "models", path, "paths of classes, 'module:Class'")
        if not self.plan or not all(isinstance(text, str) for item in self.plan.items() for text in item):
            raise _refuse(self, "plan", self.plan, "roles by patterns, both of them text")


Record: TypeAlias = (
    StrategySpec | MemoryManagerSpec | CommandSpec | DiagnosticSpec | ScheduleSpec | ShardingPolicySpec
)
"""What a registration hook can offer."""


@final
@attrs.frozen(kw_only=True)
class Finding:
    """Something that a check noticed.

    Attributes:
        severity: ``"error"`` stops what was asked for, ``"warning"`` and ``"note"`` do not.
        code: Stable identifier.
        message: The facts with numbers, and what was expected.
        hint: The next step.
    """

    severity: Severity = attrs.field(validator=_is_one_of(*get_args(Severity)))
    code: str
    message: str
    hint: str = ""
