"""Import: weights that others have written, read by every rank for its own boxes only.

The one idea: names and shapes of all files are known from their headers, so everything that can be wrong is
found before a weight changes; then each box of a tensor is read by its rows, once, into every place of this
rank that holds a part of it: the masters, and the values that are rounded from them.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, final

import torch
from attrs import evolve, field, frozen

from colossal_core.boxes import Box
from colossal_core.checkpoint.safetensors_format import ITEM_BYTES
from colossal_core.errors import CheckpointError
from colossal_core.plugins.agreement import explain_disagreement
from colossal_core.runtime.checkpointing.exporting import long_agreement
from colossal_core.runtime.checkpointing.hub import (
    Conversion,
    Form,
    drop_ignored,
    plan_reading,
    stored_names,
)
from colossal_core.runtime.checkpointing.report import LoadReport
from colossal_core.runtime.checkpointing.rows import DTYPES, inside, read_box, split_box
from colossal_core.runtime.checkpointing.shards import (
    DTYPE_NAMES,
    Collected,
    Holding,
    Spec,
    model_holdings,
)
from colossal_core.runtime.checkpointing.stored_weights import StoredWeights, find_weights

if TYPE_CHECKING:
    from torch import nn

    from colossal_core.runtime.engine import Engine

__all__ = ["import_model"]


@frozen(kw_only=True, eq=False)
class _Plan:
    """What all ranks know about an import before a weight changes.

    Attributes:
        weights: The files.
        collected: What this rank holds, masters and the values beside them.
        plain: Names in files by name in the model, of what is read as it is; several where tied weights are
            stored more than once.
        made: Conversions, with the name in the model of each result that is taken.
        report: What does not fit, and what was adapted.
    """

    weights: StoredWeights
    collected: Collected = field(repr=False)
    plain: Mapping[str, Sequence[str]]
    made: Sequence[tuple[Conversion, Mapping[str, str]]]
    report: LoadReport


def import_model(
    engine: Engine, model: nn.Module, directory: str | Path, *, strict: bool = True
) -> LoadReport:
    """Read weights that others have written into a boosted model; collective over all ranks.

    Each rank reads only the rows of its own boxes, whatever the plan; what has another form in files (experts
    one by one) it reads whole where it holds a part of the result. Masters take the stored values, and 16-bit
    values are rounded from them. Optimizer states stay as they are.

    Args:
        engine: The built pieces.
        model: One of the boosted models.
        directory: A directory with ``model.safetensors``, or an index and its files, or one such file.
        strict: Whether missing, unexpected and differently shaped tensors are errors. Otherwise they are
            reported, and what the files do not give stays as it is.

    Returns:
        What was found, cast and left out.

    Raises:
        CheckpointError: Files are missing, damaged, or no safetensors files, or do not fit the model.
        RankMismatchError: Another rank failed, or sees other files.
    """
    path = Path(directory)
    plan = engine.agreement.attempt("import_weights", lambda: _plan(engine, model, path, strict=strict))
    engine.agreement.compare("the weights to import", _lines(plan), explain_disagreement)
    reading = _Reading(engine, engine.name_of(model), plan)
    try:
        long_agreement(engine).attempt("import_weights: read", reading.read_all)
    finally:
        reading.close()
    engine.manager.publish_values()
    return evolve(plan.report, bytes_read=reading.bytes_read)


# --- planning -----------------------------------------------------------------------------------------------


def _plan(engine: Engine, model: nn.Module, path: Path, *, strict: bool) -> _Plan:
    """Decide what comes from where; the same on all ranks, without communication.

    Raises:
        CheckpointError: Something does not fit, and ``strict`` is set.
    """
    weights = find_weights(path)
    collected = model_holdings(engine, engine.name_of(model), borrowed=True)
    specs = collected.specs
    first = {name: key for key, spec in specs.items() for name in (key, *spec.aliases)}
    wanted = {name: Form(specs[key].dtype, specs[key].shape) for name, key in first.items()}
    names = plan_reading(model, {name: weights.form_of(name) for name in weights.tensors}, wanted)
    findings = _Findings(weights, specs)
    plain: dict[str, list[str]] = {}
    for source, target in names.renamed.items():
        if findings.fits(target, first[target], (source,), weights.form_of(source).shape):
            plain.setdefault(first[target], []).append(source)
    made = []
    for conversion in names.conversions:
        taken = {
            target: first[target]
            for target, form in conversion.targets.items()
            if first[target] not in plain
            and findings.fits(target, first[target], conversion.sources, form.shape)
        }
        made.append((conversion, taken))
    used = {*names.renamed, *(name for conversion in names.conversions for name in conversion.sources)}
    kept = stored_names(model, {key: (key, *spec.aliases) for key, spec in specs.items()})
    missing, unexpected = drop_ignored(
        model,
        [key for key in specs if kept[key] and key not in findings.found_as],
        [name for name in weights.tensors if name not in used],
    )
    report = findings.report(missing, unexpected)
    if strict and report.problems:
        lines = "".join(f"\n  {problem}" for problem in report.problems)
        raise CheckpointError(
            f"the weights in {path} do not fit the model:{lines}", hint=_advise(report, names.note)
        )
    return _Plan(weights=weights, collected=collected, plain=plain, made=made, report=report)


@final
class _Findings:
    """What is noted about tensors that are in the files and in the model.

    Attributes:
        found_as: Names under which each tensor of the model was found, by its first name.
    """

    def __init__(self, weights: StoredWeights, specs: Mapping[str, Spec]) -> None:
        self.found_as: dict[str, list[str]] = {}
        self._weights, self._specs = weights, specs
        self._fitting: set[str] = set()
        self._reshaped: list[str] = []
        self._cast: list[str] = []

    def fits(self, target: str, key: str, sources: Sequence[str], shape: tuple[int, ...]) -> bool:
        """Note one tensor, and return whether it has the shape of the model's.

        Args:
            target: A name of the tensor in the model.
            key: The first of its names.
            sources: What it is made of in the files.
            shape: What shape that has.
        """
        spec = self._specs[key]
        self.found_as.setdefault(key, []).append(target)
        if shape != spec.shape:
            self._reshaped.append(f"{target} {shape}, here {spec.shape}")
            return False
        dtypes = {self._weights.tensors[name][1].dtype for name in sources}
        if any(DTYPES[dtype] != spec.dtype for dtype in dtypes):
            wanted = DTYPE_NAMES.get(spec.dtype, str(spec.dtype))
            self._cast.append(f"{target} from {', '.join(sorted(dtypes))} to {wanted}")
        self._fitting.add(key)
        return True

    def report(self, missing: Sequence[str], unexpected: Sequence[str]) -> LoadReport:
        """Return it as a value."""
        return LoadReport(
            loaded=len(self._fitting),
            missing=tuple(missing),
            unexpected=tuple(unexpected),
            reshaped=tuple(self._reshaped),
            cast=tuple(self._cast),
            aliased=tuple(f"{key} as {names[0]}" for key, names in self.found_as.items() if key not in names),
        )


def _advise(report: LoadReport, note: str) -> str:
    """Return the next step for weights that do not fit."""
    steps = [note] if note else []
    if report.reshaped:
        steps.append(
            "give the model these shapes before boost (a vocabulary with model.resize_token_embeddings)"
        )
    kept = "missing and differently shaped tensors then stay as they are, unexpected ones are left out"
    steps.append(f"check that it is the right model, or pass strict=False: {kept}")
    return "; ".join(steps)


def _lines(plan: _Plan) -> list[str]:
    """Describe the files for the comparison of ranks."""
    return [
        f"{path.name}: {name} {stored.dtype} {stored.shape} at byte {stored.start}"
        for name, (path, stored) in plan.weights.tensors.items()
    ]


# --- reading ------------------------------------------------------------------------------------------------


@final
class _Reading:
    """The files of one import on this rank.

    Attributes:
        bytes_read: Bytes of tensors read so far.
    """

    def __init__(self, engine: Engine, model: str, plan: _Plan) -> None:
        self.bytes_read = 0
        self._engine, self._model, self._plan = engine, model, plan
        self._handles: dict[Path, io.FileIO] = {}

    def close(self) -> None:
        """Close the files."""
        for handle in self._handles.values():
            handle.close()

    @torch.no_grad()
    def read_all(self) -> None:
        """Fill everything that this rank holds.

        Raises:
            CheckpointError: A file cannot be read, or holds two values of one tensor.
        """
        held: dict[str, list[Holding]] = {}
        for holding in self._plan.collected.holdings:
            held.setdefault(holding.name, []).append(holding)
        # What may still be wrong comes first.
        for key in sorted(self._plan.plain, key=lambda key: -len(self._plan.plain[key])):
            self._fill(key, self._plan.plain[key], held.get(key, ()))
        for conversion, taken in self._plan.made:
            self._fill_converted(
                conversion, {target: held[key] for target, key in taken.items() if key in held}
            )
        # A backward through a graph from before would use the new weights: torch shall refuse it.
        table = self._engine.context.table
        torch.autograd.graph.increment_version(
            [
                parameter
                for entry, parameter in table.parameters()
                if any(owner == self._model for owner, _ in (entry.key, *entry.aliases))
            ]
        )

    def _fill(self, key: str, names: Sequence[str], holdings: Sequence[Holding]) -> None:
        """Read what this rank holds of one tensor, block by block.

        Raises:
            CheckpointError: The files hold several values of it.
        """
        dtype = self._plan.collected.specs[key].dtype
        item_bytes = ITEM_BYTES[self._plan.weights.tensors[names[0]][1].dtype]
        for box in _outermost([held.box for held in holdings]):
            for block in split_box(box, item_bytes):
                values = self._read(names[0], block).to(dtype)
                for other in names[1:]:
                    again = self._read(other, block).to(dtype)
                    if not torch.equal(values.view(-1).view(torch.uint8), again.view(-1).view(torch.uint8)):
                        raise CheckpointError(
                            f"{names[0]!r} and {other!r} are one tensor in the model, but differ in "
                            f"{self._plan.weights.directory}",
                            hint="untie them before boost (tie_word_embeddings=False in the config)",
                        )
                _copy(values, block, holdings)

    def _fill_converted(self, conversion: Conversion, holdings: Mapping[str, Sequence[Holding]]) -> None:
        """Read what some results of a conversion are made of, and fill what this rank holds of them.

        Raises:
            CapabilityError: The conversion fails.
        """
        if not holdings:
            return
        forms = {name: self._plan.weights.form_of(name) for name in conversion.sources}
        boxes = {target: [held.box for held in theirs] for target, theirs in holdings.items()}
        needed = conversion.needed(forms, boxes)
        # What no element here is made of is there in form only, or zero and not touched.
        blank = torch.zeros((), dtype=conversion.dtype)
        sources = {
            name: self._read_part(name, needed[name]) if name in needed else blank.expand(form.shape)
            for name, form in forms.items()
        }
        found = conversion.convert(sources)
        for target, theirs in holdings.items():
            tensor = found[target].to(self._plan.collected.specs[theirs[0].name].dtype)
            _copy(tensor, Box((0,) * tensor.dim(), tuple(tensor.shape)), theirs)

    def _read_part(self, name: str, box: Box) -> torch.Tensor:
        """Return a whole tensor of which a box was read; one without elements has none."""
        form = self._plan.weights.form_of(name)
        if box.volume == 0:
            return torch.empty(form.shape, dtype=form.dtype)
        values = self._read(name, box)
        if box.size == form.shape:
            return values
        whole = torch.zeros(form.shape, dtype=values.dtype)
        whole[box.slices] = values
        return whole

    def _read(self, name: str, box: Box) -> torch.Tensor:
        """Read a box of a tensor.

        Raises:
            CheckpointError: The file cannot be read, or is shorter than before.
        """
        path, stored = self._plan.weights.tensors[name]
        try:
            if path not in self._handles:
                self._handles[path] = io.FileIO(path)
            values = read_box(self._handles[path], stored, box)
        except (OSError, EOFError) as err:
            raise CheckpointError(
                f"cannot read {name!r} from {path}: {err}",
                hint="the model now has some of the weights: restore the file and import again",
            ) from err
        self.bytes_read += values.nbytes
        return values


def _copy(values: torch.Tensor, box: Box, holdings: Sequence[Holding]) -> None:
    """Copy a box of a tensor, in the masters' dtype, into all places that hold a part of it."""
    for held in holdings:
        common = box.intersect(held.box)
        if common is not None:
            with held.present():
                held.view[inside(common, held.box)].copy_(values[inside(common, box)])


def _outermost(boxes: Sequence[Box]) -> Iterator[Box]:
    """Yield the boxes that lie in no other, each once."""
    kept: list[Box] = []
    for box in sorted(boxes, key=lambda box: -box.volume):
        if not any(box.intersect(outer) == box for outer in kept):
            kept.append(box)
            yield box
