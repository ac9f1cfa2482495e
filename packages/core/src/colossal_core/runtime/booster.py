"""The Booster: a few lines in the user's own loop.

::

    launch()
    booster = Booster(precision="bf16", max_grad_norm=1.0)
    model, optimizer, scheduler = booster.boost(model, optimizer, scheduler)
    for batch in batches:
        loss = booster.forward_backward(model, batch, criterion)   # or criterion(model(x), y).backward()
        optimizer.step(); scheduler.step(); optimizer.zero_grad()
"""

from __future__ import annotations

import atexit
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, final, overload

import torch

from colossal_core.building import UNSET, Unset, build_plan
from colossal_core.errors import UsageError
from colossal_core.mesh import GroupSpec
from colossal_core.plugins import PluginSettings, Registry
from colossal_core.runtime.accumulation import WEIGHING
from colossal_core.runtime.agreement import Agreement
from colossal_core.runtime.batches import BatchDims, Weight, check_scalar, read_number
from colossal_core.runtime.boosting import build_engine
from colossal_core.runtime.companions import boost_companions
from colossal_core.runtime.gathering import gather
from colossal_core.runtime.launch import current_world, rendezvous_store
from colossal_core.runtime.loading import BatchMeaning, prepare_loaders
from colossal_core.runtime.objects import sort_objects
from colossal_core.runtime.optimizer import BoostedOptimizer
from colossal_core.runtime.rejoining import rejoin
from colossal_core.runtime.sources import Place
from colossal_core.runtime.state_calls import StateCalls
from colossal_core.runtime.trees import edited

if TYPE_CHECKING:
    from torch import nn

    from colossal_core.plan import Plan
    from colossal_core.plugins.observers import Observers
    from colossal_core.runtime.averages import Average
    from colossal_core.runtime.engine import Engine, Progress
    from colossal_core.runtime.ledger import Transfer

__all__ = ["Booster"]


