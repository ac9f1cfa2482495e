"""``boost``: propose, then apply.

The one idea: everything that can be wrong is found before the user's objects change, and on every rank:
errors of one rank travel through the rendezvous store, never through a collective that the others might not
reach. Then the pieces are put together in one order: mesh, strategies outermost first, memory manager,
executor.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import json
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from attrs import frozen

from colossal_core.errors import CapabilityError, PluginError, UsageError
from colossal_core.interfaces import (
    AbstractBorder,
    AbstractExecutor,
    AbstractMemoryManager,
    AbstractStrategy,
    Proposal,
)
from colossal_core.mesh import GroupSpec, MeshLayout
from colossal_core.plugins.agreement import explain_disagreement
from colossal_core.runtime.accumulation import LossWeights
from colossal_core.runtime.agreement import Agreement
from colossal_core.runtime.arrivals import Arrivals
from colossal_core.runtime.batchnorm import install_batchnorms, needs_batchnorms
from colossal_core.runtime.borders import hook_border
from colossal_core.runtime.collectives import Collectives
from colossal_core.runtime.context import Context
from colossal_core.runtime.copies import refuse_copies
from colossal_core.runtime.engine import Engine
from colossal_core.runtime.executor import PlainExecutor
from colossal_core.runtime.grouping import notice_unfrozen
from colossal_core.runtime.launch import rendezvous_store
from colossal_core.runtime.ledger import Ledger
from colossal_core.runtime.loss_scale import LossScale, ScaleBorder
from colossal_core.runtime.materialise import allocate_rest, draw_blueprints, initialise, move_model
from colossal_core.runtime.mesh import CONTROL, GRADIENTS, PARAMETERS, Mesh
from colossal_core.runtime.objects import Objects, check_model, mark_boosted
from colossal_core.runtime.optimizers import optimizer_spec
from colossal_core.runtime.precision import CastBorder, Precision, inner_borders
from colossal_core.runtime.randomness import settle_randomness
from colossal_core.runtime.standstill import Standstill
from colossal_core.runtime.table import ParameterTable, check_groups

if TYPE_CHECKING:
    from colossal_core.plan import Plan, PlannedPiece
    from colossal_core.plugins import Registry
    from colossal_core.runtime.launch import World

__all__ = ["build_engine"]

PATIENCE_SECONDS = 3600.0
"""How long a rank waits for others whose disks are slower."""


@frozen(kw_only=True)
class _Proposed:
    """The outcome of the pure half.

    Attributes:
        layout: Axes of the run.
        table: Serial entries.
        strategies: Strategies with their names and proposals, in order of application.
        manager: The memory manager, not attached yet.
        precision: Dtypes.
        needs_batchnorms: Whether BatchNorms have to be replaced.
    """

    layout: MeshLayout
    table: ParameterTable
    strategies: tuple[tuple[str, AbstractStrategy, Proposal], ...]
    manager: AbstractMemoryManager
    precision: Precision
    needs_batchnorms: bool


def build_engine(
    objects: Objects, plan: Plan, registry: Registry, world: World, agreement: Agreement
) -> Engine:
    """Check everything on every rank, then cut the models and attach the memory manager; collective.

    Args:
        objects: What ``boost`` was given.
        plan: The plan.
        registry: Where pieces and observers come from.
        world: The place of this process.
        agreement: How ranks compare before they communicate.

    Raises:
        ColossalError: The objects, the plan or the ranks do not fit; on every rank, and with nothing changed
            unless a strategy fails while it cuts.
    """
    agreement.compare("plugins and versions", registry.agreement_lines(), explain_disagreement)
    rows = [f"{key} = {value}" for key, value, _ in plan.rows()]
    agreement.compare("the plan", [*rows, f"digest {plan.digest()}"], explain_disagreement)
    proposed = agreement.attempt("boost", lambda: _propose(objects, plan, registry, world))
    lines = [*proposed.table.agreement_lines(), *_optimizer_lines(objects, proposed.table)]
    agreement.compare("the model", lines, explain_disagreement)
    agreement.compare("the groups of strategies", _group_lines(proposed), explain_disagreement)

    blueprints = agreement.attempt("boost", lambda: draw_blueprints(objects.models, world.device))
    for model in objects.models.values():
        move_model(model, world.device)
    mesh = Mesh(proposed.layout, world.rank, world.device)
    ledger = Ledger()
    context = Context(
        mesh=mesh,
        table=proposed.table,
        collectives=Collectives(ledger, standstill=Standstill.watch(rendezvous_store(), world.rank, ledger)),
        plan=plan,
        precision=proposed.precision,
        agreement=agreement,
        arrivals=Arrivals(LossScale() if plan.precision == "fp16" else None),
        weights=LossWeights(num_optimizers=len(objects.optimizers), is_active=plan.accumulate > 1),
    )
    _make_equal(context, agreement)
    _apply(objects, proposed, context, agreement)
    _create_groups(proposed.manager, context, agreement, len(objects.optimizers))
    proposed.manager.attach(objects.models, objects.optimizers, context)
    if blueprints:
        allocate_rest(context.table, world.device, context.precision.dtypes(objects.models.values()))
    borders = [strategy.borders(objects.models, context) for _, strategy, _ in proposed.strategies]
    executor = _choose_executor(proposed, context) or PlainExecutor(
        context, agreement, drop_gradients=proposed.manager.drop_gradients
    )
    engine = Engine(
        context=context,
        manager=proposed.manager,
        executor=executor,
        models=objects.models,
        agreement=agreement,
        patient=Agreement(rendezvous_store(), world.rank, world.world_size, timeout_seconds=PATIENCE_SECONDS),
        observers=registry.observers,
    )
    _install_borders(engine, borders)
    for model in objects.models.values():
        engine.handles.extend(notice_unfrozen(model, engine))
    partial = {context.table.tensor(entry) for entry in engine.partial_entries()}
    for model in objects.models.values() if partial else ():
        engine.handles.extend(refuse_copies(model, partial, "only parts of it"))
    context.undo.append(mark_boosted(objects.models.values()))
    engine.seed = settle_randomness(proposed.layout, world.rank, agreement)
    agreement.attempt("initialise", lambda: initialise(engine, blueprints))
    if blueprints:
        proposed.manager.publish_values()
    return engine


def _propose(objects: Objects, plan: Plan, registry: Registry, world: World) -> _Proposed:
    """Decide everything without changing or communicating anything."""
    layout = plan.layout(world.world_size)
    for name, model in objects.models.items():
        check_model(name, model)
    table = ParameterTable.serial(objects.models, layout)
    owners: dict[torch.Tensor, int] = {}
    for index, optimizer in enumerate(objects.optimizers):
        optimizer_spec(optimizer)
        _check_owners(table, optimizer, index, owners)
    precision = Precision(plan.precision, tuple(plan.keep_float32))
    precision.dtypes(objects.models.values())
    strategies = []
    for piece in plan.strategies:
        strategy: AbstractStrategy = _make(piece, AbstractStrategy)
        strategy.connect(registry)
        proposal = strategy.propose(objects.models, plan, layout, world.rank)
        for finding in proposal.findings:
            if finding.severity == "error":
                raise UsageError(finding.message, hint=finding.hint, code=finding.code)
            if world.rank == 0:
                warnings.warn(f"{piece.record.name}: {finding.message}", stacklevel=6)
        for key in proposal.cuts:
            table[key]  # raises for a name that no model has
        _refuse_partial_shapes(objects, table, piece.name, proposal)
        strategies.append((piece.name, strategy, proposal))
    manager: AbstractMemoryManager = _make(plan.memory, AbstractMemoryManager)
    manager.check(plan, table)
    return _Proposed(
        layout=layout,
        table=table,
        strategies=tuple(strategies),
        manager=manager,
        precision=precision,
        needs_batchnorms=needs_batchnorms(objects.models, plan, layout),
    )


def _make(piece: PlannedPiece, interface: type) -> Any:
    """Import the implementation of a piece and build it with its options.

    Raises:
        PluginError: It is not of the kind that its record says.
    """
    kind = piece.record.target.load()
    if not (isinstance(kind, type) and issubclass(kind, interface)):
        raise PluginError(
            f"{piece.qualified_name} names {piece.record.target} as its implementation, which is no "
            f"{interface.__name__}",
            hint="correct the target in the plugin's record",
        )
    build: Callable[[object], object] = kind
    return build(piece.options)


def _refuse_partial_shapes(objects: Objects, table: ParameterTable, name: str, proposal: Proposal) -> None:
    """Refuse to cut a parameter whose optimizer needs to see it whole; it would compute something else.

    Raises:
        CapabilityError: Naming the parameter, the strategy and the optimizer.
    """
    cut = {
        table[key].key
        for key, parts in proposal.cuts.items()
        if any(part.box.size != table[key].shape for part in parts)
    }
    for optimizer in objects.optimizers:
        if optimizer_spec(optimizer).shapes == "flat":
            continue
        for parameter in itertools.chain(*(group["params"] for group in optimizer.param_groups)):
            entry = table.entry_of(parameter)
            if entry is not None and entry.key in cut and entry.trainable:
                raise CapabilityError(
                    f"optimizer {type(optimizer).__name__} needs whole parameters, "
                    f"and strategy {name!r} cuts {entry.title!r} of shape {entry.shape}",
                    hint="use an elementwise optimizer such as AdamW for this parameter",
                )


def _group_lines(proposed: _Proposed) -> list[str]:
    """Describe the groups of all strategies, which all ranks create in this order."""
    return [
        f"strategy {name} group {number}: {spec.axes} {'whole' if spec.blocks is None else spec.blocks}"
        for name, _, proposal in proposed.strategies
        for number, spec in enumerate(proposal.groups)
    ]


def _apply(objects: Objects, proposed: _Proposed, context: Context, agreement: Agreement) -> None:
    """Replace BatchNorms, let each strategy cut, and close the table.

    Raises:
        ColossalError: A strategy failed, or wrote what cannot be; on every rank.
    """
    if proposed.needs_batchnorms:
        install_batchnorms(objects.models, context)
    for name, strategy, proposal in proposed.strategies:
        for spec in proposal.groups:
            context.mesh.group(spec)
        cut = functools.partial(_cut, name, strategy, proposal, objects, context)
        agreement.attempt(f"strategy {name}", cut)
    proposed.table.close()


def _cut(
    name: str, strategy: AbstractStrategy, proposal: Proposal, objects: Objects, context: Context
) -> None:
    """Let one strategy cut, and check what it wrote into the table.

    Raises:
        PluginError: It changed the entry of a parameter that it had not proposed to cut.
        UsageError: Groups in the table contradict each other.
    """
    table = context.table
    before = {entry.key: entry for entry in table}
    strategy.apply(objects.models, proposal, context)
    proposed = {table[key].key for key in proposal.cuts}
    for entry in table:
        if entry is before[entry.key]:
            continue
        if entry.key not in proposed:
            raise PluginError(
                f"strategy {name!r} cut {entry.name!r} without having proposed it",
                hint="name it in Proposal.cuts: what is refused before anything changes depends on that",
            )
        check_groups(entry, table.layout, context.mesh.rank)


def _choose_executor(proposed: _Proposed, context: Context) -> AbstractExecutor | None:
    """Return the executor that a strategy brings, or None.

    Raises:
        UsageError: Several bring one.
    """
    found = {name: strategy.executor(context, proposed.manager) for name, strategy, _ in proposed.strategies}
    brought = {name: executor for name, executor in found.items() if executor is not None}
    if len(brought) > 1:
        raise UsageError(
            f"strategies {', '.join(map(repr, brought))} each bring their own way to run a step",
            hint="keep one of them",
        )
    return next(iter(brought.values()), None)


def _check_owners(
    table: ParameterTable, optimizer: torch.optim.Optimizer, index: int, owners: dict[torch.Tensor, int]
) -> None:
    """Refuse foreign parameters, and parameters that two optimizers share."""
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            entry = table.entry_of(parameter)
            if entry is None:
                raise UsageError(
                    f"parameter group {number} of {type(optimizer).__name__} holds a parameter of shape "
                    f"{tuple(parameter.shape)} that belongs to none of the models",
                    hint="build the optimizer from the parameters of the models that you pass to boost",
                )
            if owners.setdefault(parameter, index) != index:
                raise UsageError(
                    f"parameter {entry.title!r} is in two optimizers",
                    hint="give each parameter to one optimizer",
                )


def _optimizer_lines(objects: Objects, table: ParameterTable) -> list[str]:
    """Describe the optimizers for the comparison between ranks."""
    lines = []
    for optimizer in objects.optimizers:
        for number, group in enumerate(optimizer.param_groups):
            entries = [table.entry_of(parameter) for parameter in group["params"]]
            names = ",".join(".".join(entry.key) for entry in entries if entry is not None)
            digest = hashlib.sha256(names.encode()).hexdigest()[:12]
            lines.append(
                f"{type(optimizer).__name__} group {number}: {len(entries)} parameters, order {digest}"
                f"{_describe_settings(group)}"
            )
    return lines


def _describe_settings(group: Mapping[str, Any]) -> str:
    """Describe the settings of a parameter group: with another learning rate a rank would drift away."""
    plain = {
        key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in group.items()
    }
    return "".join(
        f", {key} {value!r}"
        for key, value in sorted(plain.items())
        if key != "params" and isinstance(value, bool | int | float | str | tuple | None)
    )


def _make_equal(context: Context, agreement: Agreement) -> None:
    """Check that all ranks start from equal values; else take the first rank's, and say so once."""
    found = [(entry, context.table.tensor(entry)) for entry in context.table]
    tensors = [(entry, tensor) for entry, tensor in found if not tensor.is_meta]
    digests = agreement.share("values", _digest([tensor for _, tensor in tensors]))
    if len(set(digests)) == 1:
        return
    different = [rank for rank, digest in enumerate(digests) if digest != digests[0]]

    def warn_once() -> None:
        if context.mesh.rank == 0:
            warnings.warn(
                f"ranks {different} were built with other values than rank 0; the values of rank 0 are used. "
                "Build models after launch(), which seeds all ranks alike, and before any boost(): from then "
                "on random numbers depend on the rank's share of the batch.",
                stacklevel=6,  # the line that calls boost()
            )

    agreement.attempt("warn of values", warn_once)  # a filter may turn it into an error, on rank 0 alone
    everyone = context.mesh.everyone()
    for _, tensor in tensors:
        if tensor.numel():
            flat = tensor.detach().contiguous().reshape(-1)
            context.collectives.broadcast(flat.view(torch.uint8), everyone, source=0, phase="setup").wait()
            tensor.detach().copy_(flat.view(tensor.shape))


