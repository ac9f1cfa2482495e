"""Options of the strategy ``tensor-parallel``. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, final, get_args

import attrs

from colossal_core.errors import CapabilityError, UsageError
from colossal_tensor_parallel.roles import Role

__all__ = ["Mode", "TensorParallel"]

Mode = Literal["1d", "2d", "2.5d", "3d"]


def _check_degree(_piece: object, _field: attrs.Attribute[int], value: object) -> None:
    """Refuse what counts no ranks."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(
            f"TensorParallel: degree must be an integer of at least 1, got {value!r}",
            hint="it is the number of ranks that share each layer",
        )


def _check_mode(_piece: object, _field: attrs.Attribute[str], value: object) -> None:
    """Refuse what is no mode, or is none yet."""
    if value not in get_args(Mode):
        raise UsageError(
            f"TensorParallel: mode must be one of {', '.join(map(repr, get_args(Mode)))}, got {value!r}",
            hint="'1d' cuts each layer in one direction",
        )
    if value != "1d":
        raise CapabilityError(
            f"TensorParallel: mode {value!r} is not there yet",
            hint="use mode='1d', which cuts each layer in one direction",
        )


def _check_depth(piece: TensorParallel, _field: attrs.Attribute[int], value: object) -> None:
    """Refuse a depth, which only 2.5D has."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(
            f"TensorParallel: depth must be an integer of at least 1, got {value!r}", hint="leave it out"
        )
    if value != 1:
        raise UsageError(
            f"TensorParallel: depth={value} has no effect in mode {piece.mode!r}",
            hint="leave it out; it belongs to mode='2.5d'",
        )


def _check_plan(_piece: object, _field: attrs.Attribute[Mapping[str, str] | None], value: object) -> None:
    """Refuse what does not map patterns to roles."""
    if value is None:
        return
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise UsageError(
            f"TensorParallel: plan must map patterns of module names to roles, got {value!r}",
            hint='write plan={"*.mlp.up": "column", "*.mlp.down": "row"}',
        )
    for pattern, role in value.items():
        Role.parse(role, f"TensorParallel: plan[{pattern!r}]")


@final
@attrs.frozen(kw_only=True)
class TensorParallel:
    """Cut the layers of a model among ranks that work on the same batch, with the numbers of one process.

    Pairs of linear layers are cut by output and then by input features, so that what lies between them, heads
    or hidden features, divides among the ranks; embeddings and heads are cut by rows of the vocabulary. A
    transformer layer then receives 8 (p-1)/p words per token and feature in each step. What cannot be shown
    to work in pairs is cut by output features, and its outputs are gathered; the rest stays whole.
    :func:`~colossal_tensor_parallel.explain` says which is which.

    Attributes:
        degree: Number of ranks that share each layer.
        mode: ``"1d"`` cuts each layer in one direction; ``"2d"``, ``"2.5d"`` and ``"3d"`` are not there yet.
        depth: Copies of the grid in mode ``"2.5d"``.
        sequence: Also divide what lies between the cut layers, along the sequence: norms, residuals and
            dropout. Ranks keep their share of these activations only, and receive 10 (p-1)/p words instead
            of 8.
        plan: Roles by patterns of module names, which go before everything else: ``"column"``, ``"row"``,
            ``"gathered-column"``, ``"vocabulary"`` and ``"whole"``; ``"column:3"`` for three fused parts.
            ``*`` stands for any part of a name; the last pattern that matches counts.

    Raises:
        UsageError: An option is something else.
        CapabilityError: A mode is not there yet.
    """

    degree: int = attrs.field(validator=_check_degree)
    mode: Mode = attrs.field(default="1d", validator=_check_mode)
    depth: int = attrs.field(default=1, validator=_check_depth)
    sequence: bool = attrs.field(default=False)
    plan: Mapping[str, str] | None = attrs.field(default=None, validator=_check_plan, hash=False)

    @sequence.validator
    def _check_sequence(self, _field: attrs.Attribute[bool], value: object) -> None:
        """Refuse what is no choice."""
        if not isinstance(value, bool):
            raise UsageError(
                f"TensorParallel: sequence must be true or false, got {value!r}", hint="leave it"
            )
