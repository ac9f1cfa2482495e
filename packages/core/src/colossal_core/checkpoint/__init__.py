"""Checkpoints on disk: format, directories, reading and writing of bytes; without torch.

``root/step-N/`` holds safetensors files, one for each object and rank, and ``MANIFEST.json``, which is
written last: a directory without it does not exist for readers. The manifest says for each tensor of the
serial objects which boxes lie in which file at which byte, with a checksum for each block, so any number of
ranks under any plan reads exactly what it needs. There is no pickle anywhere.
"""

from __future__ import annotations

from colossal_core.checkpoint.directory import (
    MANIFEST_NAME,
    find_complete,
    read_manifest,
    resolve_checkpoint,
)
from colossal_core.checkpoint.manifest import FileRecord, Manifest, ObjectRecord, Piece, TensorRecord
from colossal_core.checkpoint.reading import BlockReader

__all__ = [
    "MANIFEST_NAME",
    "BlockReader",
    "FileRecord",
    "Manifest",
    "ObjectRecord",
    "Piece",
    "TensorRecord",
    "find_complete",
    "read_manifest",
    "resolve_checkpoint",
]
