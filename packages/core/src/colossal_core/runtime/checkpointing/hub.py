"""Names and forms under which tensors of transformers models lie in files of the hub.

The one idea: transformers keeps its own map between the names in files and those in its models, with
conversions where several tensors in files are one tensor in the model (experts). It is applied here to
tensors without memory, which tells in advance what becomes what; only real conversions then see bytes, one
group of tensors at a time. Nothing of transformers is imported unless the model is of transformers, and where
the installed version offers other functions than these, files carry the serial names.
"""

from __future__ import annotations

import importlib
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any, final

import torch
from attrs import frozen
from torch import nn

from colossal_core.runtime.checkpointing.conversions import (
    STRANGE,
    Conversion,
    Form,
    Forms,
    NameMap,
    Origins,
    SerialModel,
    Tensors,
    connect,
)
from colossal_core.runtime.checkpointing.shards import plain_name
from colossal_core.runtime.compiled import bare

__all__ = [
    "Conversion",
    "Form",
    "NameMap",
    "configuration_texts",
    "drop_ignored",
    "names_in_files",
    "plan_reading",
    "plan_writing",
    "stored_names",
]

MOVES = frozenset(
    {
        "Chunk",
        "Concatenate",
        "Conv3dToLinear",
        "Interleave",
        "LinearToConv3d",
        "MergeModulelist",
        "PermuteForRope",
        "Split",
        "SplitModulelist",
        "Transpose",
    }
)
"""Steps of conversions in transformers that put elements elsewhere and compute none."""

_LOADING, _MAPPING = "transformers.core_model_loading", "transformers.conversion_mapping"

# --- writing ------------------------------------------------------------------------------------------------


