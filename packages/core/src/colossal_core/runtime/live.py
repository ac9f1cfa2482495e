"""Bytes that tensors hold, exactly, while a model runs: on any device, and for fake tensors.

The one idea: what occupies memory is a storage, not a tensor. torch keeps the Python object of a storage
alive as long as the storage itself, whoever holds it: a view, another tensor over the same storage, the
autograd graph. So a weak reference to it says precisely when the memory is freed, and every storage is
counted once. New ones are seen by a dispatch mode, which every operation passes, also those of backward on
the CPU; the cost of each operation does not depend on how many there are.

Not counted: what a kernel allocates and frees inside one operation, and memory that is no storage (Python
objects, the allocator's rounding).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, final

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_iter

from colossal_core.runtime.arena import bytes_of_storage

__all__ = ["LiveStorages"]


@final
class LiveStorages(TorchDispatchMode):
    """Counts the storages that come into being while it is entered, and those it is told about.

    Attributes:
        num_bytes: What is alive now.
        peak: Most since the beginning or :meth:`reset_peak`, read after each operation.
    """

    def __init__(self, *, excludes: Callable[[torch.Tensor], bool] | None = None) -> None:
        """Begin with nothing.

        Args:
            excludes: Whether the memory of a tensor is somebody else's; asked once for each storage.
        """
        start: Any = super().__init__  # not annotated in torch
        start()
        self.num_bytes = 0
        self.peak = 0
        self._excludes = excludes
        self._sizes: dict[int, int] = {}
        self._numbers: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = weakref.WeakKeyDictionary()
        self._deaths: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._num_seen = 0
        self._is_entered = self._is_paused = False

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
        if self._is_paused:
            return result
        self.add(leaf for leaf in tree_iter((args, kwargs, result)) if isinstance(leaf, torch.Tensor))
        return result

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count the storages of tensors, or count anew those that were resized."""
        for tensor in tensors:
            self._add(tensor)
        self.peak = max(self.peak, self.num_bytes)

    def pause(self) -> None:
        """Leave the context, whoever entered one since; without effect when it was left."""
        if _get_current_dispatch_mode() is self:
            leave: Any = super().__exit__  # not annotated in torch
            leave(None, None, None)
            self._is_entered = False
        self._is_paused = True

    def resume(self) -> None:
        """Enter the context, unless it is entered."""
        self._is_paused = False
        if not self._is_entered:
            self._is_entered = True
            enter: Any = super().__enter__  # not annotated in torch
            enter()

    def reset_peak(self) -> None:
        """Let the peak begin again at what is alive now."""
        self.peak = self.num_bytes

    def _add(self, tensor: torch.Tensor) -> None:
        """Count the storage of one tensor, unless it holds no memory or somebody else's."""
        try:
            with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - asking is no use of a tensor
                storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return  # sparse tensors and some subclasses have none; their parts are tensors of their own
        number = self._numbers.get(storage)
        if number is None:
            self._num_seen += 1
            number = self._numbers[storage] = self._num_seen
            is_empty = storage.device.type == "meta" and not isinstance(tensor, FakeTensor)
            if not is_empty and (self._excludes is None or not self._excludes(tensor)):
                self._sizes[number] = 0
                self._deaths[number] = weakref.ref(storage, self._make_forget(number))
        if number in self._sizes:
            size = bytes_of_storage(storage)
            self.num_bytes += size - self._sizes[number]
            self._sizes[number] = size

    def _make_forget(self, number: int) -> Callable[[object], None]:
        """Return what is called when a storage is freed; it must not keep this object alive."""
        sizes, deaths, myself = self._sizes, self._deaths, weakref.ref(self)

        def forget(_: object) -> None:
            """Take the storage out of the books."""
            deaths.pop(number, None)
            size = sizes.pop(number, 0)
            counter = myself()
            if counter is not None:
                counter.num_bytes -= size

        return forget
