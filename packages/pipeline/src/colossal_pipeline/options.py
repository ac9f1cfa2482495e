"""Options of the strategy ``pipeline``. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal, cast, final

import attrs

from colossal_core.errors import UsageError
from colossal_core.plugins import Target

if TYPE_CHECKING:
    import torch
    from torch import nn

    from colossal_pipeline.fitting import Fit

__all__ = ["Pipeline"]

Balance = Literal["time", "parameters"] | tuple[int, ...] | tuple[str, ...]


def _check_count(_piece: object, field: attrs.Attribute[int], value: object) -> None:
    """Refuse what counts nothing."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(
            f"Pipeline: {field.name} must be an integer of at least 1, got {value!r}",
            hint="e.g. Pipeline(degree=2, microbatches=8)",
        )


def _check_schedule(_piece: object, _field: attrs.Attribute[str], value: object) -> None:
    """Refuse what is no name; whether there is such a schedule is known at boost."""
    if not isinstance(value, str) or not value:
        raise UsageError(
            f"Pipeline: schedule must be a name, got {value!r}",
            hint="'gpipe', '1f1b', 'interleaved', 'zbh1', 'zbv', or one that a plugin offers",
        )


def _as_balance(value: object) -> object:
    """Freeze a list."""
    return tuple(value) if isinstance(value, list | tuple) else value


def _check_balance(piece: object, _field: attrs.Attribute[Balance], value: object) -> None:
    """Refuse what says nothing about stages."""
    if value in ("time", "parameters"):
        return
    assert isinstance(piece, Pipeline)
    stages = piece.num_stages
    if value == () and stages == 1:
        return  # no stage but the first
    if isinstance(value, tuple) and value:
        if all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in value):
            if len(value) == stages:
                return
            raise UsageError(
                f"Pipeline: balance has {len(value)} numbers of blocks for {stages} stages",
                hint="give each stage its number of repeated blocks",
            )
        if all(isinstance(item, str) and item for item in value):
            if len(value) == stages - 1:
                return
            raise UsageError(
                f"Pipeline: balance names {len(value)} modules for {stages} stages",
                hint=f"name the first module of each stage but the first: {stages - 1} names",
            )
    raise UsageError(
        f"Pipeline: balance must be 'time', 'parameters' or a list, got {value!r}",
        hint="a list has the number of repeated blocks of each stage, or the name of the first module of "
        "each stage but the first",
    )


def _check_flow(_piece: object, _field: attrs.Attribute[str], value: object) -> None:
    """Refuse what is not a choice."""
    if value not in {"shapes", "values"}:
        raise UsageError(
            f"Pipeline: flow must be 'shapes' or 'values', got {value!r}",
            hint="'values' when the values of a batch decide which modules are called",
        )


def _check_timeline(_piece: object, _field: attrs.Attribute[str | None], value: object) -> None:
    """Refuse what names no file."""
    if value is not None and (not isinstance(value, str) or not value):
        raise UsageError(
            f"Pipeline: timeline must be the name of a file or None, got {value!r}",
            hint="write timeline='step.json'",
        )


def _as_names(value: object) -> tuple[str, ...]:
    """Freeze names; a single one may be written without a sequence."""
    names = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else (value,)
    if not all(isinstance(name, str) and name for name in names):
        raise UsageError(
            f"Pipeline: everywhere must be names of parameters, got {value!r}",
            hint="write everywhere=('position.weight',)",
        )
    return tuple(str(name) for name in names)


@final
@attrs.frozen(kw_only=True)
class Pipeline:
    """Put stages of the model on different ranks, and send micro-batches through them.

    A rank holds parameters, gradients and optimizer state of its stages only. For each micro-batch every
    stage sends what the next one needs, and receives its gradient.

    Attributes:
        degree: Ranks along the axis ``pipeline``.
        microbatches: Into how many micro-batches each rank's share of a batch is cut; sizes differ by at most
            one row, and a batch with fewer rows has as many micro-batches as rows.
        schedule: In which order stages compute: ``"gpipe"``, ``"1f1b"``, ``"interleaved"``, ``"zbh1"``,
            ``"zbv"``, or the name of a schedule that a plugin offers.
        chunks: Stages on each rank: any number for ``gpipe`` and ``interleaved``, 2 for ``zbv``, else 1.
        balance: How the model is cut. ``"time"``: so that the slowest stage is as fast as possible, by an
            estimate from the weights that multiply; ``"parameters"``: the same for numbers of parameters; a
            list: the number of repeated blocks of each stage, or the name of the first module of each stage
            but the first.
        flow: ``"shapes"``: which modules forward calls depends on shapes, so it is found out once for all
            batches of equal shapes. ``"values"``: it depends on the values of the batch as well, as where
            samples choose a branch, and is found out for each micro-batch; that costs one forward without
            values each time.
        everywhere: Names of parameters that every stage holds, since code outside of their module reads them.
            Parameters that belong to no module with a forward of its own need not be named.
        timeline: A file into which the first rank writes, after each step, when each rank computed what, for
            ``colossal pipeline draw --recorded FILE``; None for no file. On a GPU it makes every action wait
            for the device.

    Raises:
        UsageError: An option is something else.
    """

    degree: int = attrs.field(validator=_check_count)
    microbatches: int = attrs.field(validator=_check_count)
    schedule: str = attrs.field(default="1f1b", validator=_check_schedule)
    chunks: int = attrs.field(default=1, validator=_check_count)
    balance: Balance = attrs.field(default="time", converter=_as_balance, validator=_check_balance)
    flow: Literal["shapes", "values"] = attrs.field(default="shapes", validator=_check_flow)
    everywhere: tuple[str, ...] = attrs.field(default=(), converter=_as_names)
    timeline: str | None = attrs.field(default=None, validator=_check_timeline)

    @property
    def num_stages(self) -> int:
        """Stages of all ranks."""
        return self.degree * self.chunks

    def fit(
        self,
        model: nn.Module,
        batch: Any,
        criterion: Callable[..., torch.Tensor] | None = None,
        *,
        limit_bytes: int | None = None,
        element_bytes: int = 16,
    ) -> Fit:
        """Measure each module on this machine for a moment, and choose where stages begin.

        Call it before ``boost``, with the model on its device; the model is as before afterwards. In a
        process group it is collective, and all ranks get the same cut.

        Args:
            model: The model, with values.
            batch: As many samples as a micro-batch has, in the form that ``forward_backward`` takes.
            criterion: The loss, or None when outputs carry it.
            limit_bytes: What a rank may hold; None for any amount.
            element_bytes: What it holds for each element of its parameters: 16 for fp32 with Adam, 4 bytes
                each for value, gradient and two moments.

        Returns:
            A cut with its expected times and bytes; give ``.piece`` to the Booster.

        Raises:
            UsageError: The model is on the ``meta`` device, has too few modules, or no cut fits.
        """
        # By name, since this module is read where torch must not be.
        fit_model = cast("Callable[..., Fit]", Target("colossal_pipeline.fitting:fit_model").load())
        return fit_model(self, model, batch, criterion, limit_bytes=limit_bytes, element_bytes=element_bytes)