def stored_names(model: nn.Module, names: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    """Return under which of its names each tensor is stored: one, unless readers would not tie it again.

    Args:
        model: The model.
        names: All names of each tensor in serial order, without levels of wrappers, by the first of them.

    Returns:
        The names in files, by the same keys: none for what transformers leaves out of files.
    """
    tied = _tied_names(model)
    ignored = _attribute(model, "_keys_to_ignore_on_save") if _is_of_transformers(model) else None
    found = {}
    for key, every in names.items():
        plain = [name for name in every if name not in (ignored or ())]
        kept = plain[:1] if tied is None else [name for name in plain if name not in tied] or plain[:1]
        found[key] = tuple(kept)
    return found


def plan_writing(model: nn.Module, forms: Forms) -> NameMap:
    """Return how tensors of a model are called and formed in files.

    Args:
        model: The model, which may be cut.
        forms: Its tensors by stored name, with serial shapes.
    """
    same = {name: name for name in forms}
    if not _is_of_transformers(model):
        return NameMap(renamed=same)
    try:
        return _plan_writing(model, forms)
    except STRANGE as err:
        return NameMap(renamed=same, note=_note(err))


def names_in_files(model: nn.Module, forms: Forms | None = None) -> dict[str, list[str]] | None:
    """Return how files of the hub call the tensors of a model, as far as otherwise than the model does.

    Args:
        model: The model.
        forms: Its tensors by serial name, with serial shapes; those of the model as it is when None.

    Returns:
        Names in files by serial name: none for what is left out, several for what readers would not tie
        again. None when some tensors have another form there, so that names are not enough.
    """
    names: dict[torch.Tensor, list[str]] = {}
    for named in (model.named_parameters, model.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            names.setdefault(tensor, []).append(plain_name(name))
    known = {every[0]: Form.of(tensor) for tensor, every in names.items()} if forms is None else forms
    stored = stored_names(model, {every[0]: every for every in names.values() if every[0] in known})
    found = plan_writing(model, {name: known[key] for key, kept in stored.items() for name in kept})
    if found.conversions:
        return None
    targets = {key: [found.renamed[name] for name in kept] for key, kept in stored.items()}
    return {key: every for key, every in targets.items() if every != [key]}


def _plan_writing(model: nn.Module, forms: Forms) -> NameMap:
    """Plan with the functions of transformers."""
    revert = importlib.import_module(_LOADING).revert_weight_conversion
    imagined = {name: form.imagine() for name, form in forms.items()}
    stand_in = SerialModel(model, imagined)
    with torch.no_grad(), Origins(imagined) as origins:
        found: dict[str, torch.Tensor] = revert(stand_in, dict(imagined))
    sources = {name: origins.of(tensor) for name, tensor in found.items()}
    changed = (name for name in found if not _is_same(found[name], sources[name], imagined))
    converted = frozenset().union(*(sources[name] for name in changed))
    groups = connect({name: inputs for name, inputs in sources.items() if inputs & converted})
    renamed = {min(inputs): name for name, inputs in sources.items() if not inputs & converted}
    lost = imagined.keys() - renamed.keys() - converted
    if lost:
        raise ValueError(f"{min(lost)!r} would not be stored")
    conversions = []
    for inputs, outputs in groups:
        targets = {name: Form.of(found[name]) for name in sorted(outputs)}
        ordered = tuple(name for name in forms if name in inputs)
        run = _Writing(revert, stand_in, targets, {})
        if not run.suffices(ordered, imagined):
            run = _Writing(revert, stand_in, targets, imagined)
        conversions.append(Conversion(sources=ordered, targets=targets, run=run))
    return NameMap(renamed=renamed, conversions=tuple(conversions))


def _is_same(tensor: torch.Tensor, inputs: frozenset[str], imagined: Tensors) -> bool:
    """Whether a result is the very tensor that went in."""
    if not inputs:
        raise ValueError("a tensor is made of none")
    return imagined[min(inputs)] is tensor


@final
@frozen(eq=False)
class _Writing:
    """Converts one group of tensors of a model to the form of files.

    Attributes:
        revert: The function of transformers.
        model: The model with serial shapes.
        targets: What comes out.
        rest: The other tensors of the model without memory, where names depend on them.
    """

    revert: Callable[[Any, dict[str, torch.Tensor]], dict[str, torch.Tensor]]
    model: SerialModel
    targets: Forms
    rest: Tensors

    @torch.no_grad()
    def __call__(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        found = self.revert(self.model, {**self.rest, **tensors})
        return {name: found[name] for name in self.targets}

    def suffices(self, sources: Iterable[str], imagined: Tensors) -> bool:
        """Whether the sources alone give the targets."""
        try:
            found = self({name: imagined[name] for name in sources})
        except STRANGE:
            return False
        return all(Form.of(found[name]) == form for name, form in self.targets.items())


# --- reading ------------------------------------------------------------------------------------------------


def plan_reading(model: nn.Module, stored: Forms, wanted: Forms) -> NameMap:
    """Return which tensors of files become which of a model.

    Args:
        model: The model, which may be cut.
        stored: The tensors in the files.
        wanted: The tensors of the model by plain name, every alias included, with serial shapes.

    Returns:
        The map; what is neither renamed nor converted belongs to no tensor of the model.
    """
    same = {name: name for name in stored if name in wanted}
    if not _is_of_transformers(model):
        return NameMap(renamed=same)
    try:
        return _plan_reading(model, stored, wanted)
    except STRANGE as err:
        return NameMap(renamed=same, note=_note(err))


def drop_ignored(
    model: nn.Module, missing: Iterable[str], unexpected: Iterable[str]
) -> tuple[list[str], list[str]]:
    """Leave out names that the model's class knows to be missing from files or superfluous in them."""
    names = SimpleNamespace(missing_keys=set(missing), unexpected_keys=set(unexpected))
    adjust = _attribute(model, "_adjust_missing_and_unexpected_keys") if _is_of_transformers(model) else None
    kept = (set(names.missing_keys), set(names.unexpected_keys))
    if callable(adjust):
        try:
            adjust(names)
            kept = (set(names.missing_keys), set(names.unexpected_keys))
        except STRANGE:
            pass  # another version: nothing is left out
    return sorted(kept[0]), sorted(kept[1])


def _plan_reading(model: nn.Module, stored: Forms, wanted: Forms) -> NameMap:
    """Plan with the functions of transformers, as its own ``from_pretrained`` goes about it."""
    loading = importlib.import_module(_LOADING)
    transforms = importlib.import_module(_MAPPING).get_model_conversion_mapping(model)
    renamings = [entry for entry in transforms if isinstance(entry, loading.WeightRenaming)]
    converters = [entry for entry in transforms if isinstance(entry, loading.WeightConverter)]
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    imagined = {name: form.imagine() for name, form in wanted.items()}
    prefix = _attribute(model, "base_model_prefix") or None
    sources: dict[str, str] = {}  # by target: where two tensors of files claim one, the first has it
    groups: dict[str, list[tuple[str, str]]] = {}
    for name in sorted(stored, key=loading.dot_natural_key):
        target, pattern = loading.rename_source_key(name, renamings, converters, prefix, imagined)
        if target not in wanted and name in wanted:
            target, pattern = name, None
        if target in wanted and pattern is not None:
            groups.setdefault(target, []).append((pattern, name))
        elif target in wanted:
            sources.setdefault(target, name)
    conversions = []
    for target, collected in groups.items():
        converter, stand_in = by_pattern[collected[0][0]], SerialModel(model, imagined)
        run = _Reading(converter, stand_in, target, tuple(collected), wanted)
        inputs = tuple(name for _, name in collected)
        found = run({name: stored[name].imagine() for name in inputs})
        targets = {name: Form.of(tensor) for name, tensor in found.items()}
        conversions.append(
            Conversion(
                sources=inputs,
                targets=targets,
                run=run,
                dtype=wanted[target].dtype,
                is_move=all(type(step).__name__ in MOVES for step in converter.operations),
            )
        )
    renamed = {name: target for target, name in sources.items()}
    return NameMap(renamed=renamed, conversions=tuple(conversions))


@final
@frozen(eq=False)
class _Reading:
    """Converts the tensors of files that one converter of transformers takes together.

    Attributes:
        converter: The converter; each use takes a copy.
        model: The model with serial shapes.
        target: The first of its tensors.
        collected: Pattern and name of each source, in order.
        wanted: The tensors of the model.
    """

    converter: Any
    model: SerialModel
    target: str
    collected: tuple[tuple[str, str], ...]
    wanted: Forms

    @torch.no_grad()
    def __call__(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        converter = deepcopy(self.converter)
        for pattern, name in self.collected:
            converter.add_tensor(self.target, name, pattern, tensors[name])
        found = converter.convert(self.target, model=self.model, config=self.model.config)
        return {
            name: value[0] if isinstance(value, list) else value
            for name, value in found.items()
            if name in self.wanted
        }


# --- configurations -----------------------------------------------------------------------------------------


def configuration_texts(model: nn.Module, dtype: torch.dtype | None = None) -> dict[str, str]:
    """Return the configuration files that travel with a model, by name; none for a model that has none.

    Args:
        model: The model; whatever it calls ``config`` and ``generation_config`` is asked to save itself.
        dtype: Dtype of the weights that they describe; by default that in which they are trained.
    """
    texts = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("config", "generation_config"):
            own = _attribute(model, name)
            if not callable(_attribute(own, "save_pretrained")):
                continue
            try:
                described = deepcopy(own)
                if name == "config" and _is_of_transformers(model):
                    described.architectures = [type(bare(model)).__name__]
                    described.dtype = str(dtype or _trained_dtype(model)).removeprefix("torch.")
                described.save_pretrained(folder)
            except STRANGE as err:
                warnings.warn(f"the model's {name} is not written: {err}", stacklevel=2)
        for path in sorted(Path(folder).glob("*.json")):
            texts[path.name] = path.read_text(encoding="utf-8")
    return texts


def _trained_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype of the masters: fp32 for 16-bit parameters that are trained."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            is_wide = parameter.dtype.itemsize > 2 or not parameter.requires_grad
            return parameter.dtype if is_wide else torch.float32
    return torch.float32


# --- what transformers is asked -----------------------------------------------------------------------------


def _is_of_transformers(model: nn.Module) -> bool:
    """Whether a model is one of transformers, which then is imported already."""
    return any(
        cls.__name__ == "PreTrainedModel" and cls.__module__.partition(".")[0] == "transformers"
        for cls in type(bare(model)).__mro__
    )


def _tied_names(model: nn.Module) -> frozenset[str] | None:
    """Return the names that a reader ties to others; None where that is not known."""
    expand = _attribute(model, "get_expanded_tied_weights_keys") if _is_of_transformers(model) else None
    if not callable(expand):
        return None
    try:
        return frozenset(map(plain_name, expand(all_submodels=True)))
    except STRANGE:
        return None


def _attribute(thing: object, name: str) -> Any:
    """Return an attribute that things of other packages may have, or None."""
    return getattr(thing, name, None)


def _note(err: BaseException) -> str:
    """Say that names stay as they are in the model."""
    return (
        f"this version of transformers has another map of names than expected ({type(err).__name__}: {err}), "
        "so names in files are taken to be those of the model"
    )
