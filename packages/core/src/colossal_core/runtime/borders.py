"""Installing borders: what runs where data enters and leaves a module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from colossal_core.interfaces import AbstractBorder

__all__ = ["Crossing", "hook_border"]


@final
class Crossing:
    """Where the outputs go that leave a model now; one per Booster.

    A border whose ``exit`` costs something, such as gathering logits that a loss can read in pieces, may put
    it off while outputs go straight into a loss. What was put off is made up for by :meth:`complete`.

    Attributes:
        goes_to_loss: Whether only a loss will see the outputs.
        completions: What borders do to outputs, in order, once somebody else shall see them.
    """

    def __init__(self) -> None:
        """Start where the user calls the model."""
        self.goes_to_loss = False
        self.completions: list[Callable[[Any], Any]] = []

    @contextmanager
    def to_loss(self) -> Iterator[None]:
        """Call a model for its loss."""
        before, self.goes_to_loss = self.goes_to_loss, True
        try:
            yield
        finally:
            self.goes_to_loss = before

    def complete(self, outputs: Any) -> Any:
        """Return outputs that went into a loss as users see them; collective where something was put off."""
        for completion in self.completions:
            outputs = completion(outputs)
        return outputs


def hook_border(module: nn.Module, border: AbstractBorder) -> list[RemovableHandle]:
    """Let a border see every call of a module.

    The border that is hooked first is the outermost: it sees arguments first and results last.

    Returns:
        Handles that remove it again.
    """

    def enter(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return border.enter(args, kwargs)

    def leave(_: nn.Module, _args: Any, outputs: Any) -> Any:
        return border.exit(outputs)

    return [
        module.register_forward_pre_hook(enter, with_kwargs=True),
        module.register_forward_hook(leave, prepend=True),
    ]
