"""Small random models of the architectures that transformers has, and one way to run each.

The one idea: a configuration of any architecture is shrunk by the names of its fields: what counts layers
becomes 2, what measures widths becomes small, and so on. What does not build in this way is reported as such.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from benchmarks.architecture_fields import FIELDS
from torch import nn
from torch.overrides import TorchFunctionMode

__all__ = ["TASKS", "Wide", "build_model", "list_architectures", "make_batch"]

TASKS: Mapping[str, str] = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "image": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
}
"""Name of a task to the mapping of transformers that lists its architectures."""

VOCABULARY = 160

LARGEST = 3_000_000
"""Parameters of a model that is still small."""

_SIZES: Mapping[str, int] = {
    **dict.fromkeys(["hidden_size", "d_model", "n_embd", "dim", "emb_dim", "model_dim", "width"], 32),
    **dict.fromkeys(
        ["embedding_size", "word_embed_proj_dim", "decoder_hidden_size", "encoder_hidden_size"], 32
    ),
    **dict.fromkeys(
        ["d_embed", "n_embed", "hidden_dim", "embed_dim", "attention_dim", "rnn_hidden_size"], 32
    ),
    **dict.fromkeys(
        ["intermediate_size", "ffn_dim", "d_ff", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim"], 48
    ),
    **dict.fromkeys(["ffn_hidden_size", "moe_intermediate_size", "shared_expert_intermediate_size"], 48),
    **dict.fromkeys(["intermediate_size_mlp", "ffn_dim_multiplier_", "encoder_intermediate_size"], 48),
    **dict.fromkeys(["num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers"], 2),
    **dict.fromkeys(["decoder_layers", "num_decoder_layers", "num_encoder_layers", "depth"], 2),
    **dict.fromkeys(["encoder_num_hidden_layers", "decoder_num_hidden_layers", "num_blocks"], 2),
    **dict.fromkeys(["num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"], 4),
    **dict.fromkeys(
        ["decoder_attention_heads", "encoder_num_attention_heads", "decoder_num_attention_heads"], 4
    ),
    **dict.fromkeys(["num_key_value_heads", "num_kv_heads", "multi_query_group_num"], 2),
    **dict.fromkeys(["head_dim", "d_kv", "d_head", "attention_head_size", "kv_channels", "d_k", "d_v"], 8),
    **dict.fromkeys(["global_head_dim"], 8),
    "vocab_size": VOCABULARY,
    "decoder_vocab_size": VOCABULARY,
    "encoder_vocab_size": VOCABULARY,
    "max_position_embeddings": 24,
    "n_positions": 24,
    "max_source_positions": 24,
    "max_target_positions": 24,
    "n_ctx": 24,
    "image_size": 16,
    "patch_size": 4,
    "num_channels": 3,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_num_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_labels": 6,
    "type_vocab_size": 2,
    "num_mel_bins": 16,
    "max_window_layers": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "qk_head_dim": 8,
    "v_head_dim": 8,
    "ssm_state_size": 8,
    "state_size": 8,
    "time_step_rank": 4,
    "conv_kernel": 4,
    "mamba_d_state": 8,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "sliding_window": 8,
    "attention_window": 8,
    "num_nextn_predict_layers": 0,
    "moe_k": 2,
    "num_experts_per_token": 2,
    "num_expert_group": 1,
    "rotary_dim": 4,
    "entity_vocab_size": VOCABULARY,
    "mtp_num_hidden_layers": 0,
}


_NEEDED = {"head_dim", "num_key_value_heads", "vocab_size"}
"""Fields that are computed of others when they are None, of which some are not small yet."""


def list_architectures() -> Iterator[tuple[str, str, str]]:
    """Yield task, model type and class name of every architecture, in order, each class once."""
    from transformers.models.auto import modeling_auto

    seen: dict[str, tuple[str, str]] = {}
    for task, mapping in TASKS.items():
        for kind, names in sorted(getattr(modeling_auto, mapping).items()):
            name = names if isinstance(names, str) else names[0]
            # Of several types that share a class, the one after which the class is named.
            is_namesake = name.lower().startswith(kind.replace("_", "").replace("-", ""))
            if name not in seen or (is_namesake and seen[name][0] == task):
                seen[name] = (task, kind)
    for name, (task, kind) in seen.items():
        yield task, kind, name


def _shrink(config: Any, given: Mapping[str, Any]) -> None:
    """Make a configuration small, in place, with the configurations inside it, but for what is given."""
    for name in list(vars(config)):
        if name in given and not isinstance(given[name], Mapping):
            continue
        value = getattr(config, name, None)
        is_missing = value is None and name in _NEEDED
        if name in _SIZES and (is_missing or (isinstance(value, int) and not isinstance(value, bool))):
            setattr(config, name, _SIZES[name])
        elif name == "attention_type" and value == "block_sparse":
            config.attention_type = "original_full"
        elif "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
        elif name in {"layer_types", "mlp_layer_types", "block_types", "layers_block_type"}:
            if isinstance(value, list) and value:
                setattr(config, name, _two_of(value))
        elif hasattr(value, "to_dict") and hasattr(value, "model_type"):
            _shrink(value, given.get(name, {}))
    if getattr(config, "kv_lora_rank", None) and hasattr(config, "num_key_value_heads"):
        config.num_key_value_heads = config.num_attention_heads  # heads of their own come out of one latent
        if hasattr(config, "head_dim") and hasattr(config, "qk_rope_head_dim"):
            config.head_dim = config.qk_rope_head_dim


def _two_of(kinds: list[str]) -> list[str]:
    """Return two layer types of a list, different ones where there are some."""
    different = list(dict.fromkeys(kinds))
    return [different[0], different[-1]]


def build_model(name: str, seed: int = 7) -> nn.Module:
    """Return a small random model in fp64; norm weights lie around one.

    Args:
        name: Name of the class, ``"LlamaForCausalLM"``.
        seed: Of all values.
    """
    import transformers

    made: Any = getattr(transformers, name)
    given = FIELDS.get(name, {})
    config = made.config_class(**given)
    _shrink(config, given)
    config = made.config_class(**{**_accepted(made.config_class, config), **_plain(given)})
    _shrink(config, given)
    torch.manual_seed(seed)
    model: Any = made(config).double()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the others take no fp64
    if sum(parameter.numel() for parameter in model.parameters()) > LARGEST:
        raise ValueError("fields of other names keep the small model large")
    source = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            spread = parameter[0].numel() ** -0.5 if parameter.dim() > 1 else 0.2
            values = torch.randn(parameter.shape, generator=source, dtype=torch.float64) * spread
            mean = 1.0 if parameter.dim() < 2 and bool((parameter.detach() == 1).all()) else 0.0
            parameter.data = values + mean
    for module in model.modules():
        for attribute, value in vars(module).items():
            if "drop" in attribute and isinstance(value, float):
                setattr(module, attribute, 0.0)
            if isinstance(module, nn.Dropout):
                module.p = 0.0
    trained: nn.Module = model.train()
    return trained


def _plain(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is given that is no configuration inside."""
    return {name: value for name, value in given.items() if not isinstance(value, Mapping)}


