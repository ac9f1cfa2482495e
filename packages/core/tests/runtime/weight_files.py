"""Safetensors files as others write them, and what is in those that we have written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from colossal_core.checkpoint.safetensors_format import encode_header, read_header
from colossal_core.runtime.checkpointing.shards import DTYPE_NAMES, bytes_of

__all__ = ["read_weights", "same_bits", "unique_state", "write_shards", "write_weights"]


def write_weights(path: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    """Write one file, and return the directory that it lies in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    header = encode_header((name, DTYPE_NAMES[value.dtype], value.shape) for name, value in tensors.items())
    contents = (bytes(bytes_of(value.detach().contiguous())) for value in tensors.values())
    path.write_bytes(header.raw + b"".join(contents))
    return path.parent


def write_shards(directory: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    """Write two files and their index, and return the directory."""
    names = sorted(tensors)
    where = {name: f"part-{number % 2}.safetensors" for number, name in enumerate(names)}
    for file in set(where.values()):
        write_weights(directory / file, {name: tensors[name] for name in names if where[name] == file})
    index = {"metadata": {}, "weight_map": where}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return directory


def read_weights(directory: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of all safetensors files in a directory."""
    dtypes = {name: dtype for dtype, name in DTYPE_NAMES.items()}
    found = {}
    for path in sorted(directory.glob("*.safetensors")):
        content = path.read_bytes()
        for name, stored in read_header(path).tensors.items():
            data = bytearray(content[stored.start : stored.stop])
            flat = torch.frombuffer(data, dtype=dtypes[stored.dtype]) if data else torch.empty(0)
            assert name not in found, f"{name} is stored twice"
            found[name] = flat.to(dtypes[stored.dtype]).view(stored.shape)
    return found


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal in dtype, shape and every bit."""
    return a.dtype == b.dtype and a.shape == b.shape and bytes(bytes_of(a)) == bytes(bytes_of(b))


def unique_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of the state dict of a plain model, tied weights under their first name only."""
    found: dict[str, torch.Tensor] = {}
    seen = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if value not in seen:
            seen.add(value)
            found[name] = value.detach().clone()
    return found
