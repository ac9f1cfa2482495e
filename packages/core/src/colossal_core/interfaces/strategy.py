"""What cuts a model: tensor parallelism, pipelines, recomputation, and whatever others add."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

from attrs import field, frozen

if TYPE_CHECKING:
    from torch import nn

    from colossal_core.interfaces.border import AbstractBorder
    from colossal_core.interfaces.executor import AbstractExecutor
    from colossal_core.interfaces.memory import AbstractMemoryManager
    from colossal_core.mesh import GroupSpec, MeshLayout
    from colossal_core.plan import Plan
    from colossal_core.plugins import Finding, Registry
    from colossal_core.runtime.context import Context
    from colossal_core.runtime.table import Key, Part

__all__ = ["AbstractStrategy", "Proposal"]


@frozen(kw_only=True)
class Proposal:
    """What a strategy is going to do, as a value; the same on every rank but for ``cuts``.

    Attributes:
        cuts: For each parameter or buffer whose entry it changes, the parts that this rank will hold of the
            serial one; an earlier strategy may leave less of it. Nothing else may be cut.
        groups: Groups that it will communicate in; they are created before ``apply``, in this order, which
            all ranks compare.
        volumes: Words that one rank will receive per step, by phase, where it can tell.
        findings: What it has to say; any finding of severity ``"error"`` stops ``boost`` on every rank.
    """

    cuts: Mapping[Key, tuple[Part, ...]] = field(factory=dict)
    groups: tuple[GroupSpec, ...] = ()
    volumes: Mapping[str, float] = field(factory=dict)
    findings: tuple[Finding, ...] = ()


class AbstractStrategy(ABC):
    """Cuts or changes a model. Built with its options object as the only argument.

    ``propose`` decides and ``apply`` does. Strategies run outermost axis first, within a phase; the phases
    are partition, shard, transform, recompute.
    """

    def connect(self, registry: Registry) -> None:
        """Take what other plugins add to this strategy; called first, on every rank, before :meth:`propose`.

        Args:
            registry: The one that the plan was made from; its records may be looked up and resolved.

        Raises:
            ColossalError: The options name something that nobody offers.
        """
        del registry  # most strategies stand for themselves

    @abstractmethod
    def propose(self, models: Mapping[str, nn.Module], plan: Plan, layout: MeshLayout, rank: int) -> Proposal:
        """Decide, without changing anything and without communicating.

        Args:
            models: The serial models by name.
            plan: The whole plan.
            layout: Axes of the run.
            rank: Global rank that the cuts are for.

        Returns:
            What :meth:`apply` is going to do.

        Raises:
            ColossalError: The models or the plan cannot be served; raised on every rank.
        """

    @abstractmethod
    def apply(self, models: Mapping[str, nn.Module], proposal: Proposal, context: Context) -> None:
        """Cut the models in place and write what was done into ``context.table``.

        ``Parameter`` objects keep their identity. Called on every rank, in the same order; may communicate.
        An earlier strategy may have cut a parameter already: what is cut further is held by the intersection
        of its holders with the ranks of the new cut (``MeshLayout.intersection`` and ``without``), and
        partial sums along further axes multiply (``MeshLayout.product``).

        The cut model gives a gradient to all ranks that hold a part of a parameter, or to none of them, as
        the serial model gives one to the whole parameter or to none of it; a zero counts as a gradient.

        Raises:
            ColossalError: It cannot be done; raised on every rank.
        """

    def borders(self, models: Mapping[str, nn.Module], context: Context) -> Mapping[str, AbstractBorder]:
        """Return the borders that models need, by model name; called after :meth:`apply`."""
        del models, context  # most strategies need none
        return {}

    def executor(self, context: Context, manager: AbstractMemoryManager) -> AbstractExecutor | None:
        """Return what runs a step in place of the plain executor, or None; called after :meth:`borders`.

        Args:
            context: As in :meth:`apply`.
            manager: The attached memory manager, which an executor that runs several backward passes tells
                that more will follow (:meth:`~colossal_core.interfaces.AbstractMemoryManager.hold`).
        """
        del context, manager  # most strategies leave the step alone
        return None
