"""Tiny models of the transformers library with awkward sizes, and how they train in one process and on ranks.

Their code casts to fp32 in places; `Wide` computes in fp64 there, so that one process and many can be
compared to 1e-10.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode

from colossal_core import Booster
from colossal_testkit.models import randomise

if TYPE_CHECKING:
    from torch import nn

__all__ = ["NAMES", "Outcome", "Wide", "build", "make_batch", "train_on_ranks", "train_serial"]

BOUND = 0.5
"""Of the gradient norm; it clips every step of every model here."""

NAMES = ("bert", "gpt2", "llama", "llama-tied", "mixtral", "phi3", "qwen3", "t5", "vit")

TINY: Mapping[str, Any] = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 41,
}
NO_DROPOUT: Mapping[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
LLAMA: Mapping[str, Any] = {
    **TINY,
    "intermediate_size": 38,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "eos_token_id": 1,
}


class Wide(TorchFunctionMode):
    """Computes in fp64 where code asks for fp32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call with fp64 in the place of fp32."""
        keywords = dict(kwargs or {})
        if func is torch.Tensor.backward:  # in which recomputed blocks run once more; theirs leaves this mode
            gradient = torch.ones_like(args[0]) if keywords["gradient"] is None else keywords["gradient"]
            flags = (bool(keywords["retain_graph"]), keywords["create_graph"])
            with self:
                return _engine_run_backward(
                    (args[0],), (gradient,), *flags, (), allow_unreachable=True, accumulate_grad=True
                )
        if func is torch.Tensor.float:
            return args[0].double()
        if keywords.get("dtype") is torch.float32:
            keywords["dtype"] = torch.float64
        return func(*(torch.float64 if arg is torch.float32 else arg for arg in args), **keywords)


@attrs.frozen(kw_only=True, eq=False)
class Outcome:
    """Numbers of a run of three steps.

    Attributes:
        losses: Of each step.
        norms: Of the gradient in each step, before clipping.
        gradients: Of the first step, whole.
        weights: At the end, whole.
        words: Received in the last step by this rank for activations and their gradients.
        elements: Of all parameters that this rank held.
    """

    losses: list[float]
    norms: list[float]
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    words: float = 0.0
    elements: int = 0


def build(name: str, *, resized: int | None = None, is_random: bool = True, **changes: object) -> nn.Module:
    """Return a model with random values, norm weights around one.

    Args:
        name: Which one.
        resized: Size that its vocabulary gets after it was made.
        is_random: Whether values are drawn; those of a model on the meta device cannot be.
        changes: To its configuration.
    """
    import transformers as library

    made: Any
    config: dict[str, Any]
    match name:
        case "bert":
            config = {**TINY, **NO_DROPOUT, "intermediate_size": 38, "max_position_embeddings": 16}
            made = library.BertForMaskedLM(library.BertConfig(**{**config, **changes}))
        case "gpt2":
            drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
            config = {
                "n_embd": 12,
                "n_layer": 2,
                "n_head": 4,
                "n_positions": 8,
                "loss_type": "ForCausalLMLoss",
            }
            made = library.GPT2LMHeadModel(library.GPT2Config(**{**config, **drops, **changes}))
        case "llama":
            made = library.LlamaForCausalLM(library.LlamaConfig(**{**LLAMA, **changes}))
        case "llama-tied":
            config = {**LLAMA, "tie_word_embeddings": True, "num_key_value_heads": 1}
            made = library.LlamaForCausalLM(library.LlamaConfig(**{**config, **changes}))
        case "mixtral":
            config = {**LLAMA, "num_local_experts": 3, "num_experts_per_tok": 2}
            config["experts_implementation"] = "eager"  # the others take no fp64
            made = library.MixtralForCausalLM(library.MixtralConfig(**{**config, **changes}))
        case "phi3":
            made = library.Phi3ForCausalLM(library.Phi3Config(**{**LLAMA, **changes}))
        case "qwen3":
            made = library.Qwen3ForCausalLM(library.Qwen3Config(**{**LLAMA, "head_dim": 6, **changes}))
        case "t5":
            config = {"d_model": 24, "d_kv": 6, "d_ff": 38, "num_layers": 2, "num_heads": 4, "vocab_size": 41}
            more = {"dropout_rate": 0.0, "decoder_start_token_id": 0}
            made = library.T5ForConditionalGeneration(library.T5Config(**{**config, **more, **changes}))
        case "vit":
            config = {**TINY, **NO_DROPOUT, "intermediate_size": 38, "image_size": 8, "patch_size": 4}
            made = library.ViTForImageClassification(
                library.ViTConfig(**{**config, "num_labels": 5, **changes})
            )
        case _:
            raise ValueError(name)
    if resized is not None:
        made.resize_token_embeddings(resized, mean_resizing=False)
    model: nn.Module = made.double()
    if is_random:
        randomise(model, seed=3)
    return model


def make_batch(name: str, step: int) -> dict[str, Any]:
    """Return keyword arguments of one forward; some labels do not count."""
    source = torch.Generator().manual_seed(step)
    if name == "vit":
        images = torch.randn(4, 3, 8, 8, generator=source, dtype=torch.float64)
        return {"pixel_values": images, "labels": torch.randint(0, 5, (4,), generator=source)}
    ids = torch.randint(3, 41, (4, 6), generator=source)
    labels = ids.clone()
    labels[1, 2:4] = -100
    return {"input_ids": ids, "labels": labels}


def train_serial(name: str, **changes: Any) -> Outcome:
    """Train in one process with torch alone."""
    torch.set_default_dtype(torch.float64)
    try:
        model = build(name, **changes)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
        losses, norms, gradients = [], [], {}
        for step in range(3):
            with Wide():
                loss = model(**make_batch(name, step)).loss
                loss.backward()
            if step == 0:
                gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            losses.append(float(loss.detach()))
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), BOUND)))
            optimizer.step()
            optimizer.zero_grad()
        weights = {n: p.detach().clone() for n, p in model.named_parameters()}
        return Outcome(losses=losses, norms=norms, gradients=gradients, weights=weights)
    finally:
        torch.set_default_dtype(torch.float32)


def train_on_ranks(name: str, pieces: tuple[object, ...], loop: str, **changes: Any) -> Outcome:
    """Train on this rank and the others; collective."""
    torch.set_default_dtype(torch.float64)
    try:
        model = build(name, **changes)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
        booster = Booster(*pieces, precision="fp64", max_grad_norm=BOUND)
        model, optimizer = booster.boost(model, optimizer)
        losses, norms, gradients = [], [], {}
        for step in range(3):
            batch = {
                key: value.tensor_split(booster.data_degree)[booster.data_rank]
                for key, value in make_batch(name, step).items()
            }
            with Wide():
                if loop == "plain":
                    loss = model(**batch).loss
                    loss.backward()
                else:
                    loss = booster.forward_backward(model, batch)
            losses.append(float(loss.detach()))
            if step == 0:
                with booster.full_gradients(model) as shown:
                    gradients = {key: value.clone() for key, value in shown.items()}
            optimizer.step()
            norms.append(float(optimizer.grad_norm))
            optimizer.zero_grad()
        words = sum(t.received_words for t in booster.last_traffic if t.phase == "tensor")
        elements = sum(parameter.numel() for parameter in model.parameters())
        with booster.full_parameters(model) as shown:
            weights = {key: value.clone() for key, value in shown.items()}
        return Outcome(
            losses=losses, norms=norms, gradients=gradients, weights=weights, words=words, elements=elements
        )
    finally:
        torch.set_default_dtype(torch.float32)
