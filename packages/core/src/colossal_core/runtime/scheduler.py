"""The scheduler that ``boost`` returns: it follows real steps only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from colossal_core.errors import UsageError

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LRScheduler

    from colossal_core.runtime.optimizer import BoostedOptimizer

__all__ = ["check_scheduler", "follow_real_steps"]

_MARK = "_colossal_follows"


def check_scheduler(scheduler: object) -> None:
    """Refuse a scheduler that ``boost`` returned.

    Raises:
        UsageError: It is one.
    """
    if hasattr(type(scheduler), _MARK):
        raise UsageError(
            f"this {type(scheduler).__name__} is boosted already", hint="pass each scheduler to boost() once"
        )


def follow_real_steps(scheduler: LRScheduler, optimizer: BoostedOptimizer) -> LRScheduler:
    """Return a scheduler that shares the user's ``__dict__`` and ignores skipped steps.

    Args:
        scheduler: The user's scheduler; both objects show the same state from now on.
        optimizer: Tells whether its last ``step`` was real.
    """

    def step(self: LRScheduler, *args: Any, **kwargs: Any) -> None:
        """Advance by one real step of the optimizer."""
        if optimizer.stepped:
            kind.step(self, *args, **kwargs)

    kind = type(scheduler)
    boosted: LRScheduler = object.__new__(
        type(kind.__name__, (kind,), {"step": step, _MARK: True, "__module__": kind.__module__})
    )
    boosted.__dict__ = scheduler.__dict__
    return boosted
