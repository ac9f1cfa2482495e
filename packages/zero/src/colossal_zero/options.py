"""Options of the memory managers ``zero1``, ``zero2`` and ``zero3``. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal, cast, final

import attrs

from colossal_core.errors import UsageError
from colossal_core.plugins import Target

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Zero"]


def _check_stage(_piece: object, _field: attrs.Attribute[int], value: object) -> None:
    """Refuse what is no stage."""
    if isinstance(value, bool) or value not in {1, 2, 3}:
        raise UsageError(
            f"Zero: stage must be 1, 2 or 3, got {value!r}",
            hint="1 divides optimizer state, 2 gradients too, 3 parameters too",
        )


def _check_replicas(_piece: object, _field: attrs.Attribute[int], value: object) -> None:
    """Refuse what counts no copies."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(
            f"Zero: replicas must be an integer of at least 1, got {value!r}",
            hint="1 divides among all data ranks; 2 keeps two copies, each divided among half of them",
        )


def _check_offload(_piece: object, _field: attrs.Attribute[str | None], value: object) -> None:
    """Refuse what is not a choice."""
    if value not in {None, "optimizer"}:
        raise UsageError(
            f"Zero: offload must be None or 'optimizer', got {value!r}",
            hint="'optimizer' keeps optimizer state and masters in host memory",
        )


def _check_gather(piece: Zero, _field: attrs.Attribute[str], value: object) -> None:
    """Refuse what is not a choice, or has no effect."""
    if value not in {"step", "forward"}:
        raise UsageError(
            f"Zero: gather must be 'step' or 'forward', got {value!r}",
            hint="'forward' returns from step() while updated values are still on their way",
        )
    if value == "forward" and piece.stage == 3:
        raise UsageError(
            "Zero: gather='forward' has no effect with stage=3, which gathers each unit when it runs",
            hint="leave it out",
        )


@final
@attrs.frozen(kw_only=True)
class Zero:
    """Divide what training holds among the D data ranks, with the numbers of one process.

    With Adam and bf16, a rank holds for each parameter 4 + 12/D bytes in stage 1, 2 + 14/D in stage 2, 16/D
    in stage 3. Each rank receives (D-1)/D words for each parameter when gradients are reduced, and as many
    when updated values are gathered; in stage 3 values are gathered twice, for forward and for backward.

    Attributes:
        stage: 1 divides optimizer state and fp32 masters, 2 gradients too, 3 parameters too. Stage 2 and 3
            reduce each backward: several before a step cost traffic each, and no memory.
        replicas: Number of copies of what is divided: each is divided among D/replicas ranks, so that gathers
            stay inside a machine and only shards of gradients travel between machines.
        offload: ``"optimizer"`` keeps optimizer state and masters in host memory, and runs the update there:
            per step gradients of the shard travel to the host, and values back. Masters exist in every
            precision then.
        gather: When updated values are whole again on every rank, in stages 1 and 2: ``"step"`` before
            ``step()`` returns, ``"forward"`` when the first module runs that reads them; until then
            parameters show NaN to code that reads them elsewhere.

    Raises:
        UsageError: An option is something else.
    """

    stage: Literal[1, 2, 3] = attrs.field(validator=_check_stage)
    replicas: int = attrs.field(default=1, validator=_check_replicas)
    offload: Literal["optimizer"] | None = attrs.field(default=None, validator=_check_offload)
    gather: Literal["step", "forward"] = attrs.field(default="step", validator=_check_gather)

    @property
    def replica_degree(self) -> int | None:
        """Degree of the mesh axis ``replica``; None when there is one copy only, and no such axis."""
        return None if self.replicas == 1 else self.replicas

    def estimate(
        self, model: nn.Module, *, ranks: int, precision: str = "fp32", optimizer_states: int = 2
    ) -> Mapping[str, int]:
        """Return the bytes that one rank will hold after a step, without allocating anything.

        Gradients are part of it; on accelerators their memory is given back by ``zero_grad()``.

        Args:
            model: The model; may be on the ``meta`` device.
            ranks: Number of data ranks, all copies together.
            precision: That of the plan.
            optimizer_states: States per element that the optimizer keeps: 2 for Adam, 1 for momentum.

        Returns:
            Bytes under ``values``, ``gradients``, ``masters`` and ``states``.

        Raises:
            UsageError: The ranks do not divide into that many copies.
        """
        # By name, since this module is read where torch must not be.
        estimate_model = cast(
            "Callable[..., Mapping[str, int]]", Target("colossal_zero.sizes:estimate_model").load()
        )
        return estimate_model(
            self, model, ranks=ranks, precision=precision, optimizer_states=optimizer_states
        )