def _digest(tensors: list[torch.Tensor]) -> str:
    """Hash the bytes of tensors."""
    found = hashlib.sha256()
    for tensor in tensors:
        flat = tensor.detach().contiguous().cpu().reshape(-1)
        if flat.numel():
            # The bytes in place, as torch offers them only through numpy, which it does not require.
            found.update((ctypes.c_char * flat.nbytes).from_address(flat.data_ptr()))
    return found.hexdigest()


def _create_groups(
    manager: AbstractMemoryManager, context: Context, agreement: Agreement, num_optimizers: int
) -> None:
    """Create every group that any rank's table or memory manager asks for, in one order on all ranks.

    Creating a process group is collective over the world, but ranks may hold different parameters.
    """
    sums = {
        spec for entry in context.table for spec in (entry.reduce, *(part.sum_over for part in entry.parts))
    }
    divisions = _of_all_ranks(manager.groups(context.table), agreement)
    context.mesh.everyone()
    for channel in (CONTROL, PARAMETERS):
        for spec in divisions:
            context.mesh.group(spec, channel)
    reductions = (*_of_all_ranks(sums, agreement), *divisions)
    for index in range(num_optimizers):
        for spec in reductions:
            context.mesh.group(spec, f"{GRADIENTS}.{index}")


def _of_all_ranks(specs: Iterable[GroupSpec], agreement: Agreement) -> list[GroupSpec]:
    """Return the groups that any rank names, in the same order on all ranks."""
    texts = agreement.share("groups", json.dumps([[spec.axes, spec.blocks] for spec in specs if spec.axes]))
    found: dict[str, GroupSpec] = {}
    for text in texts:
        for axes, blocks in json.loads(text):
            as_tuples = (
                None if blocks is None else tuple(tuple(tuple(place) for place in block) for block in blocks)
            )
            found[json.dumps([axes, blocks])] = GroupSpec(tuple(axes), as_tuples)
    return [spec for _, spec in sorted(found.items())]


def _install_borders(engine: Engine, borders: list[Mapping[str, AbstractBorder]]) -> None:
    """Hook the border of the precision, outermost, and the borders of the strategies."""
    precision, loss_scale = engine.context.precision, engine.context.arrivals.loss_scale
    for name, model in engine.models.items():
        if loss_scale is not None:
            engine.handles.extend(hook_border(model, ScaleBorder(loss_scale)))
        elif precision.is_narrow:
            engine.handles.extend(hook_border(model, CastBorder(precision.compute, torch.float32)))
        elif precision.name == "fp64" and _was_narrower(engine.context.table, name):
            engine.handles.extend(hook_border(model, CastBorder(torch.float64, torch.float64)))
        for module, cast in inner_borders(model, precision):
            engine.handles.extend(hook_border(module, cast))
        for found in borders:
            border = found.get(name)
            if border is not None:
                engine.handles.extend(hook_border(model, border))


def _was_narrower(table: ParameterTable, model: str) -> bool:
    """Whether a model was built in less than fp64, as its inputs then are."""
    return any(
        entry.model == model and entry.kind == "parameter" and entry.dtype in {torch.float32, torch.bfloat16}
        for entry in table
    )