@final
class Booster(StateCalls):
    """Puts the pieces of a plan together around the user's model and optimizer.

    Models and optimizers go into one ``boost`` call; schedulers and loaders may follow in later ones.
    """

    def __init__(
        self,
        *pieces: object,
        plan: Plan | Mapping[str, object] | str | Path | None = None,
        precision: str | torch.dtype | Unset = UNSET,
        max_grad_norm: float | Unset | None = UNSET,
        accumulate: int | Unset = UNSET,
        data: int | str | Unset = UNSET,
        keep_float32: Sequence[str] | Unset = UNSET,
        synchronise_batchnorm: bool | Unset = UNSET,
        nonfinite: str | Unset | None = UNSET,
        registry: Registry | None = None,
    ) -> None:
        """Make the plan; nothing is communicated, and no model is needed.

        Args:
            pieces: Option objects such as ``Zero(stage=1)``, or names such as ``"zero1"``; without a memory
                manager among them, ``Replicated()``.
            plan: A plan, a mapping, or the path of a TOML file. Pieces and settings then only add what it
                leaves open.
            precision: ``"fp32"`` unless the plan says otherwise; ``"fp64"``, ``"bf16"``, or the torch dtype.
            max_grad_norm: Clip the global gradient norm to this; None does not clip.
            accumulate: Calls of ``optimizer.step()`` in a gradient window.
            data: Number of data ranks, or ``"auto"``: all that the other axes leave.
            keep_float32: Patterns of names of modules that stay in fp32 under a 16-bit precision.
            synchronise_batchnorm: Whether batch statistics are those of the global batch.
            nonfinite: None raises for non-finite gradients, ``"skip"`` skips such steps.
            registry: Where pieces come from; by default every installed plugin that is enabled here.

        Raises:
            UsageError: The plan contradicts itself, or a name is unknown; lists everything that is wrong.
            PluginError: A plugin that the plan needs failed.
        """
        self.registry = _discover(plan) if registry is None else registry
        self.plan: Plan = build_plan(
            self.registry,
            pieces,
            plan=plan,
            precision=precision,
            max_grad_norm=max_grad_norm,
            accumulate=accumulate,
            data=data,
            keep_float32=keep_float32,
            synchronise_batchnorm=synchronise_batchnorm,
            nonfinite=nonfinite,
        )
        self.world = current_world()
        self._engine: Engine | None = None

    # --- set-up ---------------------------------------------------------------------------------------------

    def boost(self, *objects: Any, batch: BatchMeaning = "global", **named: Any) -> Any:
        """Cut, shard and wrap the objects as planned; collective over all ranks.

        Args:
            objects: Models, optimizers, schedulers, data loaders, criteria, or None, in any order; in a later
                call schedulers and loaders only.
            batch: Whether the ``batch_size`` of loaders, or a list of a batch sampler, is the global batch or
                one rank's part of it.
            named: The same as ``objects``, with names: ``generator=g``.

        Returns:
            What was given, in that order, one object alone. Models are the same objects, changed in place;
            optimizers, schedulers and loaders are new objects over the user's.

        Raises:
            ColossalError: Something does not fit; raised on every rank, with the objects unchanged.
        """
        is_first = self._engine is None
        agreement = Agreement(rendezvous_store(), self.world.rank, self.world.world_size)
        found = agreement.attempt("boost", lambda: sort_objects(objects, named, is_first=is_first))
        place = Place(degree=self.data_degree, index=self.data_rank)
        loaders = prepare_loaders(found.loaders, batch=batch, place=place, agreement=agreement)
        replaced: dict[int, Any] = {}
        if self._engine is None:
            self.registry.observers.before_run_started(self.plan)
            self._engine = engine = build_engine(found, self.plan, self.registry, self.world, agreement)
            for index, optimizer in enumerate(found.optimizers):
                boosted = BoostedOptimizer(optimizer, engine, index)
                engine.optimizers.append(boosted)
                replaced[found.position(optimizer)] = boosted
            # Not a method of this object: models would stay in memory until the interpreter ends.
            atexit.register(_finish_run, self.registry.observers, engine.progress)
        replaced.update(boost_companions(found, loaders, self._engine, self.world))
        results = tuple(replaced.get(index, thing) for index, thing in enumerate(found.order))
        return results[0] if len(results) == 1 else results

    def release(self, model: nn.Module) -> nn.Module:
        """Give the models back as plain ones, in the dtype that they compute in, and return ``model``.

        All models and optimizers of the ``boost`` call are released; parameters own their memory again, and
        the user's own optimizers go on where the boosted ones stopped. Collective over all ranks.
        """
        engine = self._built("release")
        engine.name_of(model)
        engine.close()
        for handle in engine.handles:
            handle.remove()
        engine.manager.detach()
        for optimizer in engine.optimizers:
            optimizer.release()
        rejoin(engine.context, [optimizer.user for optimizer in engine.optimizers])
        for undo in reversed(engine.context.undo):
            undo()
        self._engine = None
        return model

    # --- a step ---------------------------------------------------------------------------------------------

    def forward_backward(
        self,
        model: nn.Module,
        batch: Any,
        criterion: Callable[..., torch.Tensor] | None = None,
        *,
        weight: Weight = None,
        batch_dims: BatchDims = None,
    ) -> torch.Tensor:
        """Run forward and backward on this rank's share of a batch.

        Gradients become those of the mean loss over the global batch, whatever the shares. The weight of a
        share in that mean is, the first that applies: ``weight``; targets that a torch loss counts, or
        labels that count where the model accepts ``num_items_in_batch``; the number of samples.

        Args:
            model: A boosted model.
            batch: ``(inputs, target)``, inputs being a tensor, a tuple of arguments or a mapping of keyword
                arguments; or one mapping, whose items are keyword arguments and which is the criterion's
                second argument.
            criterion: ``criterion(outputs, target) -> loss``; None when the outputs carry a ``loss``.
            weight: Weight of this share: a number, or a function of the batch.
            batch_dims: The dim of samples of inputs and targets that do not have them in dim 0, by keyword,
                name of a parameter of the model's forward, or ``"target"``; None for what every sample needs
                as a whole, such as positions or ``cu_seqlens``. Read where micro-batches are cut and
                samples are counted.

        Returns:
            The mean loss over the global batch: 0-d, fp32, detached, the same on every rank.

        Raises:
            UsageError: The batch, the criterion or the loss is not as described.
            RankMismatchError: It is so on another rank.
        """
        engine = self._built("forward_backward")
        engine.name_of(model)
        with engine.reporting():
            if engine.shares.current is None:
                engine.begin_iteration()
            return engine.executor.run(model, batch, criterion, weight, batch_dims)

    def backward(
        self,
        loss: torch.Tensor,
        *,
        weight: float | None = None,
        retain_graph: bool = False,
        create_graph: bool = False,
    ) -> None:
        """Run backward from a loss that the user computed: the explicit form of ``loss.backward()``.

        Needed under fp16 for gradient penalties, losses on sub-modules and penalties on parameters, since it
        scales the loss itself; right, and never needed, under every other precision.

        Args:
            loss: This rank's loss, a scalar.
            weight: What it counts in the mean over the data ranks; by default what it counts in the plain
                loop: the rows that a boosted loader gave last. With a weight the call is collective.
            retain_graph: As in torch.
            create_graph: As in torch.

        Raises:
            UsageError: The loss is no scalar that requires gradients, or the weights sum to zero.
        """
        engine = self._built("backward")
        check_scalar(loss)
        arrivals = engine.context.arrivals
        factor = arrivals.scale if weight is None else arrivals.scale * self._relative_weight(weight)
        with engine.reporting(), arrivals.weighed(arrivals.weight if weight is None else 1.0):
            (loss * factor).backward(retain_graph=retain_graph, create_graph=create_graph)

    @overload
    def evaluate(
        self,
        model: nn.Module,
        batch: Any,
        criterion: Callable[..., torch.Tensor] | None = None,
        *,
        return_outputs: Literal[False] = False,
        batch_dims: BatchDims = None,
    ) -> torch.Tensor: ...

    @overload
    def evaluate(
        self,
        model: nn.Module,
        batch: Any,
        criterion: Callable[..., torch.Tensor] | None = None,
        *,
        return_outputs: Literal[True],
        batch_dims: BatchDims = None,
    ) -> tuple[torch.Tensor, Any]: ...

    def evaluate(
        self,
        model: nn.Module,
        batch: Any,
        criterion: Callable[..., torch.Tensor] | None = None,
        *,
        return_outputs: bool = False,
        batch_dims: BatchDims = None,
    ) -> torch.Tensor | tuple[torch.Tensor, Any]:
        """Evaluate on this rank's share of a batch: evaluation mode, no gradients, modes restored afterwards.

        Args:
            model: A boosted model.
            batch: As for :meth:`forward_backward`.
            criterion: As for :meth:`forward_backward`.
            return_outputs: Also return the outputs of this data rank's samples.
            batch_dims: As for :meth:`forward_backward`.

        Returns:
            The mean loss over the global batch: 0-d, fp32, the same on every rank; with ``return_outputs`` a
            pair of it and the outputs.

        Raises:
            UsageError: The batch, the criterion or the loss is not as described.
            RankMismatchError: It is so on another rank.
        """
        engine = self._built("evaluate")
        engine.name_of(model)
        with engine.reporting():
            loss, outputs = engine.executor.evaluate(
                model, batch, criterion, wants_outputs=return_outputs, batch_dims=batch_dims
            )
            return (loss, engine.context.crossing.complete(outputs)) if return_outputs else loss

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Launch no reduction from inside backward in this context: more passes follow before ``step()``.

        Results are the same without it; it saves traffic where the number of backward passes changes from
        step to step.
        """
        with self._built("no_sync").manager.hold():
            yield

    def mean(self, value: float | torch.Tensor, weight: float = 1.0) -> float:
        """Return the weighted mean, a float, over the ranks that bring different samples; collective.

        Args:
            value: This rank's number, or tensor of one element.
            weight: Its weight, at least 0. Means over rows weigh by :attr:`rows`, which does not count
                stand-ins, see :meth:`gather`.
        """
        engine = self._built("mean")
        axes = tuple(axis.name for axis in engine.context.mesh.layout.axes if axis.divides_batch)
        pair = torch.tensor([read_number(value), 1.0], dtype=torch.float64, device=self.world.device) * weight
        group = engine.context.mesh.group(GroupSpec(axes))
        engine.context.collectives.all_reduce(pair, group, phase="metrics").wait()
        total, weights = pair.tolist()
        if not weights > 0:
            raise UsageError(
                f"the weights of all ranks sum to {weights}", hint="give at least one a positive weight"
            )
        return float(total / weights)

    def gather(self, tree: Any) -> Any:
        """Return what all data ranks have, in the order of the dataset, without stand-ins; collective.

        Rows (dim 0) are put together. Values of the batch that a boosted loader gave last, and values kept
        from all batches of the loop so far, are recognised by their number of rows: a sample that only stands
        in for an empty share is left out, and many batches come batch by batch. Anything else is put together
        in rank order, and refused where stand-ins may be in it. Without a boosted loader, rows come in rank
        order.

        Args:
            tree: Dense tensors of any dtype, and lists of numbers or texts with one item for each sample, in
                mappings, lists, tuples and dataclasses; None stays. A 0-d tensor becomes 1-D, an item for
                each rank whose share is not empty. Dtypes and dims but dim 0 are equal on all ranks.

        Returns:
            The same tree on every rank, without graphs, each tensor on the device where it was.

        Raises:
            UsageError: A leaf is something else, or rows cannot be told from stand-ins.
            RankMismatchError: Ranks have different trees, dtypes or shapes.
        """
        engine = self._built("gather")
        return gather(tree, engine.context, engine.shares, engine.agreement)

    @contextmanager
    def full_parameters(self, model: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
        """Show every parameter of a model whole, by serial name, on every rank; collective.

        Edits and assigned tensors are kept; they have to be the same on all ranks.
        """
        engine = self._built("full_parameters")
        engine.name_of(model)
        with engine.full_parameters(model) as found, edited(found) as shown:
            yield shown

    @contextmanager
    def full_gradients(self, model: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
        """Show reduced gradients whole, by serial name, between backward and ``step()``; collective.

        They are what ``p.grad`` would be on one process: averages, before clipping, without the loss scale,
        in fp32 at least. Edits are kept, and have to be the same on all ranks. Parameters without a gradient
        are left out.

        Args:
            model: A boosted model.

        Raises:
            UsageError: An accumulation window is open: its gradients are not complete.
        """
        engine = self._built("full_gradients")
        engine.name_of(model)
        with engine.full_gradients(model) as found, edited(found) as shown:
            yield shown

    def average(self, model: nn.Module, decay: float) -> Average:
        """Return a running average of a model's parameters that follows every real step from now on.

        It is sharded as the model is. ``with average.applied():`` evaluates with it.

        Args:
            model: A boosted model.
            decay: Weight of the past, e.g. 0.999.
        """
        engine = self._built("average")
        engine.name_of(model)
        return engine.add_average(model, decay)

    # --- where this rank is ---------------------------------------------------------------------------------

    @property
    def data_degree(self) -> int:
        """Into how many shares the global batch is divided."""
        return self.plan.layout(self.world.world_size).data_degree

    @property
    def data_rank(self) -> int:
        """Which share of the global batch this rank brings, in ``[0, data_degree)``."""
        return self.plan.layout(self.world.world_size).data_coordinate(self.world.rank)

    @property
    def rows(self) -> int:
        """Rows that count in the batch that a boosted loader gave this rank last; 0 for a stand-in.

        The weight of a mean over the rows of this rank: ``booster.mean(loss, weight=booster.rows)``.

        Raises:
            UsageError: No loop over a boosted loader runs.
        """
        return self._built("rows").shares.count_rows()

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0: the one that prints and writes."""
        return self.world.rank == 0

    def print(self, *values: Any, **options: Any) -> None:
        """Print on rank 0 only."""
        if self.is_first:
            print(*values, **options)  # noqa: T201 - that is what it is for

    # --- reports --------------------------------------------------------------------------------------------

    def describe(self) -> str:
        """Return the effective plan, and what a loss weighs, as lines of ``key = value  (origin)``."""
        weighing = WEIGHING if self._engine is None else self._engine.context.weights.describe()
        rows = [*self.plan.rows(), ("loss weight", *weighing)]
        return "\n".join(f"{key} = {value}  ({origin})" for key, value, origin in rows)

    def report(self) -> dict[str, Any]:
        """Return what this rank holds and what the last step moved.

        Returns:
            ``memory``: bytes by category; ``traffic``: words received in the last step, by group and phase;
            and what the memory manager adds, as ``gemini`` does of its tiers.
        """
        engine = self._built("report")
        memory: dict[str, int] = {}
        for place in engine.manager.places():
            category = place.state if place.state in {"value", "master", "gradient"} else "optimizer state"
            memory[category] = memory.get(category, 0) + place.tensor.numel() * place.tensor.element_size()
        traffic: dict[str, float] = {}
        for transfer in self.last_traffic:
            key = f"{transfer.group} {transfer.phase}"
            traffic[key] = traffic.get(key, 0.0) + transfer.received_words
        return {"memory": memory, "traffic": traffic, **engine.manager.report()}

    @property
    def last_traffic(self) -> tuple[Transfer, ...]:
        """Every transfer of the last step, in order."""
        return self._built("last_traffic").context.collectives.ledger.last_step

    # --- internals ------------------------------------------------------------------------------------------

    def _built(self, name: str) -> Engine:
        """Return the engine, or say that ``boost`` comes first."""
        if self._engine is None:
            raise UsageError(
                f"{name} needs a boosted model", hint="call booster.boost(model, optimizer) first"
            )
        return self._engine

    def _relative_weight(self, weight: float) -> float:
        """Return what a loss of some weight counts, as a factor of the plain mean over ranks; collective.

        Where the plan accumulates, it counts among the micro-batches of the window as well.
        """
        # A weight that cannot be travels as NaN, so that every rank finds out.
        mean = self.mean(weight if weight >= 0 else math.nan)
        if not mean > 0:
            raise UsageError(
                f"weight {weight} has a mean of {mean} over the ranks",
                hint="give each rank a weight of at least 0, and one of them more than that",
            )
        total = torch.full((), mean * self.data_degree, dtype=torch.float64, device=self.world.device)
        ratio = self._built("backward").context.weights.ratio(total)
        return weight / mean * (1.0 if ratio is None else float(ratio))


def _finish_run(observers: Observers, progress: Progress) -> None:
    """Tell observers at exit that the run has ended well."""
    failed = "last_value" in vars(sys)  # the interpreter keeps an error that ended the script there
    if not failed:
        observers.after_run_finished({"steps": progress.num_steps})


def _discover(plan: object) -> Registry:
    """Find the plugins; a plan file that was named switches them, before the project does."""
    file = Path(plan) if isinstance(plan, (str, Path)) else None
    return Registry.discover(PluginSettings.read(plan_file=file), load_local=True)
