"""Models of transformers: what they export is what `from_pretrained` reads, and they read what it reads."""

from __future__ import annotations

import errno
import importlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import torch
from torch import nn

from colossal_core.boxes import Box
from colossal_core.checkpoint.exporting import export_object
from colossal_core.checkpoint.safetensors_format import read_header
from colossal_core.errors import CheckpointError
from colossal_core.interfaces import AbstractStrategy, Proposal
from colossal_core.mesh import GroupSpec, MeshLayout
from colossal_core.plugins import AxisSpec, Registry, StrategySpec
from colossal_core.runtime.booster import Booster
from colossal_core.runtime.checkpointing import exporting, hub
from colossal_core.runtime.context import Context
from colossal_core.runtime.table import Part
from colossal_testkit.ranks import run_ranks, run_ranks_expecting_errors
from colossal_testkit.registry import isolated_registry, target_of

if TYPE_CHECKING:
    from colossal_core.plan import Plan

transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")  # comes with it

pytestmark = pytest.mark.timeout(120)

SIZES = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
WORDS = {**SIZES, "vocab_size": 31, "num_key_value_heads": 1}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}

KINDS: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**WORDS, **TOKENS}),
    "tied llama": ("LlamaForCausalLM", "LlamaConfig", {**WORDS, **TOKENS, "tie_word_embeddings": True}),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": 31, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16, **TOKENS},
    ),
    "bert": ("BertForMaskedLM", "BertConfig", {**SIZES, "vocab_size": 31, "max_position_embeddings": 16}),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"vocab_size": 31, "d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 2, "num_heads": 2},
    ),
    "vit": ("ViTForImageClassification", "ViTConfig", {**SIZES, "image_size": 8, "patch_size": 4}),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**WORDS, **TOKENS, "num_local_experts": 3}),
}

each_kind = pytest.mark.parametrize("kind", KINDS)


def make(kind: str, seed: int) -> Any:
    """Return a tiny model in which no two elements are equal by design."""
    model, config, settings = KINDS[kind]
    torch.manual_seed(seed)
    made = getattr(transformers, model)(getattr(transformers, config)(**settings))
    for parameter in made.parameters():
        nn.init.normal_(parameter)
    return made.eval()


def logits_of(kind: str, model: Any) -> torch.Tensor:
    """Return what a model makes of fixed inputs."""
    ids = torch.arange(24).view(2, 12) % 31
    inputs = {"input_ids": ids}
    if kind == "vit":
        inputs = {"pixel_values": torch.linspace(-1, 1, 2 * 3 * 8 * 8).view(2, 3, 8, 8)}
    if kind == "t5":
        inputs["decoder_input_ids"] = ids[:, :5]
    with torch.no_grad():
        logits: torch.Tensor = model(**inputs).logits
    return logits.float()


def boost(model: Any, **settings: Any) -> Booster:
    """Boost a model with an optimizer, and return the Booster."""
    booster = Booster(**settings)
    booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return booster


