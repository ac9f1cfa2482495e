"""What happens where data enters and leaves a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

__all__ = ["AbstractBorder"]


class AbstractBorder(ABC):
    """Changes what passes the border of one model: casts, cuts of the batch, gathering of sharded outputs.

    Borders of several pieces nest: ``enter`` runs in the order of the plan, ``exit`` in the reverse order.
    Both run
    inside the model's own call, with gradients, on every rank; they may communicate.
    """

    @abstractmethod
    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return what the model's forward shall be called with."""

    @abstractmethod
    def exit(self, outputs: Any) -> Any:
        """Return what the caller of the model shall get.

        While ``context.crossing.goes_to_loss`` only a loss will see it, and work may be put off; what is put
        off is in ``context.crossing.completions``.
        """
