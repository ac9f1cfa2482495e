"""Arguments and results travel by value.

torch's own reductions for processes share memory through file descriptors, which outlive a test and run
out; plain pickling writes the whole storage behind a view. Here a dense tensor becomes its bytes: what
arrives is an ordinary CPU tensor of its own, detached, contiguous, with equal values. Everything else is
pickled as usual, functions and classes by name; the modules that hold them are noted, because the receiver
may have to load them by file.
"""

from __future__ import annotations

import ctypes
import io
import pickle
import sys
from types import FunctionType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["dumps", "loads"]

_PROTOCOL = 5


def dumps(value: object, modules: set[str] | None = None) -> bytes:
    """Pickle a value, tensors by value.

    Args:
        value: What travels.
        modules: Takes the names of the modules whose functions and classes the value uses.

    Raises:
        pickle.PicklingError: Something in it cannot travel (a lambda, a lock, a class made inside a
            function).
    """
    buffer = io.BytesIO()
    try:
        _ValuePickler(buffer, set() if modules is None else modules).dump(value)
    except (TypeError, AttributeError, RuntimeError) as err:
        # CPython and torch raise these for locks, local classes and exotic layouts; callers need one type.
        raise pickle.PicklingError(str(err)) from err
    return buffer.getvalue()


def loads(data: bytes) -> object:
    """Return the value that `dumps` wrote, with tensors of their own."""
    value: object = pickle.loads(data)  # noqa: S301 - both ends are processes of one test run
    return value


class _ValuePickler(pickle.Pickler):
    """Replaces dense tensors by their bytes, and notes the modules of functions and classes."""

    def __init__(self, buffer: io.BytesIO, modules: set[str]) -> None:
        super().__init__(buffer, protocol=_PROTOCOL)
        self._modules = modules
        torch_module = sys.modules.get("torch")
        # By exact class: subclasses of tensors know best how they travel.
        self._tensors = () if torch_module is None else (torch_module.Tensor, torch_module.nn.Parameter)

    def reducer_override(self, value: object) -> Any:
        """Return how a dense tensor is rebuilt; leave everything else to pickle."""
        if type(value) in self._tensors:
            return _reduce_tensor(value)
        if isinstance(value, type | FunctionType):
            self._modules.add(value.__module__)
        return NotImplemented


def _reduce_tensor(value: Any) -> Any:
    """Return how a plain tensor or parameter is rebuilt; leave layouts other than dense ones to torch."""
    import torch

    tensor: torch.Tensor = value
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta or tensor.is_nested:
        return NotImplemented
    copy = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    data = ctypes.string_at(copy.data_ptr(), copy.numel() * copy.element_size()) if copy.numel() else b""
    return _rebuild_tensor, (data, copy.dtype, tuple(copy.shape))


def _rebuild_tensor(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a CPU tensor that owns a copy of the bytes."""
    import torch

    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)