def contents_of(directory: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Return dtype, shape and bytes of every tensor in a directory by name."""
    found = {}
    for path in directory.glob("*.safetensors"):
        content = path.read_bytes()
        for name, stored in read_header(path).tensors.items():
            found[name] = (stored.dtype, stored.shape, content[stored.start : stored.stop])
    return found


# --- a strategy that cuts everything ------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Halves:
    """Options: which dim is cut."""

    degree: int = 2
    dim: int = -1


class HalvesStrategy(AbstractStrategy):
    """Gives each rank a slab of every parameter; such a model computes nothing, but it has weights."""

    def __init__(self, options: Halves) -> None:
        self.options = options

    def propose(self, models: Mapping[str, nn.Module], plan: Plan, layout: MeshLayout, rank: int) -> Proposal:
        """Cut one dim."""
        cuts = {}
        index, degree = layout.coordinates(rank)["tensor"], self.options.degree
        for model, module in models.items():
            for name, parameter in module.named_parameters():
                start, size = [0] * parameter.dim(), [*parameter.shape]
                edges = [size[self.options.dim] * number // degree for number in (index, index + 1)]
                start[self.options.dim], size[self.options.dim] = edges[0], edges[1] - edges[0]
                box = Box(tuple(start), tuple(size))
                part = Part(box=box, local=(0,) * parameter.dim(), holders=layout.without("tensor"))
                cuts[model, name] = (part,)
        return Proposal(cuts=cuts, groups=(GroupSpec(("tensor",)),))

    def apply(self, models: Mapping[str, nn.Module], proposal: Proposal, context: Context) -> None:
        """Keep the slab."""
        for key, (part,) in proposal.cuts.items():
            tensor = context.table.tensor(context.table[key])
            tensor.data = tensor.detach()[part.box.slices].clone()
            context.table.cut(key, parts=(part,))


def make_registry() -> Registry:
    """Return a registry with that strategy."""
    record = StrategySpec(
        name="halves",
        summary="Cuts columns.",
        options=target_of(Halves),
        target=target_of(HalvesStrategy),
        axes=(AxisSpec(name="tensor"),),
        phase="shard",
    )
    return isolated_registry(record)


# --- what happens on the ranks ------------------------------------------------------------------------------


def export_all(folder: Path) -> None:
    """Export a model of each kind."""
    for kind in KINDS:
        model = make(kind, seed=1)
        boost(model).export(model, folder / kind)


def import_all(folder: Path) -> dict[str, tuple[torch.Tensor, tuple[str, ...]]]:
    """Import into a model of each kind; return its logits, and what did not fit."""
    found = {}
    for kind in KINDS:
        model = make(kind, seed=2)
        report = boost(model).import_weights(model, folder / kind)
        found[kind] = (logits_of(kind, model), report.problems)
    return found


def pass_on_cut(source: Path, target: Path, dim: int) -> float:
    """Import into a model that is cut, and export that; return bytes read for each that this rank holds."""
    model = make("mixtral", seed=2)
    booster = boost(model, registry=make_registry(), plan={"pieces": {"halves": {"dim": dim}}})
    report = booster.import_weights(model, source)
    booster.export(model, target, max_file_bytes=2000)
    num_bytes: int = sum(parameter.nbytes for parameter in model.parameters())
    return report.bytes_read / num_bytes


def export_on_a_full_disk(folder: Path) -> None:
    """Export while the disk of the first rank is full."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    model = make("mixtral", seed=1)
    with pytest.MonkeyPatch.context() as patch:
        if torch.distributed.get_rank() == 0:
            patch.setattr(exporting, "write_box", refuse)
        boost(model).export(model, folder)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of exports by two ranks."""
    folder = tmp_path_factory.mktemp("exported")
    run_ranks(export_all, 2, folder, timeout_seconds=100)
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of what transformers itself saves."""
    folder = tmp_path_factory.mktemp("saved")
    transformers.utils.logging.disable_progress_bar()
    for kind in KINDS:
        make(kind, seed=1).save_pretrained(folder / kind)
    return folder


@pytest.fixture(scope="module")
def imported(saved: Path) -> dict[str, tuple[torch.Tensor, tuple[str, ...]]]:
    """Return what two ranks made of it."""
    first, second = run_ranks(import_all, 2, saved, timeout_seconds=100)
    assert all(torch.equal(first[kind][0], second[kind][0]) for kind in KINDS)
    return first


# --- both directions ----------------------------------------------------------------------------------------


@each_kind
def test_exports_are_what_transformers_would_have_saved(kind: str, exported: Path, saved: Path) -> None:
    """Names, dtypes, shapes and bits are the same, and so are the configurations beside them."""
    ours, theirs = exported / kind, saved / kind

    assert contents_of(ours) == contents_of(theirs)
    for path in theirs.glob("*.json"):
        assert json.loads((ours / path.name).read_text()) == json.loads(path.read_text())


@each_kind
def test_from_pretrained_reads_exports(kind: str, exported: Path) -> None:
    """The model that comes back computes the same bits."""
    model = make(kind, seed=1)

    again = type(model).from_pretrained(exported / kind)

    assert torch.equal(logits_of(kind, again), logits_of(kind, model))


@each_kind
def test_imports_read_what_transformers_saves(
    kind: str, imported: dict[str, tuple[torch.Tensor, tuple[str, ...]]]
) -> None:
    """A boosted model computes the bits of the model that was saved."""
    logits, problems = imported[kind]

    assert problems == ()
    assert torch.equal(logits, logits_of(kind, make(kind, seed=1)))


@pytest.mark.parametrize("dim", [0, -1], ids=["experts", "columns"])
def test_experts_pass_through_a_cut_model(dim: int, saved: Path, tmp_path: Path) -> None:
    """Stored one by one, stacked in the model, and cut on two ranks: what goes in comes out, bit for bit.

    Ranks that have some of the experts read no others; with columns of all experts they read them whole.
    """
    overheads = run_ranks(pass_on_cut, 2, saved / "mixtral", tmp_path / "export", dim, timeout_seconds=100)

    assert contents_of(tmp_path / "export") == contents_of(saved / "mixtral")
    again = transformers.MixtralForCausalLM.from_pretrained(tmp_path / "export")
    assert torch.equal(logits_of("mixtral", again), logits_of("mixtral", make("mixtral", seed=1)))
    assert max(overheads) <= (1.05 if dim == 0 else 2)


def test_a_full_disk_ends_conversions_on_all_ranks(tmp_path: Path) -> None:
    """Tensors are put together by all ranks, and one that can no longer write leaves none waiting."""
    errors = run_ranks_expecting_errors(export_on_a_full_disk, 2, tmp_path / "export")

    assert all("No space left" in str(error) for error in errors)
    assert not (tmp_path / "export").exists()


# --- one process --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "name"), [(None, "float32"), ("bf16", "bfloat16")])
def test_configuration_says_the_dtype_of_the_files(dtype: str | None, name: str, tmp_path: Path) -> None:
    """`from_pretrained` reads in that dtype, so bits of the masters are not lost when nobody asks for it."""
    model = make("mixtral", seed=1)
    model.config.dtype = "bfloat16"

    boost(model, precision="bf16").export(model, tmp_path, dtype=dtype)

    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == name
    again = transformers.MixtralForCausalLM.from_pretrained(tmp_path)
    wanted = getattr(torch, name)
    assert all(
        torch.equal(mine, theirs.to(wanted))
        for mine, theirs in zip(again.parameters(), make("mixtral", seed=1).parameters(), strict=True)
    )


def test_weights_of_the_base_model_are_taken(tmp_path: Path) -> None:
    """Files of the hub often hold the model without a head, under names without its prefix."""
    base, model = make("bert", seed=1), make("bert", seed=2)
    base.bert.save_pretrained(tmp_path)

    with pytest.raises(CheckpointError, match=r"cls\.predictions"):
        boost(model).import_weights(model, tmp_path)
    model = make("bert", seed=2)
    report = boost(model).import_weights(model, tmp_path, strict=False)

    assert all(name.startswith("cls.predictions") for name in report.missing)
    assert not report.unexpected
    for name, value in base.bert.named_parameters():
        assert torch.equal(model.bert.get_parameter(name), value)


def test_old_names_and_superfluous_masks_are_understood(tmp_path: Path) -> None:
    """Files from before some names were changed, and with tensors that models once had, are read."""
    bert, gpt2 = make("bert", seed=1), make("gpt2", seed=1)
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for name, value in bert.named_parameters()
    }
    masks = {"h.0.attn.bias": torch.ones(1, 1, 16, 16), "h.1.attn.bias": torch.ones(1, 1, 16, 16)}
    for kind, tensors in (("bert", old), ("gpt2", {**dict(gpt2.transformer.named_parameters()), **masks})):
        (tmp_path / kind).mkdir()
        plain = {name: value.detach().contiguous() for name, value in tensors.items()}
        safetensors_torch.save_file(plain, tmp_path / kind / "model.safetensors")

    for kind, same in (("bert", bert), ("gpt2", gpt2)):
        model = make(kind, seed=2)
        assert not boost(model).import_weights(model, tmp_path / kind).problems
        assert torch.equal(logits_of(kind, model), logits_of(kind, same))


