"""What a Booster has built, and the bookkeeping of a run around each step.

The one idea: the engine owns the pieces that ``boost`` put together (context, memory manager, executor) and
is what the boosted objects talk to, so those never reach up into the Booster.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, final

import torch
from attrs import define

from colossal_core.errors import NonFiniteError, UsageError
from colossal_core.runtime.averages import Average
from colossal_core.runtime.checkpointing.saving import Saver
from colossal_core.runtime.compiled import bare
from colossal_core.runtime.shares import ShareBook
from colossal_core.runtime.whole import is_everywhere, whole_tensors

if TYPE_CHECKING:
    from torch import nn
    from torch.optim.lr_scheduler import LRScheduler

    from colossal_core.interfaces import AbstractExecutor, AbstractMemoryManager
    from colossal_core.plugins.observers import Observers
    from colossal_core.runtime.agreement import Agreement
    from colossal_core.runtime.checkpointing.stopping import Stopping
    from colossal_core.runtime.context import Context
    from colossal_core.runtime.copies import Handle
    from colossal_core.runtime.loading import BoostedLoader
    from colossal_core.runtime.optimizer import BoostedOptimizer
    from colossal_core.runtime.table import Entry, Key, Place

__all__ = ["Engine", "Progress"]

SHOWN_NAMES = 5
"""Names listed in an error before the rest is counted."""


@define(eq=False)
class Progress:
    """How far a run has come.

    Attributes:
        num_steps: Real steps of the first optimizer so far.
    """

    num_steps: int = 0


@final
class Engine:
    """The built pieces of one ``boost`` call, from then until ``release``.

    Attributes:
        context: Mesh, table, collectives, plan and precision.
        manager: The memory manager.
        executor: Runs ``forward_backward``.
        models: The boosted models by name.
        optimizers: The boosted optimizers, in the order of the ``boost`` call.
        handles: Hooks on the models, to be removed at release.
        observers: Who is told what happens.
        progress: How far the run has come; outlives the engine, for observers of its end.
        schedulers: The boosted schedulers, in the order of the ``boost`` calls.
        loaders: The boosted loaders, in that order.
        averages: Running averages with the name of their model, in the order in which they were made.
        shares: What the boosted loaders gave last.
        agreement: How ranks compare.
        seed: Seed of the run, which random state derives from.
        saver: Writes checkpoints.
        stopping: Saves and exits after a signal, where the user asked for it.
    """

    def __init__(
        self,
        *,
        context: Context,
        manager: AbstractMemoryManager,
        executor: AbstractExecutor,
        models: Mapping[str, nn.Module],
        agreement: Agreement,
        patient: Agreement,
        observers: Observers,
    ) -> None:
        """Hold the pieces.

        Args:
            context: Mesh, table, collectives, plan and precision.
            manager: The memory manager.
            executor: Runs ``forward_backward``.
            models: Models by name.
            agreement: How ranks compare.
            patient: How they do where some wait for the disks of others.
            observers: Who is told what happens.
        """
        self.context = context
        self.manager = manager
        self.executor = executor
        self.models = dict(models)
        self.optimizers: list[BoostedOptimizer] = []
        self.schedulers: list[LRScheduler] = []
        self.loaders: list[BoostedLoader] = []
        self.handles: list[Handle] = []
        self.progress = Progress()
        self.shares = ShareBook(
            context.mesh.layout.data_degree,
            arrivals=context.arrivals,
            row_weights=context.row_weights,
            loss_weights=context.weights,
        )
        self.shares.watch(self.begin_iteration)
        self.averages: list[tuple[str, Average]] = []
        self._followed: list[int] = []
        self.agreement = agreement
        self.saver = Saver(self, patient)
        self.stopping: Stopping | None = None
        self.seed = 0
        self.observers = observers

    @property
    def num_steps(self) -> int:
        """Real steps of the first optimizer so far."""
        return self.progress.num_steps

    def before_step(self) -> None:
        """Hear of a save that is written beside training; tell observers that a step is about to be taken."""
        self.saver.check()
        if self.stopping is not None:
            self.stopping.agree()
        self.observers.before_step_taken(self.num_steps)

    def after_step(self, optimizer: int, metrics: Mapping[str, object]) -> None:
        """Close the ledger's step, follow with averages, tell observers; the first optimizer counts steps."""
        self.context.collectives.ledger.end_step()
        if self.context.arrivals.loss_scale is not None:
            self.context.arrivals.loss_scale.note_clean()
        for followed, (_, average) in zip(self._followed, self.averages, strict=True):
            if optimizer == followed:
                average.update()
        self.observers.after_step_taken(self.num_steps, metrics)
        if optimizer == 0:
            self.progress.num_steps += 1

    @property
    def epoch(self) -> int:
        """Epoch of the loader that training reads, until its loop has ended; 0 without a boosted loader."""
        return self.loaders[self.shares.training].epoch if self.loaders else 0

    def begin_iteration(self, loader: int | None = None) -> None:
        """Save and exit where a signal has asked for it; called where an iteration over batches begins.

        Args:
            loader: Number of the boosted loader that is asked for a batch; None where a loop has no such
                loader.
        """
        if self.stopping is not None and loader in {None, self.shares.training}:
            self.stopping.begin_iteration()

    def partial_entries(self) -> Iterator[Entry]:
        """Iterate over what some rank does not hold whole; the same on all ranks."""
        layout, rank = self.context.mesh.layout, self.context.mesh.rank
        return (entry for entry in self.context.table if not is_everywhere(entry, layout, rank))

    @contextmanager
    def full_parameters(self, model: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
        """Show the parameters of a model in serial shapes, by serial name, in the order of the model."""
        table, names = self.context.table, self._parameter_names(model)
        dtypes = {key: table.tensor(table[key]).dtype for key in names}
        with self.manager.full_parameters(self.models[self.name_of(model)]) as found:
            local = {key: found[name] for key, name in names.items() if name in found}
            with whole_tensors(local, dtypes, self.context) as shown:
                yield {names[key]: tensor for key, tensor in shown.items()}

    @contextmanager
    def full_gradients(self, model: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
        """Show the reduced gradients of a model in serial shapes, by serial name, in the order of the model.

        Raises:
            UsageError: An accumulation window is open.
        """
        table, names = self.context.table, self._parameter_names(model)
        local: dict[Key, torch.Tensor] = {}
        with ExitStack() as stack:
            for index, optimizer in enumerate(self.optimizers):
                mine = {p for group in optimizer.param_groups for p in group["params"]}
                if not any(table.tensor(table[key]) in mine for key in names):
                    continue
                optimizer.check_window("full_gradients")
                found = stack.enter_context(self.manager.full_gradients(index))
                by_key = {key: found.get(table.tensor(table[key])) for key in names}
                local.update({key: gradient for key, gradient in by_key.items() if gradient is not None})
            dtypes = self._agree_on_gradients(list(names), local)
            with whole_tensors(local, dtypes, self.context) as shown:
                yield {names[key]: tensor for key, tensor in shown.items()}

    def _parameter_names(self, model: nn.Module) -> dict[Key, str]:
        """Return the serial names of a model's parameters by their keys in the table, in serial order."""
        name = self.name_of(model)
        found: dict[Key, str] = {}
        for entry in self.context.table:
            mine = [path for owner, path in (entry.key, *entry.aliases) if owner == name]
            if mine and entry.kind == "parameter":
                found[entry.key] = mine[0]
        return found

    def _agree_on_gradients(
        self, keys: Sequence[Key], local: Mapping[Key, torch.Tensor]
    ) -> dict[Key, torch.dtype]:
        """Return the dtypes of the gradients that exist on some rank."""
        table, mesh = self.context.table, self.context.mesh
        exists = torch.tensor([float(key in local) for key in keys], device=mesh.device)
        if any(not is_everywhere(table[key], mesh.layout, mesh.rank) for key in keys):
            self.context.collectives.all_reduce(exists, mesh.everyone(), phase="whole", op="max").wait()
        return {
            key: torch.promote_types(table.tensor(table[key]).dtype, torch.float32)
            for key, flag in zip(keys, exists.tolist(), strict=True)
            if flag
        }

    def name_of(self, model: nn.Module) -> str:
        """Return the name of a boosted model, which may have been compiled before or since.

        Raises:
            UsageError: It was not boosted here.
        """
        for name, known in self.models.items():
            if bare(model) is bare(known):
                return name
        raise UsageError(
            f"this {type(model).__name__} was not boosted by this Booster, which has "
            f"{', '.join(self.models)}",
            hint="pass the model that boost() returned",
        )

    def close(self) -> None:
        """Wait for a save that is written beside training, and leave signals to others; collective."""
        self.saver.finish()
        if self.stopping is not None:
            self.stopping.close()

    def add_average(self, model: nn.Module, decay: float) -> Average:
        """Start a running average of a model; it is updated after real steps of the model's optimizers."""
        mine = set(model.parameters())
        table = self.context.table
        parameters = [(entry.name, parameter) for entry, parameter in table.parameters() if parameter in mine]

        def find_places() -> list[Place]:
            return [p for p in self.manager.kept_places() if table.tensor(table[p.key]) in mine]

        average = Average(find_places, decay, self.manager.publish_values, parameters)
        followed = {
            index
            for index, optimizer in enumerate(self.optimizers)
            if any(parameter in mine for group in optimizer.param_groups for parameter in group["params"])
        }
        self._followed.append(min(followed, default=0))
        self.averages.append((self.name_of(model), average))
        return average

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Tell observers about an error that leaves this context."""
        try:
            yield
        except Exception as error:
            self.observers.on_run_error(error, self.num_steps)
            raise

    def collect_non_finite(self, optimizer: int) -> list[str]:
        """Return the parameters with a non-finite gradient on any rank, in model order; all ranks call it.

        Where there are several models, their names come first, as in ``model_1.weight``.
        """
        mine = self.manager.non_finite(optimizer)
        found = {
            name for text in self.agreement.share("non-finite", "\n".join(mine)) for name in text.split("\n")
        }
        hit = [entry for entry in self.context.table if ".".join(entry.key) in found]
        return [entry.title for entry in hit]

    def handle_non_finite(self, names: Sequence[str]) -> None:
        """Lower the loss scale of fp16; else raise on every rank, unless the plan says to skip such steps.

        Raises:
            NonFiniteError: Naming the parameters.
        """
        self.context.collectives.ledger.end_step()
        if self.context.arrivals.loss_scale is not None:
            self.context.arrivals.loss_scale.note_overflow()
            return
        if self.context.plan.nonfinite == "skip":
            return
        shown = ", ".join(map(repr, names[:SHOWN_NAMES]))
        more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
        what = (
            f"the gradient of {shown}{more} is not finite"
            if names
            else "the gradient norm exceeds the range of fp64"
        )
        raise NonFiniteError(
            f"{what} in step {self.num_steps}; nothing was updated",
            hint="look at loss and batch of this step, lower the learning rate, or pass nonfinite='skip'",
        )

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse an optimizer over parameters that are not of the boosted models.

        Raises:
            UsageError: Naming the group and the shape.
        """
        self.context.table.check_groups(optimizer.param_groups)
