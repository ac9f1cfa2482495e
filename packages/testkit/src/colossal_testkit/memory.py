"""Bytes that tensors hold, exactly, on any device.

The one idea: what occupies memory is a storage, not a tensor. torch keeps the Python object of a storage
alive as long as the storage itself, whoever holds it: a view, another tensor over the same storage, the
autograd graph. So a weak reference to it says precisely when the memory is freed, and every storage is
counted once. New ones are seen by a dispatch mode, which every operation passes, also those of backward on
the CPU; sizes are read anew after each operation, since ``resize_`` passes nothing.

Not counted: what a kernel allocates and frees inside one operation, and memory that is no storage (Python
objects, the allocator's rounding).
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Self, final

import attrs
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from colossal_core.runtime.arena import bytes_of_storage

__all__ = ["LiveBytes", "MemoryReport", "find_tensors"]

OTHER = "other"


@final
@attrs.frozen(kw_only=True)
class MemoryReport:
    """Bytes at one moment.

    Attributes:
        total_bytes: All of them.
        categories: By label; what has no label is ``"other"``. Sums up to the total.
    """

    total_bytes: int
    categories: Mapping[str, int]

    def bytes_of(self, category: str) -> int:
        """Return the bytes of one category, 0 when nothing carries that label."""
        return self.categories.get(category, 0)


@final
class LiveBytes(TorchDispatchMode):
    """Counts the storages that come into being while it is entered, and those it is told about.

    ::

        with LiveBytes() as live:
            model = build_model()
            loss = model(inputs).sum()
            loss.backward()
            live.label_training(model, optimizer)
        live.current().bytes_of("gradients"), live.peak().total_bytes

    After it was left it keeps counting the deaths of what it has seen, so `current` stays right for those.
    """

    def __init__(self, *, include_existing: bool = False) -> None:
        """Start with nothing.

        Args:
            include_existing: Count from the start every tensor of this process that Python can see. What only
                a graph holds is missed; build graphs inside the context.
        """
        start: Any = super().__init__  # not annotated in torch
        start()
        self._includes_existing = include_existing
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._sizes: dict[int, int] = {}
        self._numbers: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = weakref.WeakKeyDictionary()
        self._labels: dict[int, str] = {}
        self._num_seen = 0
        self._total_bytes = 0
        self._peak_bytes = 0
        self._peak_sizes: dict[int, int] = {}

    def __enter__(self) -> Self:
        if self._includes_existing:
            self.add(find_tensors())
        enter: Any = super().__enter__  # not annotated in torch
        enter()
        return self

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the operation and look at what went in and what came out."""
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - subclasses have had their turn
            result = func(*args, **(kwargs or {}))
        self.add(leaf for leaf in tree_iter((args, kwargs, result)) if isinstance(leaf, torch.Tensor))
        self._measure()
        return result

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count the storages of tensors that existed before the context was entered."""
        for tensor in tensors:
            self._number_of(tensor)

    def label(self, category: str, tensors: Iterable[torch.Tensor]) -> None:
        """Give the storages of tensors a category, also for the peak; the first label of a storage stays."""
        for tensor in tensors:
            number = self._number_of(tensor)
            if number is not None:
                self._labels.setdefault(number, category)

    def label_training(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Label what a plain training loop holds: parameters, gradients, buffers and optimizer states."""
        self.label("parameters", (parameter.data for parameter in model.parameters()))
        self.label("gradients", (p.grad for p in model.parameters() if p.grad is not None))
        self.label("buffers", model.buffers())
        if optimizer is not None:
            leaves = tree_iter([list(state.values()) for state in optimizer.state.values()])
            self.label("optimizer states", (leaf for leaf in leaves if isinstance(leaf, torch.Tensor)))

    def current(self) -> MemoryReport:
        """Return what is alive now, after collecting garbage cycles."""
        gc.collect()
        self._measure()
        return self._report(self._sizes)

    def peak(self) -> MemoryReport:
        """Return the moment, after some operation, at which most was alive."""
        return self._report(self._peak_sizes)

    def reset_peak(self) -> None:
        """Forget the peak: from now on it is what is alive now, or more."""
        self._peak_bytes, self._peak_sizes = 0, {}
        self._measure()

    def _number_of(self, tensor: torch.Tensor) -> int | None:
        """Return the number of a tensor's storage, counting a new one; None when it holds no memory."""
        try:
            with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - asking is no use of a tensor
                storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            # Sparse tensors and some subclasses have none; their parts are tensors of their own.
            return None
        if storage.device.type == "meta":
            return None
        number = self._numbers.get(storage)
        if number is None:
            self._num_seen += 1
            number = self._num_seen
            self._numbers[storage] = number
            self._storages[number] = weakref.ref(storage, self._make_forget(number))
            self._sizes[number] = 0
        return number

    def _make_forget(self, number: int) -> Callable[[object], None]:
        """Return what is called when a storage is freed; it must not keep this object alive."""
        storages, sizes, myself = self._storages, self._sizes, weakref.ref(self)

        def forget(_: object) -> None:
            """Take the storage out of the books."""
            storages.pop(number, None)
            size = sizes.pop(number, 0)
            counter = myself()
            if counter is not None:
                counter._total_bytes -= size  # noqa: SLF001 - its own method, but for the weak reference

        return forget

    def _measure(self) -> None:
        """Read all sizes, since a storage may have been resized, and take note of a new peak."""
        for number, reference in list(self._storages.items()):
            storage = reference()
            if storage is not None:
                size = bytes_of_storage(storage)
                self._total_bytes += size - self._sizes[number]
                self._sizes[number] = size
        if self._total_bytes > self._peak_bytes:
            self._peak_bytes, self._peak_sizes = self._total_bytes, dict(self._sizes)

    def _report(self, sizes: Mapping[int, int]) -> MemoryReport:
        """Sum sizes by label."""
        categories: dict[str, int] = {}
        for number, size in sizes.items():
            label = self._labels.get(number, OTHER)
            categories[label] = categories.get(label, 0) + size
        return MemoryReport(total_bytes=sum(sizes.values()), categories=categories)


def find_tensors() -> Iterator[torch.Tensor]:
    """Yield every tensor of this process that Python's garbage collector knows, and their gradients."""
    for thing in gc.get_objects():
        # By type and not by isinstance, which would run the ``__class__`` property of lazy proxies.
        if issubclass(type(thing), torch.Tensor):
            yield thing
            if thing.is_leaf and thing.grad is not None:
                yield thing.grad
