"""Export: plain safetensors files with serial names, which ``from_pretrained`` reads.

The one idea: where each tensor lies in which file follows from shapes alone, so one rank makes files of the
right size and every rank writes its own boxes into them, block by block; nobody ever holds the model. Only
tensors that the hub stores in another form (experts one by one) are put together, one group at a time.
"""

from __future__ import annotations

import hashlib
import io
import os
import secrets
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, final

import torch
from attrs import evolve, field, frozen

from colossal_core.boxes import Box
from colossal_core.checkpoint.export_directory import (
    MAX_SHARD_BYTES,
    ExportPlan,
    TensorSpec,
    check_target,
    clear_export,
    create_shard,
    plan_export,
    publish_export,
    temporary_path,
)
from colossal_core.checkpoint.safetensors_format import Stored
from colossal_core.errors import CheckpointError, ColossalError, UsageError
from colossal_core.plugins.agreement import explain_disagreement
from colossal_core.runtime.agreement import Agreement
from colossal_core.runtime.checkpointing.hub import (
    Conversion,
    Form,
    configuration_texts,
    plan_writing,
    stored_names,
)
from colossal_core.runtime.checkpointing.rows import write_box
from colossal_core.runtime.checkpointing.shards import (
    Collected,
    Holding,
    average_holdings,
    deal,
    dtype_name,
    model_holdings,
)
from colossal_core.runtime.launch import rendezvous_store
from colossal_core.runtime.precision import DTYPES

if TYPE_CHECKING:
    from torch import nn

    from colossal_core.runtime.averages import Average
    from colossal_core.runtime.engine import Engine

__all__ = ["export_model", "long_agreement"]

WRITING_SECONDS = 3600.0
"""How long ranks wait for each other while they read and write: the slowest disk decides."""

_HINT = "free space or choose another directory; an earlier export is as it was"


@frozen(kw_only=True, eq=False)
class _Plan:
    """What all ranks know about an export before anything is written.

    Attributes:
        export: The files.
        targets: Names in files of each tensor that is written as it is, by its name in the model.
        conversions: What is written in another form.
        serial: Name in the model by stored name, of what goes into conversions.
        forms: Dtype and serial shape by stored name.
        holdings: What this rank writes of the model.
        note: What the user has to know.
    """

    export: ExportPlan
    targets: Mapping[str, tuple[str, ...]]
    conversions: tuple[Conversion, ...]
    serial: Mapping[str, str]
    forms: Mapping[str, Form]
    holdings: list[Holding] = field(repr=False)
    note: str


def export_model(
    engine: Engine,
    model: nn.Module,
    directory: str | Path,
    *,
    dtype: str | torch.dtype | None = None,
    max_file_bytes: int = MAX_SHARD_BYTES,
    average: Average | None = None,
) -> Path:
    """Write a model as plain safetensors files; collective over all ranks, complete when it returns.

    Tensors have their serial names (for models of transformers: the names and forms in which the hub stores
    them), tied ones are written once, and configuration files lie beside. Readers see an earlier export until
    the new one is complete.

    Args:
        engine: The built pieces.
        model: One of the boosted models.
        directory: Where to; one directory that all ranks see. Missing, empty, or an earlier export.
        dtype: Dtype of floating tensors, ``"bf16"`` for example; that of the masters when None.
        max_file_bytes: Bytes of tensors in one file; what is larger is divided, with an index.
        average: A running average of the model, whose values are written in place of the model's; what it
            does not average, such as buffers, is the model's.

    Returns:
        The directory.

    Raises:
        UsageError: The model was not boosted here, the average is of another one, or the dtype is none to
            store weights in.
        CheckpointError: The directory holds foreign files or is not shared, or the disk refuses.
        RankMismatchError: Another rank failed, or was asked for something else.
    """
    path = Path(directory)
    is_first = engine.context.mesh.rank == 0
    plan = engine.agreement.attempt(
        "export",
        lambda: _plan(
            engine,
            model,
            _collect(engine, engine.name_of(model), average),
            dtype=dtype,
            max_file_bytes=max_file_bytes,
        ),
    )
    engine.agreement.compare("the export", _lines(plan), explain_disagreement)

    def warn_once() -> None:
        if plan.note and is_first:
            warnings.warn(plan.note, stacklevel=5)  # the line that calls export()

    engine.agreement.attempt("export: warn", warn_once)  # a filter may turn it into an error
    agreement = long_agreement(engine)
    mark = agreement.share("mark of the export", secrets.token_hex(6) if is_first else "")[0]
    writing = _Writing(engine, plan, path, mark)
    try:
        agreement.attempt("export: make files", writing.create)
        agreement.attempt("export: find files", writing.open)
        agreement.attempt("export: write", writing.write_all)
        agreement.attempt("export: publish", writing.publish)
    except BaseException:
        if is_first:
            clear_export(path, mark)
        raise
    finally:
        writing.close()
    return path


