"""What ``torch.compile`` makes of a model: a module around it, which may come before or after boost."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

__all__ = ["bare"]


def bare(model: nn.Module) -> nn.Module:
    """Return what a compiled model was made of, or the model itself."""
    inner: nn.Module | None = getattr(model, "_orig_mod", None)
    return model if inner is None else inner
