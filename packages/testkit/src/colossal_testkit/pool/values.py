"""Arguments and results travel by value.

torch's own reductions for processes share memory through file descriptors, which outlive a test and run out;
plain pickling writes the whole storage behind a view. Here a dense tensor becomes its bytes: what arrives is
an ordinary CPU tensor of its own, detached, contiguous, with equal values. Everything else is pickled as
usual.
"""

from __future__ import annotations

import copyreg
import ctypes
import io
import pickle
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["dumps", "loads"]

_PROTOCOL = 5


def dumps(value: object) -> bytes:
    """Pickle a value, tensors by value.

    Raises:
        pickle.PicklingError: Something in it cannot travel (a lambda, a lock, a class made inside a
            function).
    """
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol=_PROTOCOL)
    torch_module = sys.modules.get("torch")
    if torch_module is not None:
        # By exact class: subclasses of tensors know best how they travel.
        own = dict.fromkeys((torch_module.Tensor, torch_module.nn.Parameter), _reduce_tensor)
        table: dict[type, Any] = {**copyreg.dispatch_table, **own}
        pickler.dispatch_table = table
    try:
        pickler.dump(value)
    except (TypeError, AttributeError, RuntimeError) as err:
        # CPython and torch raise these for locks, local classes and exotic layouts; callers need one type.
        raise pickle.PicklingError(str(err)) from err
    return buffer.getvalue()


def loads(data: bytes) -> object:
    """Return the value that `dumps` wrote, with tensors of their own."""
    value: object = pickle.loads(data)  # noqa: S301 - both ends are processes of one test run
    return value


def _reduce_tensor(tensor: torch.Tensor) -> Any:
    """Return how a plain tensor or parameter is rebuilt; leave layouts other than dense ones to torch."""
    import torch

    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta or tensor.is_nested:
        plain: Any = tensor.detach()
        return plain.__reduce_ex__(_PROTOCOL)
    copy = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    data = ctypes.string_at(copy.data_ptr(), copy.numel() * copy.element_size()) if copy.numel() else b""
    return _rebuild_tensor, (data, copy.dtype, tuple(copy.shape))


def _rebuild_tensor(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a CPU tensor that owns a copy of the bytes."""
    import torch

    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)
