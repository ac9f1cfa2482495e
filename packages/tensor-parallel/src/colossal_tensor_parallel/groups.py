"""Layers, and groups of them that may be cut together: columns whose outputs only one row layer reads.

The one idea: where the outputs of some layers reach a further layer and nothing else, the features between
them never show outside. Whether they also divide among ranks is for the proof to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, final

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import nn

from colossal_tensor_parallel.tracing import copy_module, is_layer, make_values, own_parameters

if TYPE_CHECKING:
    from colossal_tensor_parallel.tracing import Trace

__all__ = ["Form", "Group", "Layer", "find_groups", "list_layers"]

Form = Literal["linear", "transposed", "embedding", "other"]
"""``x W^T + b``, ``x W + b``, rows of a table, or something else."""


@final
@frozen(kw_only=True, eq=False)
class Layer:
    """A module with one matrix.

    Attributes:
        name: First name in the model.
        module: The module.
        form: What it computes.
    """

    name: str
    module: nn.Module
    form: Form

    @property
    def weight(self) -> torch.Tensor:
        """The matrix."""
        return self.module.get_parameter("weight")

    @property
    def bias(self) -> torch.Tensor | None:
        """The bias, or None."""
        return own_parameters(self.module).get("bias")

    @property
    def is_linear(self) -> bool:
        """Whether it maps features to features."""
        return self.form in {"linear", "transposed"}

    @property
    def out_dim(self) -> int:
        """Dim of the weight that counts output features; rows of the table for an embedding."""
        return 1 if self.form == "transposed" else 0

    @property
    def num_out(self) -> int:
        """Output features; rows of the table for an embedding."""
        return int(self.weight.shape[self.out_dim])

    @property
    def num_in(self) -> int:
        """Input features; width of the table for an embedding."""
        return int(self.weight.shape[1 - self.out_dim])


@final
@frozen(kw_only=True)
class Group:
    """Layers that may be cut together.

    Attributes:
        columns: Names of those that are cut by output features.
        row: Name of the one that reads them.
        container: Name of the smallest called module that holds all of them.
    """

    columns: tuple[str, ...]
    row: str
    container: str

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all members."""
        return (*self.columns, self.row)


def list_layers(model: nn.Module) -> dict[str, Layer]:
    """Return every module with one matrix by its first name, in order of registration."""
    known: dict[object, Form] = {}
    return {
        name: Layer(name=name, module=module, form=_form_of(module, known))
        for name, module in model.named_modules()
        if is_layer(module)
    }


def _form_of(module: nn.Module, known: dict[object, Form]) -> Form:
    """Return what a module computes; classes of unknown forward are asked with random numbers."""
    if isinstance(module, nn.Embedding):
        return "embedding"
    if type(module).forward is nn.Linear.forward and "forward" not in vars(module):
        return "linear"
    key = (type(module), tuple(module.get_parameter("weight").shape))
    if key not in known:
        known[key] = _ask_form(module)
    return known[key]


def _ask_form(module: nn.Module) -> Form:
    """Return the form of a module by what it computes."""
    source = torch.Generator().manual_seed(3)
    forms: tuple[Form, ...] = ("linear", "transposed")
    for form in forms:
        try:
            twin = copy_module(module, make_values(source, torch.float64))
            weight, bias = twin.get_parameter("weight"), own_parameters(twin).get("bias")
            matrix = weight if form == "linear" else weight.T
            inputs = torch.randn(2, 3, matrix.shape[1], generator=source, dtype=torch.float64)
            with torch.no_grad():
                outputs, expected = twin(inputs), F.linear(inputs, matrix, bias)
        except Exception:  # noqa: BLE001, S112 - code of the user's that takes something else
            continue
        is_equal = isinstance(outputs, torch.Tensor) and outputs.shape == expected.shape
        if is_equal and torch.allclose(outputs, expected, rtol=1e-9, atol=1e-9):
            return form
    return "other"


def find_groups(layers: Mapping[str, Layer], trace: Trace) -> list[Group]:
    """Return the groups that the forward showed, in the order of their row layers; none share a layer."""
    found: list[Group] = []
    taken: set[str] = set()
    for name, use in trace.layers.items():
        members = (*use.parents, name)
        if not use.parents or name in use.parents or taken.intersection(members):
            continue
        if any(not _may_join(member, layers, trace) for member in members):
            continue
        if any(trace.layers[parent].children != {name} for parent in use.parents):
            continue
        if any(trace.layers[parent].reaches_output for parent in use.parents):
            continue
        columns = tuple(parent for parent in trace.layers if parent in use.parents)
        container = _container(members, trace)
        if container is not None:
            found.append(Group(columns=columns, row=name, container=container))
            taken.update(members)
    return found


def _may_join(name: str, layers: Mapping[str, Layer], trace: Trace) -> bool:
    """Whether a layer can be in a group."""
    layer, use = layers.get(name), trace.layers[name]
    return layer is not None and layer.is_linear and use.num_calls > 0 and not use.is_read_outside


def _container(members: tuple[str, ...], trace: Trace) -> str | None:
    """Return the smallest module around all members that was called."""
    common = members[0].split(".")[:-1]
    for member in members[1:]:
        path = member.split(".")[:-1]
        length = next(
            (index for index, pair in enumerate(zip(common, path)) if pair[0] != pair[1]),  # noqa: B905 - the shorter ends it
            min(len(common), len(path)),
        )
        common = common[:length]
    while True:
        name = ".".join(common)
        if name in trace.calls:
            return name
        if not common:
            return None
        common = common[:-1]
