"""Installing borders: what runs where data enters and leaves a module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from colossal_core.interfaces import AbstractBorder

__all__ = ["hook_border"]


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
