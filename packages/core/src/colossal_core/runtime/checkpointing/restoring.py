"""Loading: which stored boxes meet what this rank holds, and everything else that a run goes on with.

The one idea: first compare names and shapes, which all ranks do alike and before anything changes; then each
rank reads the blocks that hold elements of its own boxes and copies those, whoever wrote them.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
from attrs import define, field

from colossal_core.boxes import Box
from colossal_core.checkpoint.directory import (
    MANIFEST_NAME,
    missing_checkpoint,
    read_manifest,
    resolve_checkpoint,
)
from colossal_core.checkpoint.manifest import Manifest, ObjectRecord, TensorRecord
from colossal_core.checkpoint.reading import Block, BlockReader
from colossal_core.errors import RankMismatchError, UsageError
from colossal_core.runtime.checkpointing.parts import random_file_name
from colossal_core.runtime.checkpointing.report import Loaded, LoadReport
from colossal_core.runtime.checkpointing.run_state import (
    matching_rank,
    optimizer_difference,
    restore_model_details,
    restore_optimizer_details,
    restore_random,
    restore_run_state,
    run_differences,
)
from colossal_core.runtime.checkpointing.saving import average_name, optimizer_name
from colossal_core.runtime.checkpointing.shards import (
    DTYPE_NAMES,
    Collected,
    Holding,
    average_holdings,
    model_holdings,
    optimizer_holdings,
    qualified_name,
)
from colossal_core.runtime.checkpointing.values import unpack_values

if TYPE_CHECKING:
    from colossal_core.runtime.agreement import Agreement
    from colossal_core.runtime.engine import Engine

__all__ = ["copy_block", "load_checkpoint"]

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@final
@define
class _Findings:
    """What is noted on the way, under names that say the object where there are several."""

    loaded: int = 0
    missing: list[str] = field(factory=list)
    unexpected: list[str] = field(factory=list)
    reshaped: list[str] = field(factory=list)
    different: list[str] = field(factory=list)
    cast: list[str] = field(factory=list)
    aliased: list[str] = field(factory=list)

    def report(self, bytes_read: int = 0) -> LoadReport:
        """Return it as a value."""
        return LoadReport(
            loaded=self.loaded,
            missing=tuple(self.missing),
            unexpected=tuple(self.unexpected),
            reshaped=tuple(self.reshaped),
            different=tuple(self.different),
            cast=tuple(self.cast),
            aliased=tuple(self.aliased),
            bytes_read=bytes_read,
        )


def load_checkpoint(
    engine: Engine, root: Path, agreement: Agreement, *, missing_ok: bool, strict: bool
) -> Loaded | None:
    """Load a checkpoint into everything that was boosted; see ``Booster.load``; collective over all ranks."""
    directory = _choose(engine, root, missing_ok=missing_ok)
    if directory is None:
        return None
    manifest = agreement.attempt("read the manifest", lambda: read_manifest(directory))
    _compare_manifests(agreement, directory)
    findings = _Findings()
    pairs = list(_match_models(engine, manifest, findings))
    _match_optimizers(engine, manifest, findings)
    findings.different.extend(run_differences(engine, manifest.run))
    pairs += _match_averages(engine, manifest, findings)
    if strict:
        findings.report().check(directory)
    with BlockReader(directory, manifest) as reader:
        agreement.attempt(
            "load the checkpoint",
            lambda: _fill_everything(engine, manifest, reader, pairs, findings),
        )
        bytes_read = reader.bytes_read
    engine.manager.publish_values()
    return Loaded(
        path=directory,
        step=manifest.step,
        epoch=manifest.epoch,
        samples=manifest.samples,
        extra=unpack_values(manifest.extra),
        report=findings.report(bytes_read),
    )


# --- which one ----------------------------------------------------------------------------------------------


def _choose(engine: Engine, root: Path, *, missing_ok: bool) -> Path | None:
    """Return the checkpoint that rank 0 finds, on all ranks.

    Raises:
        CheckpointError: There is none.
        UsageError: Ranks look into different directories.
    """
    agreement, rank = engine.agreement, engine.context.mesh.rank
    found = resolve_checkpoint(root) if rank == 0 else None
    texts = agreement.share("load from", f"{root}\n{'' if found is None else found}")
    roots = [text.partition("\n")[0] for text in texts]
    different = [other for other, text in enumerate(roots) if text != roots[0]]
    if different:
        raise UsageError(
            f"rank {different[0]} loads from {roots[different[0]]}, rank 0 from {roots[0]}",
            hint="pass the same directory on all ranks; all of them have to see it",
        )
    chosen = texts[0].partition("\n")[2]
    if not chosen:
        if missing_ok:
            return None
        raise missing_checkpoint(root)
    return Path(chosen)


def _compare_manifests(agreement: Agreement, directory: Path) -> None:
    """Check that all ranks see the same file.

    Raises:
        RankMismatchError: They do not.
    """
    digest = hashlib.sha256((directory / MANIFEST_NAME).read_bytes()).hexdigest()
    digests = agreement.share("manifest", digest)
    different = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if different:
        raise RankMismatchError(
            f"ranks {different} see another {directory / MANIFEST_NAME} than rank 0",
            hint="load from a directory that all machines share, while nobody saves into it",
        )


# --- what meets what ----------------------------------------------------------------------------------------

Pair = tuple[str, TensorRecord, list[Holding]]
"""Name of a stored tensor, the tensor, and where this rank holds elements of it."""


def _match_models(engine: Engine, manifest: Manifest, findings: _Findings) -> Iterator[Pair]:
    """Yield the tensors of models that fit, and note what does not."""
    stored = {name: record for name, record in manifest.objects.items() if record.kind == "model"}
    for name in engine.models:
        prefix = "" if len(engine.models) == 1 and len(stored) <= 1 else f"{name}: "
        record = stored.pop(name, None)
        wanted = model_holdings(engine, name)
        yield from _match(prefix, record, wanted, findings)
    findings.unexpected.extend(f"model {name!r}" for name in stored)


def _match_optimizers(engine: Engine, manifest: Manifest, findings: _Findings) -> None:
    """Note whether there are as many optimizers as are stored; their states are matched when allocated."""
    stored = {name for name, record in manifest.objects.items() if record.kind == "optimizer"}
    wanted = {optimizer_name(index) for index in range(len(engine.optimizers))}
    findings.missing.extend(f"the state of {name!r}" for name in sorted(wanted - stored))
    findings.unexpected.extend(f"{name!r}" for name in sorted(stored - wanted))
    table = engine.context.table
    known = {qualified_name(engine, entry.key): entry.shape for entry in table}
    for index in range(len(engine.optimizers)):
        name = optimizer_name(index)
        if name not in stored:
            continue
        difference = optimizer_difference(engine, index, manifest.objects[name].details)
        findings.different.extend([difference] if difference else [])
        for parameter, states in _states_of(manifest.objects[name]).items():
            shape = next(iter(states.values())).shape
            if parameter not in known:
                findings.unexpected.append(f"{name}: {parameter}")
            elif known[parameter] != shape:
                findings.reshaped.append(f"{name}: {parameter} {shape}, here {known[parameter]}")


def _match_averages(engine: Engine, manifest: Manifest, findings: _Findings) -> Iterator[Pair]:
    """Yield the tensors of running averages that fit, and note what does not."""
    stored = {name: record for name, record in manifest.objects.items() if record.kind == "average"}
    for index, (model, average) in enumerate(engine.averages):
        name = average_name(index)
        wanted = average_holdings(engine, model, average)
        yield from _match(f"{name}: ", stored.pop(name, None), wanted, findings)
    findings.unexpected.extend(f"{name!r} (call booster.average() before load)" for name in stored)


def _match(
    prefix: str, record: ObjectRecord | None, wanted: Collected, findings: _Findings
) -> Iterator[Pair]:
    """Yield the tensors of one object that fit, and note what does not."""
    stored = {} if record is None else record.tensors
    by_alias = {alias: name for name, tensor in stored.items() for alias in tensor.aliases}
    used = set()
    held: dict[str, list[Holding]] = {}
    for holding in wanted.holdings:
        held.setdefault(holding.name, []).append(holding)
    for name, spec in wanted.specs.items():
        found = next((n for n in (name, *spec.aliases) if n in stored), None)
        if found is None:
            found = next((by_alias[n] for n in (name, *spec.aliases) if n in by_alias), None)
        if found is None:
            findings.missing.append(f"{prefix}{name}")
            continue
        used.add(found)
        tensor = stored[found]
        if tensor.shape != spec.shape:
            findings.reshaped.append(f"{prefix}{name} {tensor.shape}, here {spec.shape}")
            continue
        if found != name:
            findings.aliased.append(f"{prefix}{name} as {found}")
        if _DTYPES[tensor.dtype] != spec.dtype:
            findings.cast.append(f"{prefix}{name} from {tensor.dtype} to {DTYPE_NAMES.get(spec.dtype)}")
        findings.loaded += 1
        yield f"{prefix}{found}", tensor, held.get(name, [])
    findings.unexpected.extend(f"{prefix}{name}" for name in stored if name not in used)


def _states_of(record: ObjectRecord) -> dict[str, dict[str, TensorRecord]]:
    """Return the stored states of an optimizer by parameter and name of the state."""
    found: dict[str, dict[str, TensorRecord]] = {}
    for name, tensor in record.tensors.items():
        parameter, _, state = name.rpartition(".")
        found.setdefault(parameter, {})[state] = tensor
    return found


# --- filling ------------------------------------------------------------------------------------------------


@torch.no_grad()
def _fill_everything(
    engine: Engine,
    manifest: Manifest,
    reader: BlockReader,
    pairs: Sequence[Pair],
    findings: _Findings,
) -> None:
    """Bring everything on this rank where it was; the first thing that changes something."""
    for name, tensor, holdings in pairs:
        _fill(reader, name, tensor, holdings)
    for name, model in engine.models.items():
        if name in manifest.objects:
            restore_model_details(model, manifest.objects[name].details)
    for index in range(len(engine.optimizers)):
        record = manifest.objects.get(optimizer_name(index))
        if record is not None:
            _fill_optimizer(engine, index, record, reader, findings)
    for index, (_, average) in enumerate(engine.averages):
        record = manifest.objects.get(average_name(index))
        if record is not None:
            average.num_updates = int(record.details["num_updates"])
    engine.progress.num_steps = manifest.step
    restore_run_state(engine, manifest.run)
    _restore_random(engine, manifest, reader)


def _fill_optimizer(
    engine: Engine, index: int, record: ObjectRecord, reader: BlockReader, findings: _Findings
) -> None:
    """Bring one optimizer where it was, unless it is another one."""
    if optimizer_difference(engine, index, record.details):
        return
    name = optimizer_name(index)
    known = {qualified_name(engine, entry.key): entry.shape for entry in engine.context.table}
    states: dict[str, dict[str, torch.dtype]] = {
        parameter: {state: _DTYPES[tensor.dtype] for state, tensor in theirs.items()}
        for parameter, theirs in _states_of(record).items()
        if all(known.get(parameter) == tensor.shape for tensor in theirs.values())
    }
    restore_optimizer_details(engine, index, record.details, states)
    collected = optimizer_holdings(engine, index)
    held: dict[str, list[Holding]] = {}
    for holding in collected.holdings:
        held.setdefault(holding.name, []).append(holding)
    for tensor_name, holdings in held.items():
        _fill(reader, f"{name}: {tensor_name}", record.tensors[tensor_name], holdings)
    findings.loaded += sum(map(len, states.values()))


def _fill(reader: BlockReader, name: str, tensor: TensorRecord, holdings: Sequence[Holding]) -> None:
    """Read the blocks that hold elements of some boxes, and copy those."""
    if not holdings:
        return
    with ExitStack() as stack:
        for held in holdings:
            stack.enter_context(held.present())
        for block in reader.read_boxes(name, tensor, [held.box for held in holdings]):
            copy_block(block, _DTYPES[tensor.dtype], holdings)


def copy_block(block: Block, dtype: torch.dtype, holdings: Sequence[Holding]) -> None:
    """Copy the elements of a block into every box that they belong to."""
    flat = torch.frombuffer(block.data, dtype=dtype)
    for box, start in block.boxes():
        values = flat[start : start + box.volume].view(box.size)
        for held in holdings:
            common = box.intersect(held.box)
            if common is not None:
                source = values[_inside(common, box)]
                held.view[_inside(common, held.box)].copy_(source)


def _inside(box: Box, outer: Box) -> tuple[slice, ...]:
    """Return the index expression of a box in another one that contains it."""
    return box.shifted([-start for start in outer.offset]).slices


def _restore_random(engine: Engine, manifest: Manifest, reader: BlockReader) -> None:
    """Bring the generators of this rank where they were."""
    run: Mapping[str, Any] = manifest.run
    rank = matching_rank(engine, run)
    text = None
    if rank is not None:
        name = random_file_name(rank, str(manifest.plan["mark"]))
        handle = reader.open(name)  # checks the size and all bytes of the file
        os.lseek(handle, 0, os.SEEK_SET)
        text = os.read(handle, manifest.files[name].num_bytes).decode()
    restore_random(engine, run, text, manifest.step)
