"""Parameters that a forward reads outside of the modules that are known to read them.

A model may sum the squares of its blocks' weights, or use a matrix of a block that has run. No hook of a
module tells of that. So the first training pass of a model and its first other one look at the arguments of
each operation; where such a read is found, all later passes of that model look, too.

Looking costs some microseconds for each operation, too much to do it always. Not handled: a model that begins
to read so after these passes, and such reads inside of what is recomputed; they get NaN, as any code does
that reads what is not here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from colossal_core.runtime.units import Home, Unit

__all__ = ["StrayReads"]


@final
class StrayReads:
    """Knows in which passes of which models to look for such reads, and looks."""

    def __init__(self, borrow: Callable[[Unit], AbstractContextManager[None]]) -> None:
        """Know no models yet.

        Args:
            borrow: Returns a context in which a unit is there for one operation.
        """
        self._borrow = borrow
        self._seen: set[tuple[nn.Module, bool]] = set()
        self._models: set[nn.Module] = set()
        self._looking: _Looking | None = None

    def begin(self, model: nn.Module, homes: Iterable[Home]) -> None:
        """Look from now on, where a pass of a model needs it; its outermost call begins."""
        key = (model, model.training and torch.is_grad_enabled())
        if key in self._seen and model not in self._models:
            return
        self._seen.add(key)
        units = {slot.parameter: home.unit for home in homes for slot in home.buffer.slots}
        self._looking = _Looking(units, self._borrow)
        self._looking.__enter__()  # type: ignore[no-untyped-call]  # torch's

    def end(self) -> None:
        """Look no more; the outermost call has ended."""
        if self._looking is not None:
            self._looking.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch's
            self._looking = None

    def note(self, model: nn.Module) -> None:
        """Look in every pass of a model from now on."""
        self._models.add(model)


@final
class _Looking(TorchFunctionMode):
    """Has the units there whose parameters an operation gets."""

    def __init__(
        self,
        units: Mapping[nn.Parameter, Unit],
        borrow: Callable[[Unit], AbstractContextManager[None]],
    ) -> None:
        """Take the unit of each parameter that comes and goes, and how to have one there."""
        super().__init__()
        self._units = units
        self._borrow = borrow

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation."""
        del types
        with ExitStack() as borrowed:
            if _reads_values(func):
                for unit in dict.fromkeys(self._find((*args, *(kwargs or {}).values()))):
                    borrowed.enter_context(self._borrow(unit))
            return func(*args, **(kwargs or {}))

    def _find(self, arguments: tuple[Any, ...]) -> Iterator[Unit]:
        """Iterate over the units of parameters among the arguments of an operation, or in a list there."""
        for argument in arguments:
            if isinstance(argument, nn.Parameter):
                unit = self._units.get(argument)
                if unit is not None:
                    yield unit
            elif isinstance(argument, (list, tuple)):
                yield from self._find(tuple(argument))


def _reads_values(function: Any) -> bool:
    """Whether an operation reads, or shows, more of a tensor than its shape and the like."""
    name = getattr(function, "__name__", "")
    if name == "__get__":  # of an attribute
        return getattr(function.__self__, "__name__", "") in _VALUES
    return name not in _DESCRIPTIONS


_VALUES = {"T", "mT", "H", "mH", "data", "real", "imag"}
"""Attributes of tensors that are views."""

_DESCRIPTIONS = {
    "__hash__",
    "__len__",
    "__set__",
    "data_ptr",
    "dim",
    "element_size",
    "get_device",
    "is_complex",
    "is_contiguous",
    "is_floating_point",
    "is_same_size",
    "is_signed",
    "ndimension",
    "nelement",
    "numel",
    "register_hook",
    "requires_grad_",
    "size",
    "storage_offset",
    "stride",
    "untyped_storage",
}
"""Methods of tensors that say something about them."""