def long_agreement(engine: Engine) -> Agreement:
    """Return what ranks agree through while they read and write, which takes some longer than others."""
    mesh = engine.context.mesh
    return Agreement(rendezvous_store(), mesh.rank, mesh.layout.world_size, timeout_seconds=WRITING_SECONDS)


# --- planning -----------------------------------------------------------------------------------------------


def _collect(engine: Engine, name: str, average: Average | None) -> Collected:
    """Return what this rank holds of a model, or of its average.

    Raises:
        UsageError: The average is of another model, or one is shown at this moment.
    """
    collected = model_holdings(engine, name, borrowed=True)
    if average is None and any(owner == name and other.is_shown for owner, other in engine.averages):
        raise UsageError(
            f"export of model {name!r} inside average.applied()",
            hint="outside of it, booster.export(model, directory, average=average) writes the averages",
        )
    if average is None:
        return collected
    if not any(owner == name and other is average for owner, other in engine.averages):
        raise UsageError(
            f"the average is not one of model {name!r}",
            hint="pass what booster.average(model, decay) returned",
        )
    averaged = average_holdings(engine, name, average)
    specs = {
        key: evolve(spec, dtype=averaged.specs[key].dtype) if key in averaged.specs else spec
        for key, spec in collected.specs.items()
    }
    others = [held for held in collected.holdings if held.name not in averaged.specs]
    return Collected(specs=specs, holdings=[*others, *averaged.holdings])


def _plan(
    engine: Engine,
    model: nn.Module,
    collected: Collected,
    *,
    dtype: str | torch.dtype | None,
    max_file_bytes: int,
) -> _Plan:
    """Decide what is written where; the same on all ranks, without communication."""
    wanted = _read_dtype(dtype)
    kept = {
        name: Form(wanted if wanted is not None and spec.dtype.is_floating_point else spec.dtype, spec.shape)
        for name, spec in collected.specs.items()
    }
    stored = stored_names(model, {name: (name, *spec.aliases) for name, spec in collected.specs.items()})
    serial = {other: name for name, names in stored.items() for other in names}
    forms = {other: kept[name] for other, name in serial.items()}
    names = plan_writing(model, forms)
    files = {target: forms[source] for source, target in names.renamed.items()}
    for conversion in names.conversions:
        files.update(conversion.targets)
    specs = [
        TensorSpec(name=name, dtype=dtype_name(form.dtype, name), shape=form.shape)
        for name, form in files.items()
    ]
    floating = next((form.dtype for form in kept.values() if form.dtype.is_floating_point), None)
    return _Plan(
        export=plan_export(
            specs, max_bytes=max_file_bytes, configurations=configuration_texts(model, floating)
        ),
        targets={
            name: tuple(names.renamed[other] for other in others if other in names.renamed)
            for name, others in stored.items()
        },
        conversions=names.conversions,
        serial=serial,
        forms=forms,
        holdings=deal(collected.holdings, engine.context.mesh.rank),
        note=names.note,
    )


def _read_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """Return a dtype by its name or as it is.

    Raises:
        UsageError: Weights are not stored in it.
    """
    found = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if dtype is not None and found not in DTYPES.values():
        raise UsageError(
            f"export cannot write weights as {dtype!r}", hint=f"use one of {', '.join(map(repr, DTYPES))}"
        )
    return found


def _lines(plan: _Plan) -> list[str]:
    """Describe the files for the comparison of ranks."""
    lines = []
    for shard in plan.export.shards:
        lines.append(f"{shard.file}: header {hashlib.sha256(shard.header.raw).hexdigest()}")
        lines += [
            f"{shard.file}: {name} {stored.dtype} {stored.shape}"
            for name, stored in shard.header.tensors.items()
        ]
    return [*lines, *(f"beside: {name}" for name in plan.export.texts)]


# --- writing ------------------------------------------------------------------------------------------------