def test_divided_files_are_read(tmp_path: Path) -> None:
    """What transformers has divided among files, with its index."""
    make("mixtral", seed=1).save_pretrained(tmp_path, max_shard_size="2KB")
    assert len([*tmp_path.glob("*.safetensors")]) > 3
    model = make("mixtral", seed=2)

    boost(model).import_weights(model, tmp_path)

    assert torch.equal(logits_of("mixtral", model), logits_of("mixtral", make("mixtral", seed=1)))


def test_weights_tied_by_hand_are_stored_twice(tmp_path: Path) -> None:
    """Where the configuration does not say that they are tied, a reader needs both."""
    model = make("llama", seed=1)
    model.lm_head.weight = model.model.embed_tokens.weight

    boost(model).export(model, tmp_path)

    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits_of("llama", again), logits_of("llama", model))


@pytest.mark.parametrize("what", ["block", "model"])
def test_compiled_models_have_plain_names(what: str, tmp_path: Path) -> None:
    """Files do not show that the model or a part of it was compiled."""
    model = make("mixtral", seed=1)
    if what == "block":
        model.model.layers[0] = torch.compile(model.model.layers[0], backend="eager")
    else:
        model = torch.compile(model, backend="eager")

    booster = boost(model)
    booster.export(model, tmp_path)

    assert not booster.import_weights(model, tmp_path).problems
    again = transformers.MixtralForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits_of("mixtral", again), logits_of("mixtral", make("mixtral", seed=1)))


