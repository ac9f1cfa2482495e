"""Tensors and arrays among plain values: how those that schedulers, samplers and users keep are packed."""

from __future__ import annotations

import sys
from typing import Any

import torch

from colossal_core.checkpoint.packing import PackedArray, pack, unpack
from colossal_core.errors import CheckpointError
from colossal_core.runtime.checkpointing.shards import DTYPE_NAMES, bytes_of

__all__ = ["pack_values", "unpack_values"]

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def pack_values(value: Any, where: str) -> Any:
    """Return a value as JSON can hold it; tensors and numpy arrays by their bytes.

    Args:
        value: Nested plain values.
        where: What it is, for messages.

    Raises:
        UsageError: Something is behaviour, not data; names its path.
    """
    return pack(value, where, convert=_to_packed)


def unpack_values(value: Any) -> Any:
    """Return what :func:`pack_values` was given; tensors on the CPU.

    Raises:
        CheckpointError: It is malformed.
    """
    return unpack(value, revert=_from_packed)


def _to_packed(value: Any) -> Any:
    """Return tensors and arrays by their bytes, numpy's numbers as Python's, anything else as it is."""
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and value.dtype in DTYPE_NAMES:
        flat = value.detach().cpu().contiguous()
        return PackedArray("torch", DTYPE_NAMES[flat.dtype], tuple(flat.shape), bytes(bytes_of(flat)))
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        if isinstance(value, numpy.generic):
            return value.item()
        if isinstance(value, numpy.ndarray) and value.dtype.kind in "biufc":
            return PackedArray("numpy", value.dtype.str, value.shape, value.tobytes())
    return value


def _from_packed(array: PackedArray) -> Any:
    """Return the tensor or array."""
    if array.library == "torch" and array.dtype in _DTYPES:
        if not array.data:
            return torch.empty(array.shape, dtype=_DTYPES[array.dtype])
        flat = torch.frombuffer(bytearray(array.data), dtype=_DTYPES[array.dtype])
        return flat.view(array.shape)
    if array.library == "numpy":
        import numpy as np

        return np.frombuffer(array.data, dtype=np.dtype(array.dtype)).reshape(array.shape).copy()
    raise CheckpointError(
        f"a stored array is of {array.library!r} and {array.dtype!r}, which are unknown here",
        hint="it was written by a newer version of colossal-core",
    )
