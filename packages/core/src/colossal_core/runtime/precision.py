"""Precision: which dtype each parameter computes in, and the casts at the model's border.

The one idea: a plan names one dtype to compute in. With a 16-bit one, parameters are narrowed while the
update runs on fp32 masters and moments, floating inputs are narrowed where they enter the model, and outputs
leave in fp32, so losses and metrics are ordinary fp32 code. Nothing changes between entry and exit: this is
not autocast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any, final

import torch
from attrs import frozen
from torch import nn
from torch.utils import _pytree as pytree

from colossal_core.errors import UsageError
from colossal_core.interfaces import AbstractBorder
from colossal_core.runtime.trees import map_leaves

__all__ = ["CastBorder", "Precision", "cast_floating", "inner_borders", "map_tensors"]

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@frozen
class Precision:
    """The dtypes of a plan.

    Attributes:
        name: ``"fp64"``, ``"fp32"``, ``"bf16"`` or ``"fp16"``.
        keep_float32: Patterns of module names that stay in fp32 under a 16-bit precision.
    """

    name: str
    keep_float32: tuple[str, ...] = ()

    @property
    def compute(self) -> torch.dtype:
        """Dtype of parameters and activations."""
        return DTYPES[self.name]

    @property
    def is_narrow(self) -> bool:
        """Whether it is a 16-bit precision, with fp32 masters."""
        return self.compute.itemsize == 2

    def dtype_of(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype that a parameter of this name and serial dtype computes in; needs no model."""
        if not dtype.is_floating_point:
            return dtype
        path = name.split(".")[:-1]
        modules = [".".join(path[: depth + 1]) for depth in range(len(path))]
        kept = any(fnmatchcase(module, pattern) for module in modules for pattern in self.keep_float32)
        return torch.float32 if kept and self.is_narrow else self.compute

    def wide_modules(self, model: nn.Module) -> list[nn.Module]:
        """Return the modules of a model that stay in fp32, outermost only: what lies inside is fp32, too."""
        if not self.is_narrow:
            return []
        found: list[nn.Module] = []
        inside: set[nn.Module] = set()
        for name, module in model.named_modules():
            matches = name and any(fnmatchcase(name, pattern) for pattern in self.keep_float32)
            if matches and module not in inside:
                found.append(module)
                inside.update(module.modules())
        return found

    def check_patterns(self, models: Iterable[nn.Module]) -> None:
        """Refuse patterns of modules to keep wide that mean none.

        Raises:
            UsageError: A pattern matches no module of any model.
        """
        names = [name for model in models for name, _ in model.named_modules() if name]
        for pattern in self.keep_float32 if self.is_narrow else ():
            if not any(fnmatchcase(name, pattern) for name in names):
                raise UsageError(
                    f"keep_float32 pattern {pattern!r} matches none of the {len(names)} modules",
                    hint=f"module names look like {', '.join(map(repr, names[:4]))}",
                )

    def dtypes(self, models: Iterable[nn.Module]) -> Callable[[torch.Tensor], torch.dtype]:
        """Return a function that says which dtype a parameter shall have.

        Raises:
            UsageError: A parameter would lose bits that the plan does not mention, or is tied across the
                border of ``keep_float32``, or a pattern matches no module.
        """
        models = list(models)
        self.check_patterns(models)
        wide: set[torch.Tensor] = set()
        for model in models:
            inside = self.wide_modules(model)
            wide.update(parameter for module in inside for parameter in module.parameters())
            members = {module for outer in inside for module in outer.modules()}
            for name, module in model.named_modules():
                for own, parameter in module.named_parameters(recurse=False):
                    path = f"{name}.{own}" if name else own
                    if parameter.dtype == torch.float64 and self.compute != torch.float64:
                        raise UsageError(
                            f"parameter {path!r} is float64, but precision is {self.name!r}",
                            hint="pass precision='fp64', or call model.float() first",
                        )
                    if parameter in wide and module not in members:
                        raise UsageError(
                            f"parameter {path!r} is tied to one that keep_float32 keeps wide",
                            hint="let keep_float32 match both modules or neither",
                        )

        def dtype_of(parameter: torch.Tensor) -> torch.dtype:
            if not parameter.is_floating_point():
                return parameter.dtype
            return torch.float32 if parameter in wide else self.compute

        return dtype_of


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """Apply a function to the tensors of a nested container; containers keep their types, other leaves pass.

    Args:
        function: Applied to each tensor.
        tree: Tuples, lists, mappings, dataclasses and registered pytrees of tensors and other leaves.
    """

    def visit(_: str, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return function(leaf)
        if pytree.tree_is_leaf(leaf):
            return leaf
        return pytree.tree_map(lambda inner: map_tensors(function, inner), leaf)

    return map_leaves(visit, tree)


def cast_floating(tree: Any, dtype: torch.dtype, *, only: Iterable[torch.dtype] | None = None) -> Any:
    """Cast the floating tensors of a nested container; containers keep their types, everything else passes.

    Args:
        tree: As for :func:`map_tensors`.
        dtype: Target of floating tensors.
        only: Cast only tensors of these dtypes.
    """
    chosen = None if only is None else frozenset(only)

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        wanted = tensor.is_floating_point() if chosen is None else tensor.dtype in chosen
        return tensor.to(dtype) if wanted and tensor.dtype != dtype else tensor

    return map_tensors(cast, tree)


@final
class CastBorder(AbstractBorder):
    """Casts floating tensors on entry to one dtype, and results of a given dtype on exit to another."""

    def __init__(
        self, inside: torch.dtype, outside: torch.dtype, *, only: Iterable[torch.dtype] | None = None
    ) -> None:
        """Choose the dtypes.

        Args:
            inside: Dtype of floating tensors inside the module.
            outside: Dtype of results outside, for results that have the dtype ``inside``.
            only: Cast only inputs of these dtypes; all floating ones when None.
        """
        self._inside, self._outside = inside, outside
        self._only = None if only is None else tuple(only)

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Cast the arguments."""
        cast_args, cast_kwargs = cast_floating((args, kwargs), self._inside, only=self._only)
        return cast_args, cast_kwargs

    def exit(self, outputs: Any) -> Any:
        """Cast the results."""
        return cast_floating(outputs, self._outside, only=(self._inside,))


def inner_borders(model: nn.Module, precision: Precision) -> list[tuple[nn.Module, CastBorder]]:
    """Return the casts at the borders of the modules that stay in fp32; none for fp32 and fp64."""
    narrow, wide = precision.compute, torch.float32
    return [(module, CastBorder(wide, narrow, only=(narrow,))) for module in precision.wide_modules(model)]
