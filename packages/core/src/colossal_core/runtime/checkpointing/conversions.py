"""Conversions of tensors between a model and files: what goes in, what comes out, and what depends on what.

The one idea: a conversion is a function over named tensors that somebody else wrote. Run on tensors without
memory it says which forms come out; followed operation by operation it says what they are made of; and run on
numbers instead of weights it says which of many inputs some elements come from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from attrs import field, frozen
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from colossal_core.boxes import Box
from colossal_core.errors import CapabilityError

__all__ = [
    "STRANGE",
    "Conversion",
    "Form",
    "Forms",
    "NameMap",
    "Origins",
    "SerialModel",
    "Tensors",
    "connect",
]

STRANGE = (
    ArithmeticError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    StopIteration,
    TypeError,
    ValueError,
)
"""What calls into a version of transformers with other functions raise."""

MOST_NUMBERS = 1 << 15
"""Sources of one conversion up to which two bytes can number them."""


@frozen
class Form:
    """Dtype and shape of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Form:
        """Return the form of a tensor."""
        return cls(tensor.dtype, tuple(tensor.shape))

    def imagine(self) -> torch.Tensor:
        """Return a tensor of this form without memory."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


Tensors = Mapping[str, torch.Tensor]
Forms = Mapping[str, Form]


@frozen(kw_only=True, eq=False)
class Conversion:
    """Some tensors that are computed from some others, all at once.

    Attributes:
        sources: Names of what goes in.
        targets: What comes out, by name.
        run: Converts tensors by name, and raises what it likes.
        dtype: What goes in is cast to it before; None takes it as it is.
        is_move: Whether elements are only put elsewhere, and none is computed.
    """

    sources: tuple[str, ...]
    targets: Forms
    run: Callable[[Tensors], dict[str, torch.Tensor]] = field(repr=False)
    dtype: torch.dtype | None = None
    is_move: bool = False

    def convert(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        """Convert tensors by name; results may be views of what went in.

        Raises:
            CapabilityError: The conversion fails, though it went well without elements.
        """
        try:
            return self.run({name: value.to(self.dtype or value.dtype) for name, value in tensors.items()})
        except STRANGE as err:
            raise CapabilityError(
                f"{self.sources[0]!r} cannot be converted between model and files: {err}",
                hint="report it with the class of the model and the version of transformers",
            ) from err

    def needed(self, forms: Forms, boxes: Mapping[str, Sequence[Box]]) -> dict[str, Box]:
        """Return the boxes of sources that elements in some boxes of the results come from.

        Runs the conversion on numbers in place of weights: of sources, one or two bytes for each element, and
        of places along each dim, four bytes. Sources that nothing comes from are left out.

        Args:
            forms: Forms of the sources.
            boxes: Boxes of results by name.
        """
        everything = {name: Box((0,) * len(forms[name].shape), forms[name].shape) for name in self.sources}
        is_partial = any(
            not any(box.size == form.shape for box in boxes.get(name, ()))
            for name, form in self.targets.items()
        )
        if not self.is_move or not is_partial or not 1 < len(self.sources) < MOST_NUMBERS:
            return everything
        kind = torch.uint8 if len(self.sources) <= 256 else torch.int16
        numbers = {
            name: torch.full((), number, dtype=kind).expand(forms[name].shape)
            for number, name in enumerate(self.sources)
        }
        num_dims = max(len(form.shape) for form in forms.values())
        try:
            origins = self._parts(numbers, boxes)
            bounds = [
                _bounds(origins, self._parts(_places(forms, dim), boxes), len(self.sources))
                for dim in range(num_dims)
            ]
        except STRANGE:
            return everything
        found: dict[str, Box] = {}
        for number, name in enumerate(self.sources):
            spans = [bounds[dim][number] for dim in range(len(forms[name].shape))]
            if not spans:
                found[name] = everything[name]
            elif all(start < stop for start, stop in spans):
                found[name] = Box(
                    tuple(start for start, _ in spans), tuple(stop - start for start, stop in spans)
                )
        return found

    def _parts(self, tensors: Tensors, boxes: Mapping[str, Sequence[Box]]) -> list[torch.Tensor]:
        """Return what the conversion gives in some boxes of its results."""
        found = self.run(dict(tensors))
        return [found[name][box.slices] for name in boxes for box in boxes[name]]


def _places(forms: Forms, dim: int) -> dict[str, torch.Tensor]:
    """Return tensors of some forms whose elements say where they are along one dim; 0 where there is none."""
    found = {}
    for name, form in forms.items():
        size = form.shape[dim] if dim < len(form.shape) else 1
        line = torch.arange(size, dtype=torch.int32)
        rest = len(form.shape) - dim - 1
        found[name] = (line.view(-1, *[1] * rest) if rest >= 0 else line.view(())).expand(form.shape)
    return found


def _bounds(
    origins: Sequence[torch.Tensor], places: Sequence[torch.Tensor], num_sources: int
) -> list[tuple[int, int]]:
    """Return the first place of each source and the one after its last; where there is none, not below it."""
    low = torch.full((num_sources,), torch.iinfo(torch.int32).max, dtype=torch.int32)
    high = torch.zeros(num_sources, dtype=torch.int32)
    for origin, place in zip(origins, places, strict=True):
        for row, where in zip(
            torch.atleast_2d(origin), torch.atleast_2d(place), strict=True
        ):  # memory of a row
            numbers, spots = row.flatten().long(), where.flatten()
            low.scatter_reduce_(0, numbers, spots, "amin")
            high.scatter_reduce_(0, numbers, spots + 1, "amax")
    return list(zip(low.tolist(), high.tolist(), strict=True))


@frozen(kw_only=True)
class NameMap:
    """What becomes what, in one direction.

    Attributes:
        renamed: Target by source, of tensors that are the same in both forms.
        conversions: The others.
        note: Why the map of transformers could not be used; empty when it was, or when there is none.
    """

    renamed: Mapping[str, str]
    conversions: tuple[Conversion, ...] = ()
    note: str = ""


def connect(results: Mapping[str, frozenset[str]]) -> list[tuple[set[str], set[str]]]:
    """Return the smallest groups ``(inputs, outputs)`` such that no input is needed by two groups."""
    groups: list[tuple[set[str], set[str]]] = []
    owner: dict[str, tuple[set[str], set[str]]] = {}
    for output, inputs in results.items():
        group: tuple[set[str], set[str]] = (set(inputs), {output})
        for old in {id(owner[name]): owner[name] for name in inputs if name in owner}.values():
            group[0].update(old[0])
            group[1].update(old[1])
            groups.remove(old)
        groups.append(group)
        owner.update(dict.fromkeys(group[0], group))
    return groups


@final
class SerialModel:
    """Stands for a model where a conversion asks for shapes: those of the serial model, not of its cuts."""

    def __init__(self, model: nn.Module, tensors: Tensors) -> None:
        self._model, self._tensors = model, tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def get_parameter(self, name: str) -> torch.Tensor:
        """Return a parameter without memory.

        Raises:
            AttributeError: There is none of this name.
        """
        if name not in self._tensors:
            raise AttributeError(f"the model has no parameter {name!r}")
        return self._tensors[name]

    get_buffer = get_parameter
    get_parameter_or_buffer = get_parameter


@final
class Origins(TorchDispatchMode):
    """Follows which named tensors go into which results, by the memory that they share."""

    def __init__(self, tensors: Tensors) -> None:
        start: Any = super().__init__  # not annotated in torch
        start()
        self._alive: list[torch.Tensor] = list(tensors.values())
        self._found = {_memory(tensor): frozenset([name]) for name, tensor in tensors.items()}

    def of(self, tensor: torch.Tensor) -> frozenset[str]:
        """Return the names of what went into a tensor."""
        return self._found.get(_memory(tensor), frozenset())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        leaves = pytree.tree_leaves((args, kwargs, results))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        origins = frozenset().union(*map(self.of, tensors))
        for leaf in pytree.tree_leaves(results):
            if isinstance(leaf, torch.Tensor):
                self._alive.append(leaf)
                self._found[_memory(leaf)] = origins
        return results


def _memory(tensor: torch.Tensor) -> int:
    """Return what tells the memory of a tensor, which may be none, from that of others."""
    return int(tensor.untyped_storage()._cdata)