def _accepted(config_class: Any, config: Any) -> dict[str, Any]:
    """Return the values of a configuration that its constructor takes."""
    names = inspect.signature(config_class.__init__).parameters
    return {name: value for name, value in vars(config).items() if name in names and not name.startswith("_")}


def make_batch(model: Any, task: str) -> dict[str, Any]:
    """Return keyword arguments of one forward, with labels.

    Args:
        model: What `build_model` made.
        task: Its task.
    """
    examples = importlib.import_module("colossal_tensor_parallel.examples")
    example = next(iter(examples.guess_examples(model)))
    batch: dict[str, Any] = example.materialise(lambda tensor: tensor, torch.float64)[1]
    accepted = inspect.signature(model.forward).parameters
    if "labels" in accepted and not type(model).__name__.startswith("Musicgen"):  # of which it has several
        if task == "image":
            batch["labels"] = torch.arange(len(next(iter(batch.values())))) % 6
        else:
            ids = batch["decoder_input_ids"] if "decoder_input_ids" in batch else batch["input_ids"]
            batch["labels"] = ids.clone()
            batch["labels"][0, 1] = -100
    return batch


class Wide(TorchFunctionMode):
    """Lets code that casts to fp32 compute in fp64, so that 1e-10 can be asked of it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call with fp64 in the place of fp32."""
        keywords = dict(kwargs or {})
        if func is torch.Tensor.float:
            return args[0].double()
        if keywords.get("dtype") is torch.float32:
            keywords["dtype"] = torch.float64
        return func(*(torch.float64 if arg is torch.float32 else arg for arg in args), **keywords)
