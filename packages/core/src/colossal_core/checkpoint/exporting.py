"""Exporting one object of a checkpoint as files that ``from_pretrained`` reads, without torch and ranks.

The one idea: a file of an export is a sequence of tensors, and a tensor is read in order however its pieces
lie, so an export is a copy that holds a few blocks at a time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from attrs import frozen

from colossal_core.checkpoint.directory import read_manifest
from colossal_core.checkpoint.export_directory import (
    MAX_SHARD_BYTES,
    TensorSpec,
    check_target,
    clear_export,
    plan_export,
    publish_export,
    write_shard,
)
from colossal_core.checkpoint.manifest import Manifest, TensorRecord
from colossal_core.checkpoint.reading import BlockReader
from colossal_core.checkpoint.streaming import read_in_order
from colossal_core.errors import CapabilityError, UnknownNameError, UsageError
from colossal_core.spelling import join_names, suggest

__all__ = ["Exported", "choose_object", "export_object"]


@frozen(kw_only=True)
class Exported:
    """What an export has written.

    Attributes:
        name: Name of the object in the checkpoint.
        files: Names of the files, in the target.
        num_tensors: Tensors in them; tied ones once.
        num_bytes: Bytes of those.
    """

    name: str
    files: tuple[str, ...]
    num_tensors: int
    num_bytes: int


def export_object(
    directory: Path, target: Path, *, name: str = "", max_bytes: int = MAX_SHARD_BYTES
) -> Exported:
    """Write a model or an average of a checkpoint as plain safetensors files.

    Tensors keep their types, and have the names under which the hub stores them. An average is completed by
    what it does not average, such as buffers, from its model. Configurations of the model travel along. An
    earlier export in the target is replaced when all is written.

    Args:
        directory: Directory of one checkpoint.
        target: Where to; made when missing.
        name: Name of the object; empty for the only model.
        max_bytes: Bytes of tensors in one file; more are divided, with an index.

    Raises:
        CapabilityError: The hub stores this model's tensors in another form, which needs its classes.
        CheckpointError: The checkpoint is missing or damaged, the target holds foreign files, or the disk
            refuses.
        UsageError: There is no such object, or several to choose from.
    """
    manifest = read_manifest(directory)
    name = choose_object(manifest, name)
    tensors, model = _collect_tensors(manifest, name)
    hub = manifest.objects[model].details.get("hub") if model in manifest.objects else None
    if isinstance(hub, dict):
        if hub.get("needs_conversion"):
            raise CapabilityError(
                f"{name!r} of {directory} has tensors that the hub stores in another form",
                hint="load it in a script and call booster.export(model, directory), which converts",
            )
        tensors = _rename(tensors, hub.get("names"))
    check_target(target)
    plan = plan_export(
        [TensorSpec(name=key, dtype=tensor.dtype, shape=tensor.shape) for key, tensor in tensors.items()],
        max_bytes=max_bytes,
        configurations=manifest.configurations.get(model),
    )
    mark = os.urandom(6).hex()
    try:
        with BlockReader(directory, manifest) as reader:

            def read(key: str) -> Iterator[bytearray]:
                return read_in_order(reader, key, tensors[key])

            for shard in plan.shards:
                write_shard(target, shard, mark, read)
        publish_export(target, plan, mark)
    except BaseException:
        clear_export(target, mark)
        raise
    return Exported(
        name=name,
        files=plan.files,
        num_tensors=len(tensors),
        num_bytes=sum(tensor.num_bytes for tensor in tensors.values()),
    )


def choose_object(manifest: Manifest, name: str) -> str:
    """Return the object of a checkpoint that is meant: the named one, or the only model.

    Raises:
        UsageError: There is no such model or average, or several to choose from.
    """
    fitting = [key for key, record in manifest.objects.items() if record.kind != "optimizer"]
    if name and name not in manifest.objects:
        raise UnknownNameError(
            f"the checkpoint holds no object {name!r}; it holds {join_names(manifest.objects)}",
            hint=suggest(name, fitting),
        )
    if name:
        if name not in fitting:
            raise UsageError(
                f"{name!r} is an optimizer, which no model can read",
                hint=f"choose one of: {join_names(fitting)}",
            )
        return name
    models = [key for key in fitting if manifest.objects[key].kind == "model"]
    if len(models) != 1:
        raise UsageError(
            f"the checkpoint holds {len(models)} models: {join_names(models)}",
            hint="choose one: name=..., or --object NAME on the command line"
            if models
            else "it holds nothing to export",
        )
    return models[0]


def _collect_tensors(manifest: Manifest, name: str) -> tuple[dict[str, TensorRecord], str]:
    """Return the tensors to export by name, and the model that they belong to."""
    record = manifest.objects[name]
    model = record.details.get("model", name)
    if record.kind == "average" and model in manifest.objects:
        return {**manifest.objects[model].tensors, **record.tensors}, model
    return dict(record.tensors), name


def _rename(tensors: dict[str, TensorRecord], names: object) -> dict[str, TensorRecord]:
    """Return tensors under the names that files give them.

    Args:
        tensors: By serial name.
        names: Names in files by serial name, of those that differ; anything else changes nothing.
    """
    found: dict[str, TensorRecord] = {}
    for key, tensor in tensors.items():
        targets = names.get(key) if isinstance(names, dict) else None
        for target in [key] if targets is None else targets:
            found[str(target)] = tensor
    return found
