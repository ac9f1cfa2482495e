"""What holds parameters, gradients and optimizer states, reduces gradients, and runs the update."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from colossal_core.states import is_like

if TYPE_CHECKING:
    import torch
    from torch import nn

    from colossal_core.mesh import GroupSpec
    from colossal_core.plan import Plan
    from colossal_core.runtime.context import Context
    from colossal_core.runtime.precision import Precision
    from colossal_core.runtime.table import ParameterTable, Place

__all__ = ["AbstractMemoryManager"]


class AbstractMemoryManager(ABC):
    """Takes the local tensors that the strategies left. Built with its options object as the only argument.

    A plan has exactly one. Optimizers are named by their position in the ``boost`` call.
    """

    def check(self, plan: Plan, table: ParameterTable) -> None:  # noqa: B027 - most managers serve every plan
        """Refuse what this manager cannot serve, before anything changes or is communicated.

        Args:
            plan: The plan.
            table: The parameters, not cut yet.

        Raises:
            ColossalError: With the reason; every rank then raises.
        """

    def groups(self, table: ParameterTable) -> Iterable[GroupSpec]:
        """Return groups that :meth:`attach` needs besides those that the table sums gradients over.

        Creating a group is collective over all ranks, so they are made before, also those of other ranks.

        Args:
            table: The parameters, cut and closed.
        """
        return ()

    @abstractmethod
    def attach(
        self, models: Mapping[str, nn.Module], optimizers: Sequence[torch.optim.Optimizer], context: Context
    ) -> None:
        """Take over parameters, gradients and existing optimizer states; called once, on every rank.

        Args:
            models: The models, cut as planned.
            optimizers: The user's optimizers; their parameter groups stay the user's and are read at each
                step.
            context: Mesh, table (closed), collectives, plan and precision.
        """

    @property
    def shows_gradients(self) -> bool:
        """Whether ``p.grad`` is the reduced gradient between backward and step, for users to change."""
        return False

    @abstractmethod
    def hold(self, optimizer: int | None = None) -> AbstractContextManager[None]:
        """Return a context in which backward is known not to be the last of its window."""

    @abstractmethod
    def finish(self, optimizer: int, *, norm_type: float = 2.0) -> float:
        """Reduce what is not reduced yet and return the gradient norm; collective, idempotent.

        Args:
            optimizer: Which one.
            norm_type: Order of the norm.

        Returns:
            The norm before clipping, the same on every rank; not finite when any gradient on any rank is not.
        """

    @abstractmethod
    def step(self, optimizer: int, *, scale: float) -> None:
        """Update with gradients times ``scale`` and close the window; after :meth:`finish`, on every rank."""

    @abstractmethod
    def skip(self, optimizer: int) -> None:
        """Close the window without an update; gradients, values and states stay as they are."""

    def regroup(self, optimizer: int) -> None:  # noqa: B027 - finish() is early enough for most managers
        """Take over what came into the groups of an optimizer since; every rank calls it, as it adds a group.

        The default leaves it to :meth:`finish`, which has to notice changes of groups anyway.
        """

    def clear(self, optimizer: int) -> None:  # noqa: B027 - most managers notice it in finish()
        """Leave the step out of a window that was finished already, since the user clears its gradients.

        Called by every ``zero_grad``, after ``p.grad`` was cleared on this rank; does nothing in a window
        that was not finished. Collective in one that was: where other ranks take the step instead, all raise.
        """

    def drop_gradients(self) -> None:  # noqa: B027 - nothing is on its way in most managers
        """Drop all gradients, those on their way as well, after an error that every rank raises; collective.

        The default serves managers that send nothing before :meth:`finish`; the user clears gradients there.
        """

    @abstractmethod
    def non_finite(self, optimizer: int) -> list[str]:
        """Return the parameters whose reduced gradient on this rank is not finite, as ``model.name``."""

    @abstractmethod
    def places(self) -> Iterator[Place]:
        """Publish where values, masters, gradients and states live on this rank: the second book."""

    def kept_places(self) -> Iterator[Place]:
        """Publish where the most that is known of each parameter lives on this rank, divided as updates are.

        That is its masters, or its values where it has none. Running averages follow these. The default
        serves managers whose masters and values are divided alike.
        """
        places = list(self.places())
        masters = {place.key for place in places if place.state == "master"}
        for place in places:
            if place.state == "master" or (place.state == "value" and place.key not in masters):
                yield place

    def publish_values(self) -> None:
        """Let models compute with what :meth:`kept_places` hold now; collective, on every rank.

        A backward through a graph from before fails as in torch, since parameters count as written.

        The default narrows masters into values, for managers that divide both alike.
        """
        places = list(self.places())
        masters = {(p.key, p.start): p.tensor for p in places if p.state == "master"}
        for place in places:
            master = masters.get((place.key, place.start))
            if place.state == "value" and master is not None:
                place.tensor.copy_(master.view(place.tensor.shape))

    @abstractmethod
    def state(self, optimizer: int) -> dict[torch.Tensor, dict[str, Any]]:
        """Return the optimizer's state by parameter, in full shapes; may communicate, on every rank."""

    def counters(self, optimizer: int) -> Mapping[torch.Tensor, Mapping[str, Any]]:
        """Return the optimizer's states that are not shaped like their parameter: step counts, factors.

        By parameter, for those of which this rank updates some; equal on all ranks that do. States that are
        shaped like their parameter are among :meth:`places`. The default takes them out of :meth:`state`;
        called on every rank.
        """
        return {
            parameter: {name: value for name, value in state.items() if not is_like(name, value, parameter)}
            for parameter, state in self.state(optimizer).items()
        }

    @abstractmethod
    def load_state(self, optimizer: int, state: Mapping[torch.Tensor, dict[str, Any]]) -> None:
        """Replace the optimizer's state; the inverse of :meth:`state`.

        Args:
            optimizer: Which one.
            state: State by parameter, in full shapes. A :class:`~colossal_core.states.Blank` in
                place of a tensor stands for one that is allocated as zeros, for the caller to fill through
                :meth:`places`.
        """

    @abstractmethod
    def detach(self) -> None:
        """Give the models back: every parameter owns its memory again, hooks are gone."""

    def report(self) -> Mapping[str, Any]:
        """Return what ``booster.report()`` tells besides bytes by category and traffic; nothing by default.

        Returns:
            Values that JSON can hold, by names other than ``memory`` and ``traffic``.
        """
        return {}

    @abstractmethod
    def estimate(
        self, table: ParameterTable, precision: Precision, optimizer_states: int = 2
    ) -> Mapping[str, int]:
        """Return bytes on this rank by category, from the table alone, before anything is allocated.

        Args:
            table: The parameters.
            precision: Dtypes of the plan.
            optimizer_states: States per element that the optimizer keeps (2 for Adam).

        Returns:
            Bytes under ``values``, ``gradients``, ``masters`` and ``states``.
        """

    @abstractmethod
    def full_gradients(self, optimizer: int) -> AbstractContextManager[dict[torch.Tensor, torch.Tensor]]:
        """Return a context that shows the reduced gradients of an optimizer's parameters whole; collective.

        The gradients are averages in fp32 at least, without the loss scale; edits are kept, and have to be
        the same on all ranks. Parameters without a gradient on any rank are left out.
        """

    def full_parameters(self, model: nn.Module) -> AbstractContextManager[dict[str, torch.Tensor]]:
        """Return a context that shows every parameter of a model whole, by serial name; edits are kept.

        The default serves managers that never release parameters.
        """
        return nullcontext({name: parameter.detach() for name, parameter in model.named_parameters()})
