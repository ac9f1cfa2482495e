"""What a run needs to go on beside its tensors: schedulers, loaders, loss scale, weights, random state.

The one idea: each of these can say its state as plain values, and each of those is stored by the position of
its object in the ``boost`` call. Random state is the only one that differs between ranks: on the same layout
each rank gets its own back, on another one generators start anew from (seed, data coordinate, step).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from colossal_core.runtime.checkpointing.shards import plain_name, qualified_name
from colossal_core.runtime.checkpointing.values import pack_values, unpack_values
from colossal_core.runtime.draws import mix_seed
from colossal_core.runtime.randomness import read_states, reseed, write_states
from colossal_core.states import Blank

if TYPE_CHECKING:
    from colossal_core.runtime.engine import Engine

__all__ = [
    "collect_run_state",
    "matching_rank",
    "model_details",
    "optimizer_details",
    "optimizer_difference",
    "random_text",
    "restore_model_details",
    "restore_optimizer_details",
    "restore_random",
    "restore_run_state",
    "run_differences",
]


def collect_run_state(engine: Engine) -> dict[str, Any]:
    """Return the state of everything that is the same on all ranks."""
    scale, layout = engine.context.arrivals.loss_scale, engine.context.mesh.layout
    schedulers = [
        {"class": _kind(scheduler), "state": pack_values(scheduler.state_dict(), f"scheduler {index}")}
        for index, scheduler in enumerate(engine.schedulers)
    ]
    return {
        "layout": _layout_text(engine),
        "data_coordinates": [layout.data_coordinate(rank) for rank in range(layout.world_size)],
        "seed": engine.seed,
        "schedulers": schedulers,
        "loaders": [pack_values(loader.resume_position(), "loader") for loader in engine.loaders],
        "loss_scale": None if scale is None else pack_values(scale.state(), "loss scale"),
        "loss_weights": pack_values(engine.context.weights.state(), "loss weights"),
        "shares": pack_values(engine.shares.state(), "shares"),
    }


def restore_run_state(engine: Engine, state: Mapping[str, Any]) -> None:
    """Bring schedulers, loaders, loss scale and weights where they were; those that fit.

    Raises:
        UsageError: The position of a loader does not fit its dataset.
    """
    if not _scheduler_difference(engine, state):
        for scheduler, saved in zip(engine.schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(unpack_values(saved["state"]))
    if not _loader_difference(engine, state):
        for loader, position in zip(engine.loaders, state["loaders"], strict=True):
            loader.seek(unpack_values(position))
    scale = engine.context.arrivals.loss_scale
    if scale is not None and state["loss_scale"] is not None:
        scale.load_state(unpack_values(state["loss_scale"]))
    engine.context.weights.load_state(unpack_values(state["loss_weights"]))
    engine.shares.load_state(unpack_values(state["shares"]))


def run_differences(engine: Engine, state: Mapping[str, Any]) -> list[str]:
    """Return in words what of :func:`restore_run_state` would not be restored."""
    found = [_scheduler_difference(engine, state), _loader_difference(engine, state)]
    return [text for text in found if text]


def _scheduler_difference(engine: Engine, state: Mapping[str, Any]) -> str:
    """Return how the stored schedulers differ from those of the run; "" when they do not."""
    theirs = [saved["class"] for saved in state["schedulers"]]
    mine = [_kind(scheduler) for scheduler in engine.schedulers]
    return "" if theirs == mine else f"stored schedulers are {theirs}, boosted ones {mine}"


def _loader_difference(engine: Engine, state: Mapping[str, Any]) -> str:
    """Return how the stored loaders differ from those of the run; "" when they do not."""
    theirs, mine = len(state["loaders"]), len(engine.loaders)
    return "" if theirs == mine else f"positions of {theirs} loaders are stored, {mine} are boosted"


# --- objects ------------------------------------------------------------------------------------------------


def model_details(model: nn.Module) -> dict[str, Any]:
    """Return what modules of a model keep beside tensors (``get_extra_state``), by path."""
    return {
        "class": _kind(model),
        "extra_state": {
            plain_name(path): pack_values(module.get_extra_state(), f"the extra state of module {path!r}")
            for path, module in model.named_modules()
            if type(module).get_extra_state is not nn.Module.get_extra_state
        },
    }


def restore_model_details(model: nn.Module, details: Mapping[str, Any]) -> None:
    """Give modules back what they kept beside tensors."""
    modules = {plain_name(path): module for path, module in model.named_modules()}
    for path, state in details.get("extra_state", {}).items():
        if path in modules:
            modules[path].set_extra_state(unpack_values(state))


def optimizer_details(engine: Engine, index: int) -> dict[str, Any]:
    """Return the settings and step counts of an optimizer, and which states it has for each parameter."""
    optimizer, table = engine.optimizers[index], engine.context.table
    counters: dict[str, Any] = {}
    for parameter, state in engine.manager.counters(index).items():
        entry = table.entry_of(parameter)
        if entry is not None:
            name = qualified_name(engine, entry.key)
            counters[name] = {
                state_name: pack_values(value, f"state {state_name!r} of {name!r}")
                for state_name, value in state.items()
            }
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        entries = [table.entry_of(parameter) for parameter in group["params"]]
        settings = {key: value for key, value in group.items() if key not in {"params", "param_names"}}
        groups.append(
            {
                "params": [qualified_name(engine, entry.key) for entry in entries if entry is not None],
                "settings": pack_values(settings, f"parameter group {number} of the optimizer"),
            }
        )
    return {
        "class": _kind(optimizer.user),
        "groups": groups,
        "counters": counters,
        "skipped_steps": optimizer.skipped_steps,
        "stepped": optimizer.stepped,
        "grad_norm": pack_values(float(optimizer.grad_norm), "the gradient norm"),
    }


def optimizer_difference(engine: Engine, index: int, details: Mapping[str, Any]) -> str:
    """Return how a stored optimizer differs from the one of the run; "" when it does not."""
    optimizer = engine.optimizers[index]
    if details["class"] != _kind(optimizer.user):
        return f"optimizer {index} is stored as {details['class']}, this run has {_kind(optimizer.user)}"
    mine = [len(group["params"]) for group in optimizer.param_groups]
    theirs = [len(group["params"]) for group in details["groups"]]
    if len(mine) != len(theirs):
        text = f"optimizer {index} is stored with groups of {theirs} parameters, this one has {mine}"
        # Groups that are added while a run goes on are not there yet when it starts again.
        return f"{text}; call its add_param_group() for the others before load()" if mine < theirs else text
    return ""


def restore_optimizer_details(
    engine: Engine, index: int, details: Mapping[str, Any], states: Mapping[str, Mapping[str, torch.dtype]]
) -> None:
    """Bring settings and step counts back, and allocate the states; elements are filled in afterwards.

    Args:
        engine: The built pieces.
        index: Position of the optimizer in the ``boost`` call.
        details: From :func:`optimizer_details`, of all ranks together.
        states: For each parameter the states that are stored as tensors, with their dtype.
    """
    optimizer, table = engine.optimizers[index], engine.context.table
    for group, saved in zip(optimizer.param_groups, details["groups"], strict=True):
        for key, value in unpack_values(saved["settings"]).items():
            current = group.get(key)
            if isinstance(current, torch.Tensor) and isinstance(value, torch.Tensor):
                current.copy_(value)
            else:
                group[key] = value
    state: dict[torch.Tensor, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            entry = table.entry_of(parameter)
            if entry is None:
                continue
            name = qualified_name(engine, entry.key)
            found = {key: unpack_values(value) for key, value in details["counters"].get(name, {}).items()}
            found.update({key: Blank(dtype) for key, dtype in states.get(name, {}).items()})
            if found:
                state[parameter] = found
    engine.manager.load_state(index, state)
    optimizer.skipped_steps = int(details["skipped_steps"])
    optimizer.stepped = bool(details.get("stepped", False))  # earlier versions did not write it
    if optimizer.stepped:
        optimizer.user.__dict__["_opt_called"] = True  # schedulers look there for the order of calls
    optimizer.grad_norm = torch.tensor(unpack_values(details["grad_norm"]), dtype=torch.float64)


# --- random state -------------------------------------------------------------------------------------------


def random_text() -> str:
    """Return the random state of this rank as text."""
    return json.dumps(read_states())


def restore_random(engine: Engine, run: Mapping[str, Any], text: str | None, step: int) -> None:
    """Bring the generators of this rank where they were, or where they belong on a new layout.

    Args:
        engine: The built pieces.
        run: From :func:`collect_run_state`.
        text: From :func:`random_text` on the rank that :func:`matching_rank` names; None when there is none.
        step: Real steps that were taken.
    """
    if text is not None:
        write_states(json.loads(text))
        return
    layout = engine.context.mesh.layout
    seed = mix_seed("resumed on another layout", int(run["seed"]), step)
    reseed(seed, layout.data_coordinate(engine.context.mesh.rank))


def matching_rank(engine: Engine, run: Mapping[str, Any]) -> int | None:
    """Return whose random state this rank takes over; None when the global batch is divided otherwise now.

    Args:
        engine: The built pieces.
        run: From :func:`collect_run_state`.
    """
    layout, rank = engine.context.mesh.layout, engine.context.mesh.rank
    if run["layout"] == _layout_text(engine):
        return rank
    coordinates: list[int] = run["data_coordinates"]
    if max(coordinates) + 1 != layout.data_degree:
        return None
    return coordinates.index(layout.data_coordinate(rank))


def _layout_text(engine: Engine) -> str:
    """Return the axes and degrees of this run, outermost first."""
    return " ".join(f"{axis.name}={axis.degree}" for axis in engine.context.mesh.layout.axes)


def _kind(thing: object) -> str:
    """Return the name of a class; that of the user's where ``boost`` made a subclass of the same name."""
    return type(thing).__qualname__
