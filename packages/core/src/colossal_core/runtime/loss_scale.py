"""Loss scaling for fp16: small gradients are lifted into the range of fp16, and lowered again in the update.

The one idea: the scale enters where the loss meets the model. Gradients that flow into a model through its
outputs are multiplied by the scale, gradients that leave it through its inputs are divided by it, so the
user's own code around the model never sees scaled values. ``booster.backward`` is the explicit form: it
scales the loss itself and switches these borders off, which is right for every graph, gradient penalties and
losses on sub-modules included.

# Note [Passing the border] A gradient that reaches an fp16 parameter unscaled would be silently wrong, so
each backward pass has to prove that it was scaled: a border opens the gate for the pass that runs through it,
``booster.backward`` opens it for its own, and a parameter that gets a gradient while the gate is closed
raises. So does one that the same pass also reaches past the border, as a penalty on parameters does: the sum
of both gradients has no scale. A border that runs with gradients enabled builds a graph of gradients; what is
derived from that can only be scaled explicitly.

Source: Micikevicius et al., *Mixed Precision Training*, 2018, section 3.2; dynamic scaling with hysteresis as
in Megatron-LM.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import torch

from colossal_core.errors import NonFiniteError, UsageError
from colossal_core.interfaces import AbstractBorder
from colossal_core.runtime.backward_end import at_end_of_backward
from colossal_core.runtime.passes import find_direct_uses, mark_exit
from colossal_core.runtime.precision import cast_floating, map_tensors

__all__ = ["LossScale", "ScaleBorder"]

INITIAL_SCALE = 2.0**16
LARGEST_SCALE = 2.0**24
SMALLEST_SCALE = 1.0
GROWTH_INTERVAL = 1000
"""Clean steps in a row before the scale is doubled, as in Megatron-LM."""

HYSTERESIS = 2
"""The overflow that first halves the scale: a single outlier does not. Refilled when the scale grows."""


@final
class LossScale:
    """The scale of one Booster, and the gate that keeps unscaled gradients out.

    Starts at 2**16. From the second overflow on, each one halves it; ``GROWTH_INTERVAL`` clean steps in a row
    double it, and the first overflow after that is for free again. Always a power of two between 1 and 2**24,
    so scaling is exact but for the range of fp16. All ranks see the same steps, hence the same scale.

    Attributes:
        value: The scale of gradients that are computed now.
    """

    def __init__(self) -> None:
        """Start at the initial scale with a closed gate."""
        self.value = INITIAL_SCALE
        self._num_clean = 0
        self._num_at_smallest = 0
        self._patience = HYSTERESIS
        self._is_open = False
        self._is_explicit = False
        self._needs_explicit = False
        self._direct: set[torch.Tensor] | None = None
        self._pass = -1

    # --- the rules ------------------------------------------------------------------------------------------

    def note_clean(self) -> None:
        """Count a step with finite gradients."""
        self._num_clean += 1
        self._num_at_smallest = 0
        if self._num_clean == GROWTH_INTERVAL:
            self._num_clean, self._patience = 0, HYSTERESIS
            self.value = min(self.value * 2, LARGEST_SCALE)

    def note_overflow(self) -> None:
        """Count a step with a non-finite gradient.

        Raises:
            NonFiniteError: The scale cannot be lowered any more.
        """
        self._num_clean = 0
        self._patience -= 1
        if self._patience > 0:
            return
        if self.value <= SMALLEST_SCALE:
            self._num_at_smallest += 1
            if self._num_at_smallest == HYSTERESIS:
                raise NonFiniteError(
                    f"gradients are not finite in {HYSTERESIS} steps in a row, even at a loss scale of 1",
                    hint="the loss diverges: lower the learning rate, check the data, or use 'bf16'",
                )
        self.value = max(self.value / 2, SMALLEST_SCALE)

    def state(self) -> dict[str, float]:
        """Return what a checkpoint keeps."""
        return {"value": self.value, "num_clean": self._num_clean, "patience": self._patience}

    def load_state(self, state: dict[str, float]) -> None:
        """Continue from :meth:`state`."""
        self.value = float(state["value"])
        self._num_clean, self._patience = int(state["num_clean"]), int(state["patience"])

    # --- the gate -------------------------------------------------------------------------------------------

    @property
    def is_explicit(self) -> bool:
        """Whether ``booster.backward`` runs, so borders leave gradients alone."""
        return self._is_explicit

    def open_for_this_pass(self) -> None:
        """Let gradients through until the backward pass that runs now has ended."""
        if torch.is_grad_enabled():
            self._needs_explicit = True
        current = torch._C._current_graph_task_id()  # noqa: SLF001 - torch has no public name for it
        if not self._is_open or current != self._pass:  # one that an error has ended closes nothing
            self._is_open, self._pass = True, current
            self._direct = set() if self._is_explicit else find_direct_uses()
            at_end_of_backward(self._close)

    def _close(self) -> None:
        """Close the gate at the end of a backward pass."""
        self._is_open = False
        self._direct = None

    @contextmanager
    def explicit(self) -> Iterator[None]:
        """Let gradients of a loss through that was scaled itself; borders are off."""
        self._is_explicit = True
        try:
            yield
        finally:
            self._is_explicit = self._needs_explicit = False

    def check(self, name: str, parameter: torch.Tensor) -> None:
        """Refuse a gradient of a parameter that was not scaled, or not all of it.

        Args:
            name: Its name.
            parameter: The parameter that is about to get a gradient.

        Raises:
            UsageError: Naming the parameter and ``booster.backward``.
        """
        passed = self._is_open and not self._needs_explicit
        if self._is_explicit or (passed and self._direct is not None and parameter not in self._direct):
            return
        self._is_open = self._needs_explicit = False
        raise UsageError(
            f"parameter {name!r} gets a gradient that did not pass the border of the boosted model, at least "
            "in part, or that comes from a gradient of a gradient, so it lacks the loss scale of fp16",
            hint="replace loss.backward() by booster.backward(loss)",
        )


@final
class ScaleBorder(AbstractBorder):
    """Casts at the border of an fp16 model, and scales gradients there.

    Gradients that enter through outputs are multiplied by the scale, those that leave by inputs are divided
    by it. A backward that builds a graph (``create_graph=True``) computes values that are used like
    activations: it passes unscaled, and what is derived from it needs the explicit form.
    """

    def __init__(self, scale: LossScale) -> None:
        """Follow a scale."""
        self._scale = scale
        self._entered: list[torch.Tensor] = []

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Cast floating inputs to fp16, and watch those that need gradients."""
        self._entered.clear()
        cast_args, cast_kwargs = cast_floating(map_tensors(self._watch_input, (args, kwargs)), torch.float16)
        return cast_args, cast_kwargs

    def exit(self, outputs: Any) -> Any:
        """Cast fp16 outputs to fp32, and watch those that need gradients."""
        watched = map_tensors(self._watch_output, outputs)
        self._entered.clear()
        return watched

    def _watch_input(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return an alias whose gradient is divided by the scale; the caller may use the tensor too."""
        if not tensor.requires_grad or not torch.is_grad_enabled():
            return tensor
        alias = tensor.view_as(tensor)
        alias.register_hook(self._lower)
        self._entered.append(alias)
        # The model may work in place on what it gets, which would take the hook out of the graph.
        return alias.clone() if alias.dtype == torch.float16 else alias

    def _watch_output(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy in fp32 whose gradient is multiplied by the scale."""
        narrow = tensor.dtype == torch.float16
        if not tensor.requires_grad or not torch.is_grad_enabled():
            return tensor.float() if narrow else tensor
        copy = tensor.float() if narrow else tensor.clone()
        copy.register_hook(self._raise)
        mark_exit(copy, self._entered)
        return copy

    def _raise(self, gradient: torch.Tensor) -> torch.Tensor:
        """Scale a gradient that enters through an output."""
        self._scale.open_for_this_pass()
        return gradient * self._factor()

    def _lower(self, gradient: torch.Tensor) -> torch.Tensor:
        """Unscale a gradient that leaves by an input."""
        return gradient / self._factor()

    def _factor(self) -> float:
        """Return the scale, or 1 where the pass was scaled elsewhere or builds a graph."""
        return 1.0 if self._scale.is_explicit or torch.is_grad_enabled() else self._scale.value
