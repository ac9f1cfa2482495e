"""Save and stop when the system asks to: a signal on one rank ends all ranks, with nothing lost.

The one idea: a signal comes at any moment, on any rank, but a run can only be saved between two iterations.
So the handler does nothing but remember; at the next step all ranks agree that one of them was told to stop;
and the save happens where the next iteration begins, when schedulers and counters of the last one have
followed.

# Note [Where an iteration begins]
Where a boosted loader trains, an iteration begins when it is asked for the next batch of an epoch, and not
when it is asked in vain: what a loop does at the end of an epoch has not happened then. Otherwise it begins
with the next forward in training mode.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, final

import torch

from colossal_core.errors import UsageError
from colossal_core.runtime.checkpointing.saving import check_root

if TYPE_CHECKING:
    from torch import nn

    from colossal_core.runtime.engine import Engine

__all__ = ["EXIT_CODE", "Stopping"]

EXIT_CODE = 143
"""What a process exits with that SIGTERM has ended: 128 + 15."""


@final
class Stopping:
    """Waits for a signal on any rank; then saves on all of them and exits."""

    def __init__(
        self,
        engine: Engine,
        root: Path,
        *,
        signals: Sequence[signal.Signals],
        extra: Callable[[], Any] | None,
        keep: int | None,
    ) -> None:
        """Install the handlers; a second signal does what it would have done without them.

        Args:
            engine: The built pieces.
            root: Where to save.
            signals: Which signals.
            extra: Returns what is saved with the run.
            keep: As for ``Booster.save``.

        Raises:
            UsageError: This is not the main thread, the only one that can handle signals, or ``root`` is no
                place for checkpoints.
        """
        check_root(root)
        self._engine = engine
        self._root = root
        self._extra = extra
        self._keep = keep
        self._is_told = False
        self._is_agreed = False
        self._before: dict[int, Any] = {}
        for number in signals:
            try:
                self._before[number] = signal.signal(number, self._note)
            except ValueError as err:
                raise UsageError(
                    "save_on_signal was called outside the main thread",
                    hint="only the main thread of a process can handle signals",
                ) from err
        for model in engine.models.values():
            engine.handles.append(model.register_forward_pre_hook(self._before_forward))

    def agree(self) -> None:
        """Find out whether any rank was told to stop; called by all ranks at each step."""
        if self._is_agreed:
            return
        mesh = self._engine.context.mesh
        told = torch.tensor([float(self._is_told)], device=mesh.device)
        self._engine.context.collectives.all_reduce(told, mesh.everyone(), phase="control", op="max").wait()
        self._is_agreed = bool(told.item() > 0)

    def begin_iteration(self) -> None:
        """Save and exit, if that was agreed; see Note [Where an iteration begins].

        Raises:
            SystemExit: The run was saved.
        """
        if not self._is_agreed or any(optimizer.is_in_window for optimizer in self._engine.optimizers):
            return
        self.close()
        extra = None if self._extra is None else self._extra()
        self._engine.saver.save(self._root, extra=extra, keep=self._keep, asynchronous=False)
        raise SystemExit(EXIT_CODE)

    def close(self) -> None:
        """Give signals back their handlers."""
        while self._before:
            number, handler = self._before.popitem()
            if handler is not None:
                signal.signal(number, handler)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        """Remember that this rank was told to stop."""
        self._is_told = True
        self.close()

    def _before_forward(self, model: nn.Module, _inputs: Any) -> None:
        """Begin an iteration where no boosted loader does."""
        if model.training and torch.is_grad_enabled() and self._engine.shares.current is None:
            self.begin_iteration()
