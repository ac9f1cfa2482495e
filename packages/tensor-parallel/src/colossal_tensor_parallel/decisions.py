"""What becomes of layers and models, as values."""

from __future__ import annotations

from typing import final

from attrs import frozen

from colossal_tensor_parallel.candidates import Attribute, UnitCut
from colossal_tensor_parallel.groups import Form
from colossal_tensor_parallel.roles import Cut
from colossal_tensor_parallel.spans import Split

__all__ = ["Decision", "ModelPlan", "Regions"]


@final
@frozen(kw_only=True)
class Decision:
    """What becomes of one layer.

    Attributes:
        name: First name in the model.
        cut: How it is cut.
        form: What it computes.
        split: Of the dim that is cut; None for layers that stay whole.
        reason: Why, for people.
        drops: Whether values behind it are dropped in training, on each rank others.
        is_head: Whether its outputs are logits of a vocabulary, which losses read in pieces.
    """

    name: str
    cut: Cut
    form: Form
    split: Split | None = None
    reason: str
    drops: bool = False
    is_head: bool = False


@final
@frozen(kw_only=True)
class Regions:
    """What lies between the cut layers and is divided along the tokens.

    Attributes:
        divided: Row layers and tables whose outputs stay divided.
        pieces: Modules that treat each token by itself, and compute those of this rank.
        gathered: Where else divided activations are read whole, for people.
        shares: Parameters whose gradients are shares on each rank because of it.
    """

    divided: tuple[str, ...]
    pieces: tuple[str, ...]
    gathered: tuple[str, ...] = ()
    shares: tuple[str, ...] = ()


@final
@frozen(kw_only=True)
class ModelPlan:
    """What becomes of a model.

    Attributes:
        decisions: One for each layer, in order of registration.
        attributes: Integers of modules that change.
        shared: Parameters that stay whole and whose gradients are shares on each rank.
        regions: What is divided along the tokens; None without sequence regions.
        units: Modules that are cut in one piece: stacked experts, attention of torch.
    """

    decisions: tuple[Decision, ...]
    attributes: tuple[Attribute, ...]
    shared: tuple[str, ...]
    regions: Regions | None = None
    units: tuple[UnitCut, ...] = ()

    def lines(self) -> tuple[str, ...]:
        """Return all that ranks have to agree about."""
        return (
            *(f"{d.name}: {d.cut} {d.split} {d.is_head} {d.drops}" for d in self.decisions),
            *(f"{a.module}.{a.name} = {a.values}" for a in self.attributes),
            *(f"shares of {name}" for name in self.shared),
            *(f"{unit.kind} {unit.name}: {unit.splits}" for unit in self.units),
            *(() if self.regions is None else (f"tokens: {self.regions.divided} {self.regions.pieces}",)),
        )
