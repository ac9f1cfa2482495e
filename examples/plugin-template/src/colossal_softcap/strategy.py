"""The work: a border that every output of a model passes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, final

import torch
from torch.utils import _pytree as pytree

from colossal_core.interfaces import AbstractBorder, AbstractStrategy, Proposal

if TYPE_CHECKING:
    from torch import nn

    from colossal_core import Plan
    from colossal_core.mesh import MeshLayout
    from colossal_core.runtime.context import Context
    from colossal_softcap.options import SoftCap

__all__ = ["SoftCapStrategy"]


@final
class SoftCapStrategy(AbstractStrategy):
    """Cuts nothing: it only puts a border around each model, so it fits every plan."""

    def __init__(self, options: SoftCap) -> None:
        """Remember the options."""
        self._options = options

    def propose(self, models: Mapping[str, nn.Module], plan: Plan, layout: MeshLayout, rank: int) -> Proposal:
        """Announce no cuts, no groups and no traffic."""
        return Proposal()

    def apply(self, models: Mapping[str, nn.Module], proposal: Proposal, context: Context) -> None:
        """Leave the models as they are."""

    def borders(self, models: Mapping[str, nn.Module], context: Context) -> Mapping[str, AbstractBorder]:
        """Return one border for each model."""
        return {name: _SoftCapBorder(self._options.cap) for name in models}


@final
class _SoftCapBorder(AbstractBorder):
    """Caps what leaves a model; what enters passes unchanged."""

    def __init__(self, cap: float) -> None:
        """Remember the bound."""
        self._cap = cap

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the inputs unchanged."""
        return args, kwargs

    def exit(self, outputs: Any) -> Any:
        """Return the outputs with every floating tensor in them capped, in nested containers too."""
        return pytree.tree_map(self._cap_one, outputs)

    def _cap_one(self, leaf: Any) -> Any:
        """Cap one leaf of the outputs; others than floating tensors pass unchanged."""
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            return self._cap * torch.tanh(leaf / self._cap)
        return leaf
