"""Models from the ``meta`` device: cut and divided before they have memory, then initialised box by box.

The one idea: a module initialises itself alone, in serial shapes, from a seed of its own (of the run and its
path), and each rank keeps the boxes that it holds. So a model needs no more memory than its plan says and one
module, and has the same values at any number of ranks under any plan.

Values differ from those of the same model built with memory, where all modules draw from one generator, one
after the other.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from attrs import frozen
from torch import nn

from colossal_core.errors import CapabilityError
from colossal_core.runtime.draws import mix_seed

if TYPE_CHECKING:
    from colossal_core.runtime.checkpointing.shards import Holding
    from colossal_core.runtime.engine import Engine
    from colossal_core.runtime.table import Entry, ParameterTable

__all__ = ["Blueprint", "allocate_rest", "draw_blueprints", "initialise", "move_model", "take_meta"]


@frozen(kw_only=True, eq=False)
class Blueprint:
    """A module of a serial model that has tensors without memory.

    Attributes:
        model: Name of the model.
        path: Path of the module in it.
        twin: A copy without children, on the ``meta`` device.
        run: Initialises the twin, once that has memory.
        device: Where.
    """

    model: str
    path: str
    twin: nn.Module
    run: Callable[[nn.Module], object]
    device: torch.device

    def build(self, seed: int) -> dict[str, torch.Tensor]:
        """Return all tensors of the module, initialised, by name in the model.

        Args:
            seed: Seed of the run.
        """
        built = copy.deepcopy(self.twin).to_empty(device=self.device, recurse=False)
        tensors = [*built.named_parameters(recurse=False), *built.named_buffers(recurse=False)]
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            for _, tensor in tensors:
                _mark(tensor)
            torch.manual_seed(mix_seed("initialise", seed, self.path))
            self.run(built)
        tensors = [*built.named_parameters(recurse=False), *built.named_buffers(recurse=False)]
        for name, tensor in tensors:
            if _is_marked(tensor):
                raise CapabilityError(
                    f"{name!r} of {type(built).__name__} {self.path!r} has no values after the module was "
                    "initialised",
                    hint="let reset_parameters() of that module set it, or build the model with memory",
                )
        return {f"{self.path}.{name}" if self.path else name: tensor for name, tensor in tensors}


def draw_blueprints(models: Mapping[str, nn.Module], device: torch.device) -> list[Blueprint]:
    """Return the modules that have tensors on the ``meta`` device, before anything is cut.

    Args:
        models: Models by name.
        device: Where they will live.

    Raises:
        CapabilityError: A module cannot initialise itself.
    """
    found = []
    for name, model in models.items():
        of_model = getattr(model, "_init_weights", None)
        for path, module in model.named_modules():
            own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
            without = [tensor_name for tensor_name, tensor in own if tensor.is_meta]
            if not without:
                continue
            run = _initialiser(module, of_model)
            if run is None:
                raise CapabilityError(
                    f"{type(module).__name__} {path!r} of {name} has {without[0]!r} on the meta device, "
                    "and no reset_parameters() that would give it values",
                    hint="define reset_parameters() on that module, or build the model with memory",
                )
            twin = copy.copy(module)
            twin._modules = {}  # noqa: SLF001 - a copy of the module alone
            twin = copy.deepcopy(twin)
            found.append(Blueprint(model=name, path=path, twin=twin, run=run, device=device))
    return found


def _initialiser(module: nn.Module, of_model: Any) -> Callable[[nn.Module], object] | None:
    """Return what initialises a module: its own method, and its model's, as in transformers."""
    own = [
        name for name in ("reset_parameters", "_reset_parameters") if callable(getattr(module, name, None))
    ]
    if not (own or callable(of_model)):
        return None

    def run(twin: nn.Module) -> None:
        for name in own[:1]:
            getattr(twin, name)()
        if callable(of_model):  # which knows better than the module, and may not know the module at all
            of_model(twin)

    return run


def _mark(tensor: torch.Tensor) -> None:
    """Fill a tensor with what nobody initialises to."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(math.nan)
    elif tensor.dtype != torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).max)


def _is_marked(tensor: torch.Tensor) -> bool:
    """Whether elements of a tensor are as :func:`_mark` has left them."""
    if tensor.is_meta:
        return True
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().any())
    return tensor.dtype != torch.bool and bool((tensor == torch.iinfo(tensor.dtype).max).any())


def move_model(model: nn.Module, device: torch.device) -> None:
    """Move a model to a device, but for what has no memory yet."""
    model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))  # noqa: SLF001 - as Module.to


def take_meta(parameter: torch.Tensor, view: torch.Tensor) -> None:
    """Give a parameter without memory a view of some; the object stays the same.

    Args:
        parameter: The parameter.
        view: Memory of its shape.
    """
    # Not made from the view itself, whose count of writes it would share with all others in that memory.
    filled = nn.Parameter(view.new_empty(0), requires_grad=parameter.requires_grad)
    filled.data = view
    torch.utils.swap_tensors(parameter, filled)


def allocate_rest(
    table: ParameterTable, device: torch.device, dtypes: Callable[[nn.Parameter], torch.dtype]
) -> None:
    """Give memory to what no memory manager has taken: buffers, and parameters that nobody updates.

    Args:
        table: The parameter table, closed.
        device: Where.
        dtypes: Dtype in which a parameter computes.
    """
    for entry in table:
        tensor = table.tensor(entry)
        if not tensor.is_meta:
            continue
        if isinstance(tensor, nn.Parameter):
            take_meta(tensor, torch.empty(tensor.shape, dtype=dtypes(tensor), device=device))
        else:
            torch.utils.swap_tensors(tensor, torch.empty_like(tensor, device=device))


def initialise(engine: Engine, blueprints: list[Blueprint]) -> None:
    """Give values to everything that had no memory; nothing is communicated.

    Args:
        engine: The built pieces; each tensor has the memory that this rank keeps of it.
        blueprints: From :func:`draw_blueprints`.

    Raises:
        CapabilityError: A module left a tensor without values.
    """
    from colossal_core.runtime.checkpointing.shards import model_holdings, plain_name

    for name in engine.models:
        mine = [blueprint for blueprint in blueprints if blueprint.model == name]
        if not mine:
            continue
        held: dict[str, list[Holding]] = {}
        for holding in model_holdings(engine, name, hidden=True).holdings:
            held.setdefault(holding.name, []).append(holding)
        owned = {entry.name: entry for entry in engine.context.table if entry.model == name}
        for blueprint in mine:
            wanted = [plain_name(path) for path in _names_of(blueprint) if path in owned]
            if any(path in held for path in wanted):
                _fill(blueprint.build(engine.seed), held, owned)


def _names_of(blueprint: Blueprint) -> list[str]:
    """Return the names of the tensors of a module in its model."""
    own = [*blueprint.twin.named_parameters(recurse=False), *blueprint.twin.named_buffers(recurse=False)]
    return [f"{blueprint.path}.{name}" if blueprint.path else name for name, _ in own]


@torch.no_grad()
def _fill(
    built: Mapping[str, torch.Tensor], held: Mapping[str, list[Holding]], owned: Mapping[str, Entry]
) -> None:
    """Copy the boxes that this rank holds; a tied tensor belongs to the module that is named first."""
    from colossal_core.runtime.checkpointing.shards import plain_name

    for name, tensor in built.items():
        if name not in owned:
            continue
        for holding in held.get(plain_name(name), ()):
            with holding.present():
                holding.view.copy_(tensor[holding.box.slices])