@final
class _Writing:
    """The files of one export on this rank, from the first byte to the last name."""

    def __init__(self, engine: Engine, plan: _Plan, directory: Path, mark: str) -> None:
        self._engine, self._plan = engine, plan
        self._directory, self._mark = directory, mark
        self._is_first = engine.context.mesh.rank == 0
        self._files = ExitStack()
        self._handles: dict[str, io.FileIO] = {}
        self._where = {
            name: (shard.file, stored)
            for shard in plan.export.shards
            for name, stored in shard.header.tensors.items()
        }

    def create(self) -> None:
        """Make files of the right size, under names that no reader looks for; the first rank does.

        Raises:
            CheckpointError: The directory holds foreign files, or the disk refuses.
        """
        if self._is_first:
            check_target(self._directory)
            for shard in self._plan.export.shards:
                create_shard(self._directory, shard, self._mark)

    def open(self) -> None:
        """Open the files that the first rank has made.

        Raises:
            CheckpointError: This rank does not see them.
        """
        for shard in self._plan.export.shards:
            path = temporary_path(self._directory, shard.file, self._mark)
            try:
                handle = self._files.enter_context(io.FileIO(path, "r+b"))
            except OSError as err:
                raise CheckpointError(
                    f"rank {self._engine.context.mesh.rank} cannot open {path}, which rank 0 has made: "
                    f"{err.strerror or err}",
                    hint="export into one directory that all ranks share",
                ) from err
            self._handles[shard.file] = handle

    def write_all(self) -> None:
        """Write this rank's share and close the files; collective where tensors are put together.

        Raises:
            CheckpointError: The disk refuses.
        """
        error: ColossalError | None = None
        try:
            for held in self._plan.holdings:
                for name in self._plan.targets[held.name]:
                    with held.present():
                        self._write(name, held.box, held.view)
        except ColossalError as err:
            error = err
        for conversion in self._plan.conversions:
            # A rank that failed goes on with its part of the messages, since the others wait for them.
            sources = {name: self._gather(name) for name in conversion.sources}
            try:
                if error is None:
                    self._convert(conversion, sources)
            except ColossalError as err:
                error = err
        if error is None:
            error = self._sync()
        self.close()
        if error is not None:
            raise error

    def publish(self) -> None:
        """Let the names of the files appear; the first rank does.

        Raises:
            CheckpointError: The disk refuses.
        """
        if self._is_first:
            publish_export(self._directory, self._plan.export, self._mark)

    def close(self) -> None:
        """Close the files."""
        self._files.close()

    def _convert(self, conversion: Conversion, sources: dict[str, torch.Tensor]) -> None:
        """Convert some tensors, and write those of the results that are this rank's."""
        mesh = self._engine.context.mesh
        found = conversion.convert(sources)
        for index, name in enumerate(conversion.targets):
            if index % mesh.layout.world_size == mesh.rank:
                whole = Box((0,) * found[name].dim(), tuple(found[name].shape))
                self._write(name, whole, found[name])

    def _gather(self, stored_name: str) -> torch.Tensor:
        """Return a whole tensor of the model, in the dtype of the export; collective."""
        context, form = self._engine.context, self._plan.forms[stored_name]
        full = torch.zeros(form.shape, dtype=form.dtype, device=context.mesh.device)
        for held in self._plan.holdings:
            if held.name == self._plan.serial[stored_name]:
                with held.present():
                    full[held.box.slices].copy_(held.view)
        if full.numel() == 0:
            return full
        # Each element is written on one rank only, so the sum of the bits as integers is the bits.
        as_integers = next(
            kind for kind in (torch.int64, torch.int32, torch.uint8) if full.nbytes % kind.itemsize == 0
        )
        bits = full.view(-1).view(torch.uint8).view(as_integers)
        context.collectives.all_reduce(bits, context.mesh.everyone(), phase="export").wait()
        return full

    def _write(self, name: str, box: Box, values: torch.Tensor) -> None:
        """Write a box of a tensor.

        Raises:
            CheckpointError: The disk refuses.
        """
        file, stored = self._where[name]
        try:
            write_box(self._handles[file], stored, box, values)
        except OSError as err:
            raise self._refusal(name, file, stored, err) from err

    def _sync(self) -> CheckpointError | None:
        """Wait until the disk has what this rank wrote; other machines do not know of it."""
        for file, handle in self._handles.items():
            try:
                os.fsync(handle.fileno())
            except OSError as err:
                return CheckpointError(
                    f"cannot write {self._directory / file}: {err.strerror or err}", hint=_HINT
                )
        return None

    def _refusal(self, name: str, file: str, stored: Stored, err: OSError) -> CheckpointError:
        """Return the error for a tensor that the disk refuses."""
        return CheckpointError(
            f"cannot write {name!r}, bytes {stored.start} to {stored.stop} of {self._directory / file}: "
            f"{err.strerror or err}",
            hint=_HINT,
        )
