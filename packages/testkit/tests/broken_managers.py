"""Memory managers that each break one promise of the contract, for tests of the contract."""

from __future__ import annotations

from typing import Any

import attrs
import torch
import torch.distributed as dist

from colossal_core.pieces import Replicated
from colossal_core.plugins import MemoryManagerSpec, Registry
from colossal_core.runtime.replicated import ReplicatedManager
from colossal_testkit.registry import isolated_registry, target_of


@attrs.frozen(kw_only=True)
class Broken:
    """Do as ``Replicated`` does, but for one fault.

    Attributes:
        fault: ``"scale"``: updates are a millionth too large. ``"norm"``: it is that of this rank only.
            ``"heavy"``: memory is held for nothing. ``"chatty"``: a message past the ledger. ``"silent"``:
            non-finite gradients pass. ``"places"``: gradients are in no book. ``"decay"``: what has no
            gradient is updated. ``""``: none.
    """

    fault: str = ""


class BrokenManager(ReplicatedManager):  # type: ignore[misc]  # the shortest way to break one thing
    """The manager of `Broken`."""

    def __init__(self, options: Broken) -> None:
        """Remember the fault."""
        super().__init__(Replicated())
        self.fault = options.fault
        self.ballast = torch.zeros(1 << 16 if self.fault == "heavy" else 0)

    def finish(self, optimizer: int, *, norm_type: float = 2.0) -> float:
        """Return the norm, or something like it."""
        norm = super().finish(optimizer, norm_type=norm_type)
        if self.fault == "chatty" and dist.get_world_size() > 1:
            dist.all_reduce(torch.ones(1))
        if self.fault == "norm":
            return norm * (1 + 1e-9)
        if self.fault == "silent":
            return norm if norm == norm else 1.0  # noqa: PLR0124 - NaN is what differs from itself
        return norm

    def step(self, optimizer: int, *, scale: float) -> None:
        """Update, more or less."""
        if self.fault == "decay":
            for group in self._owned[optimizer].user.param_groups:
                for parameter in group["params"]:
                    parameter.data.mul_(1 - 1e-3)
        super().step(optimizer, scale=scale * (1 + 1e-6) if self.fault == "scale" else scale)

    def places(self) -> Any:
        """Publish the places, or some of them."""
        return (p for p in super().places() if self.fault != "places" or p.state != "gradient")


def make_registry() -> Registry:
    """Return a registry that knows the manager."""
    return isolated_registry(
        MemoryManagerSpec(
            name="broken",
            summary="Replicated with one fault.",
            options=target_of(Broken),
            target=target_of(BrokenManager),
        )
    )
