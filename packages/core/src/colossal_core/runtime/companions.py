"""What goes along with boosted optimizers: schedulers that follow them and loaders that feed them.

The one idea: neither needs a model to be cut, so they may come with the ``boost`` call of the model or in a
later one, as scripts make a scheduler over the optimizer that ``boost`` returned, or a loader for evaluation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from colossal_core.runtime.agreement import Agreement
from colossal_core.runtime.launch import rendezvous_store
from colossal_core.runtime.loading import BoostedLoader, Prepared
from colossal_core.runtime.scheduler import follow_real_steps

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LRScheduler

    from colossal_core.runtime.engine import Engine
    from colossal_core.runtime.launch import World
    from colossal_core.runtime.objects import Objects
    from colossal_core.runtime.optimizer import BoostedOptimizer

__all__ = ["boost_companions"]


def boost_companions(
    found: Objects, loaders: Sequence[Prepared], engine: Engine, world: World
) -> dict[int, Any]:
    """Return the boosted schedulers and loaders by their position in the ``boost`` call.

    Args:
        found: What the call was given.
        loaders: Its loaders, checked.
        engine: Whose optimizers and shares they belong to.
        world: The place of this process.
    """
    replaced: dict[int, Any] = {}
    for scheduler in found.schedulers:
        followed = _optimizer_of(scheduler, engine)
        if followed is not None:
            boosted = follow_real_steps(scheduler, followed)
            engine.schedulers.append(boosted)
            replaced[found.position(scheduler)] = boosted
    for loader in loaders:
        # Ranks may begin to read at moments minutes apart, and each loader in an order of its own.
        own = Agreement(rendezvous_store(), world.rank, world.world_size, timeout_seconds=600)
        boosted_loader = BoostedLoader(
            loader,
            device=world.device,
            book=engine.shares,
            agreement=own,
            number=len(engine.loaders),
        )
        engine.loaders.append(boosted_loader)
        replaced[found.position(loader.user)] = boosted_loader
    return replaced


def _optimizer_of(scheduler: LRScheduler, engine: Engine) -> BoostedOptimizer | None:
    """Return the boosted optimizer whose groups a scheduler changes; made over it or over the user's."""
    for optimizer in engine.optimizers:
        if scheduler.optimizer is optimizer.user or scheduler.optimizer is optimizer:
            return optimizer
    return None