@pytest.mark.parametrize("module", ["core_model_loading", "conversion_mapping"])
def test_another_version_of_transformers_keeps_serial_names(
    module: str, tmp_path: Path, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where its map has another form, that is said, files have the names of the model, and are read back."""
    model = make("mixtral", seed=1)
    booster = boost(model)
    import_module: Callable[[str], Any] = importlib.import_module

    def without_functions(name: str) -> Any:
        return object() if name.endswith(module) else import_module(name)

    monkeypatch.setattr(importlib, "import_module", without_functions)
    with pytest.raises(CheckpointError) as caught:
        booster.import_weights(model, saved / "mixtral")
    assert "experts.gate_up_proj" in str(caught.value)
    assert "another map of names" in caught.value.hint
    if module == "core_model_loading":
        with pytest.warns(UserWarning, match="another map of names"):
            booster.export(model, tmp_path)
        assert contents_of(tmp_path).keys() == model.state_dict().keys()
        assert not booster.import_weights(model, tmp_path).problems


def test_only_some_models_need_a_conversion() -> None:
    """Others can be exported from their checkpoint, without their class."""
    assert hub.names_in_files(make("mixtral", seed=1)) is None
    assert hub.names_in_files(make("tied llama", seed=1)) == {}
    assert hub.names_in_files(make("t5", seed=1)) == {}
    assert hub.names_in_files(nn.Linear(2, 2)) == {}
    tied_by_hand = make("llama", seed=1)
    assert hub.names_in_files(tied_by_hand) == {}
    tied_by_hand.lm_head.weight = tied_by_hand.model.embed_tokens.weight
    both = ["model.embed_tokens.weight", "lm_head.weight"]
    assert hub.names_in_files(tied_by_hand) == {both[0]: both}


def test_a_checkpoint_is_exported_under_the_names_of_the_hub(tmp_path: Path) -> None:
    """Where names are all that differs, no class of the model is needed."""
    model = make("vit", seed=1)
    booster = Booster()
    booster.boost(model)
    saved = booster.save(tmp_path / "runs")

    export_object(saved, tmp_path / "out")

    booster.export(model, tmp_path / "wanted")
    wanted = contents_of(tmp_path / "wanted")
    assert contents_of(tmp_path / "out") == wanted
    assert wanted.keys() != model.state_dict().keys()
