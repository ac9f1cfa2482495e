"""Import: weights that others have written, read by every rank for its own boxes only.

The one idea: names and shapes of all files are known from their headers, so everything that can be wrong is
found before a weight changes; then each box of a tensor is read by its rows, once, into every place of this
rank that holds a part of it: the masters, and the values that are rounded from them.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, final

import torch
from attrs import evolve, field, frozen

from colossal_core.boxes import Box
from colossal_core.checkpoint.safetensors_format import ITEM_BYTES, Stored, read_header
from colossal_core.errors import CheckpointError
from colossal_core.plugins.agreement import explain_disagreement
from colossal_core.runtime.checkpointing.exporting import long_agreement, name_of_model
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

if TYPE_CHECKING:
    from torch import nn

    from colossal_core.runtime.engine import Engine

__all__ = ["StoredWeights", "find_weights", "import_model"]

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLED = (".bin", ".bin.index.json", ".ckpt", ".pt", ".pth")

_CONVERT = (
    "load it with torch.load(path, weights_only=True) in a script of your own, and write the weights with "
    "model.save_pretrained(directory), or with safetensors.torch.save_file(weights, path)"
)


@frozen(kw_only=True)
class StoredWeights:
    """Tensors of a directory, before any of them is read.

    Attributes:
        directory: Where they lie.
        tensors: File and place in it, by name.
    """

    directory: Path
    tensors: Mapping[str, tuple[Path, Stored]]

    @property
    def forms(self) -> dict[str, Form]:
        """Dtype and shape by name."""
        return {name: Form(DTYPES[stored.dtype], stored.shape) for name, (_, stored) in self.tensors.items()}


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
    reading = _Reading(engine, name_of_model(engine, model), plan)
    try:
        long_agreement(engine).attempt("import_weights: read", reading.read_all)
    finally:
        reading.close()
    return evolve(plan.report, bytes_read=reading.bytes_read)


# --- files --------------------------------------------------------------------------------------------------


def find_weights(path: Path) -> StoredWeights:
    """Return what the headers of a directory's files say; reads no tensor.

    Raises:
        CheckpointError: There are no such files, one is damaged, or an index names what lies elsewhere.
    """
    if path.is_file():
        if path.name.endswith(_PICKLED):
            raise CheckpointError(
                f"{path} is a pickled file, which can run code when it is read", hint=_CONVERT
            )
        return StoredWeights(directory=path.parent, tensors=_tensors_of(path))
    if not path.is_dir():
        raise CheckpointError(
            f"{path} does not exist", hint="pass a directory with model.safetensors, or such a file"
        )
    if (path / SINGLE).exists():
        return StoredWeights(directory=path, tensors=_tensors_of(_checked(path, SINGLE)))
    names = sorted(entry.name for entry in path.iterdir())
    indices = [name for name in names if name.endswith(".safetensors.index.json")]
    if INDEX in indices or len(indices) == 1:
        return _read_index(path, INDEX if INDEX in indices else indices[0])
    files = [name for name in names if name.endswith(".safetensors")]
    if len(files) == 1:
        return StoredWeights(directory=path, tensors=_tensors_of(_checked(path, files[0])))
    if files:
        raise CheckpointError(
            f"{path} holds {len(files)} safetensors files ({', '.join(files[:3])}, ...) and no "
            f"{INDEX} that says which belong together",
            hint="pass the path of one file, or restore the index",
        )
    pickled = [name for name in names if name.endswith(_PICKLED)]
    if pickled:
        raise CheckpointError(
            f"{path} holds pickled weights only ({', '.join(pickled[:3])}), which can run code when read",
            hint=_CONVERT,
        )
    raise CheckpointError(
        f"{path} holds no safetensors file", hint=f"pass a directory with {SINGLE}, or with {INDEX}"
    )


def _read_index(directory: Path, name: str) -> StoredWeights:
    """Return the tensors that an index names."""
    index = _checked(directory, name)
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        entries = sorted((str(tensor), file) for tensor, file in weight_map.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as err:
        raise CheckpointError(
            f"{index} is no index of safetensors files: {err!r}", hint="restore the file"
        ) from err
    files: dict[str, Mapping[str, tuple[Path, Stored]]] = {}
    found = {}
    for tensor, file in entries:
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise CheckpointError(
                f"{index} says that {tensor!r} lies in {file!r}, which is no safetensors file beside it",
                hint="an index names files of its own directory; get it from its source again",
            )
        if file not in files:
            files[file] = _tensors_of(_checked(directory, file))
        if tensor not in files[file]:
            raise CheckpointError(
                f"{directory / file} does not hold {tensor!r}, though {index.name} says so",
                hint="the files are not of one export: get them from their source again",
            )
        found[tensor] = files[file][tensor]
    return StoredWeights(directory=directory, tensors=found)


def _checked(directory: Path, name: str) -> Path:
    """Return the path of a file of a directory, which does not lead elsewhere.

    Links are followed inside the directory, and out of a snapshot of the hub's cache to the blobs beside it,
    of which such a snapshot consists.

    Raises:
        CheckpointError: It is missing, no plain file, or leads elsewhere.
    """
    path = directory / name
    try:
        real, home = path.resolve(strict=True), directory.resolve()
    except OSError as err:
        raise CheckpointError(
            f"cannot open {path}: {err.strerror or err}", hint="get the missing file from its source"
        ) from err
    allowed = [home, *([home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [])]
    if not any(real.is_relative_to(root) for root in allowed) or not real.is_file():
        raise CheckpointError(
            f"{path} leads to {real}, which is no file of its directory", hint="copy the file there"
        )
    return path


def _tensors_of(path: Path) -> dict[str, tuple[Path, Stored]]:
    """Return the tensors of one file."""
    found = {name: (path, stored) for name, stored in read_header(path).tensors.items()}
    for name, (_, stored) in found.items():
        if stored.dtype not in DTYPES:
            raise CheckpointError(
                f"{path} holds {name!r} in {stored.dtype}, which torch does not know here",
                hint="convert the file to one of " + ", ".join(sorted(DTYPES)),
            )
    return found


# --- planning -----------------------------------------------------------------------------------------------


def _plan(engine: Engine, model: nn.Module, path: Path, *, strict: bool) -> _Plan:
    """Decide what comes from where; the same on all ranks, without communication.

    Raises:
        CheckpointError: Something does not fit, and ``strict`` is set.
    """
    weights = find_weights(path)
    collected = model_holdings(engine, name_of_model(engine, model), borrowed=True, narrow=True)
    specs = collected.specs
    first = {name: key for key, spec in specs.items() for name in (key, *spec.aliases)}
    wanted = {name: Form(specs[key].dtype, specs[key].shape) for name, key in first.items()}
    names = plan_reading(model, weights.forms, wanted)
    findings = _Findings(weights, specs)
    plain: dict[str, list[str]] = {}
    for source, target in names.renamed.items():
        if findings.fits(target, first[target], (source,), weights.forms[source].shape):
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
            if any(key in held for key in taken.values()):
                found = conversion.convert({name: self._read_whole(name) for name in conversion.sources})
                for target, key in taken.items():
                    tensor = found[target].to(self._plan.collected.specs[key].dtype)
                    whole = Box((0,) * tensor.dim(), tuple(tensor.shape))
                    _copy(tensor, whole, held.get(key, ()))
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

    def _read_whole(self, name: str) -> torch.Tensor:
        """Read a whole tensor; one without elements has no box."""
        stored = self._plan.weights.tensors[name][1]
        whole = Box((0,) * len(stored.shape), stored.shape)
        if whole.volume == 0:
            return torch.empty(stored.shape, dtype=DTYPES[stored.dtype])
        return self._read(name, whole)

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
            held.view[inside(common, held.box)].copy_(values[inside(common, box)])


def _outermost(boxes: Sequence[Box]) -> Iterator[Box]:
    """Yield the boxes that lie in no other, each once."""
    kept: list[Box] = []
    for box in sorted(boxes, key=lambda box: -box.volume):
        if not any(box.intersect(outer) == box for outer in kept):
            kept.append(box)
            yield box
