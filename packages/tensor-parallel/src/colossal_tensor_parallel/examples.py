"""Arguments for one forward of a model that nobody has called yet.

The one idea: models say what they take. Those of the transformers library have example inputs, or name their
main input; others begin with an embedding, a convolution or a linear layer, whose sizes say what fits. What
does not fit raises in the copy that is tried, and the next guess follows.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

import torch
from attrs import frozen
from torch import nn
from torch.utils import _pytree as pytree

__all__ = ["Example", "guess_examples"]

BATCH, TIME = 2, 6


@final
@frozen(kw_only=True, eq=False)
class Example:
    """Arguments of a forward.

    Attributes:
        args: Positional arguments.
        kwargs: Keyword arguments.
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}

    def materialise(
        self, wrap: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with their tensors brought into another world, floating ones in a dtype."""

        def bring(leaf: Any) -> Any:
            """Return one leaf."""
            if not isinstance(leaf, torch.Tensor):
                return leaf
            plain = leaf.detach().cpu()
            return wrap(plain.to(dtype) if plain.is_floating_point() else plain)

        args, kwargs = pytree.tree_map(bring, (self.args, dict(self.kwargs)))
        return args, kwargs


def guess_examples(model: nn.Module) -> Iterator[Example]:
    """Yield arguments that the model may accept, likely ones first."""
    config = getattr(model, "config", None)
    if config is not None and hasattr(model, "main_input_name"):
        yield from _from_configuration(model, config)
    yield from _from_layers(model)


# --- models of the transformers library ---------------------------------------------------------------------


def _from_configuration(model: Any, config: Any) -> Iterator[Example]:
    """Yield arguments for a model with a configuration and example inputs, as those of transformers."""
    accepted = inspect.signature(model.forward).parameters
    extras = {"use_cache": False} if "use_cache" in accepted else {}
    vocabulary = _smallest_vocabulary(model)
    ids = torch.arange(BATCH * TIME).reshape(BATCH, TIME) * 7 % max(min(vocabulary, 50), 1)
    ids = ids.clamp(min=min(3, vocabulary - 1))
    is_pair = bool(getattr(config, "is_encoder_decoder", False)) and "decoder_input_ids" in accepted
    decoder = {"decoder_input_ids": ids.flip(1)} if is_pair else {}
    main = str(model.main_input_name)
    if main == "input_ids":
        yield Example(kwargs={"input_ids": ids, **decoder, **extras})
        if not decoder and "decoder_input_ids" in accepted:
            yield Example(kwargs={"input_ids": ids, "decoder_input_ids": ids.flip(1), **extras})
    if main == "pixel_values":
        for image in _images(config):
            yield Example(kwargs={"pixel_values": image, **decoder, **extras})
    if main in {"input_features", "input_values"}:
        for sound in _sounds(config, main):
            yield Example(kwargs={main: sound, **decoder, **extras})
    try:
        given = dict(model.dummy_inputs)
    except Exception:  # noqa: BLE001 - a property of the user's model
        return
    yield Example(kwargs={**given, **extras})


def _smallest_vocabulary(model: nn.Module) -> int:
    """Return the number of rows of the embedding with the ids, the first one that is registered."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            return module.num_embeddings
    return 50


def _images(config: Any) -> Iterator[torch.Tensor]:
    """Yield random images of the sizes that a configuration names."""
    source = torch.Generator().manual_seed(5)
    for holder in (config, getattr(config, "backbone_config", None), getattr(config, "vision_config", None)):
        size = getattr(holder, "image_size", None)
        channels = getattr(holder, "num_channels", 3)
        height, width = size if isinstance(size, (list, tuple)) and len(size) == 2 else (size, size)
        if isinstance(height, int) and isinstance(width, int) and isinstance(channels, int):
            yield torch.randn(BATCH, channels, height, width, generator=source)
    for size in (32, 64, 224):
        yield torch.randn(BATCH, 3, size, size, generator=source)


def _sounds(config: Any, main: str) -> Iterator[torch.Tensor]:
    """Yield random sounds, as waves or as spectra."""
    source = torch.Generator().manual_seed(5)
    if main == "input_values":
        yield torch.randn(BATCH, 1600, generator=source)
    bins = getattr(config, "num_mel_bins", 80)
    positions = getattr(config, "max_source_positions", 60)
    yield torch.randn(BATCH, bins, 2 * positions, generator=source)
    yield torch.randn(BATCH, 64, bins, generator=source)


# --- any other model ----------------------------------------------------------------------------------------


def _from_layers(model: nn.Module) -> Iterator[Example]:
    """Yield tensors that fit the first layer with parameters."""
    count = _num_required(model)
    if count is None:
        return
    for tensor in _first_inputs(model):
        yield Example(args=(tensor,) * count)


def _num_required(model: nn.Module) -> int | None:
    """Return the number of arguments without a default, or None when there is none or more than three."""
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(p.kind is p.KEYWORD_ONLY and p.default is p.empty for p in parameters):
        return None
    required = [p for p in parameters if p.kind in {p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD}]
    count = sum(p.default is p.empty for p in required)
    if not count and (required or any(p.kind is p.VAR_POSITIONAL for p in parameters)):
        count = 1
    return count if 1 <= count <= 3 else None


def _first_inputs(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield what the first layer may take."""
    source = torch.Generator().manual_seed(5)
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            for time in (TIME, 4, 2):
                yield torch.arange(BATCH * time).reshape(BATCH, time) * 7 % module.num_embeddings
            return
        if isinstance(module, nn.Conv2d):
            for size in (*_image_sizes(model), 32, 16, 8, 6, 28, 64, 224):
                yield torch.randn(BATCH, module.in_channels, size, size, generator=source)
            return
        width = getattr(module, "in_features", None) or getattr(module, "input_size", None)
        if isinstance(width, int):
            yield torch.randn(BATCH, TIME, width, generator=source)
            yield torch.randn(BATCH, width, generator=source)
            return
        if isinstance(module, nn.TransformerEncoderLayer):
            width = module.self_attn.embed_dim
            yield torch.randn(BATCH, TIME, width, generator=source)
            return


def _image_sizes(model: nn.Module) -> Iterator[int]:
    """Yield image sizes that modules name, as vision transformers do."""
    for module in model.modules():
        for name in ("img_size", "image_size"):
            size = getattr(module, name, None)
            if isinstance(size, int):
                yield size
            elif isinstance(size, (tuple, list)) and size and isinstance(size[0], int):
                yield size[0]
