"""Strategies along ``tensor``: fused qkv with shared KV heads, a sequence region, cut features.

Written as a third party would write them: options, a record, a subclass of `AbstractStrategy`. They are small
because they cut named layers of the models in these tests; what they write into the table is complete.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import attrs
import torch
import torch.nn.functional as F
from torch import nn

from colossal_core.errors import UsageError
from colossal_core.interfaces import AbstractStrategy, Proposal
from colossal_core.mesh import GroupSpec, MeshLayout
from colossal_core.plugins import AxisSpec, StrategySpec
from colossal_core.runtime.context import Context
from colossal_core.runtime.table import Key, Part
from colossal_testkit.registry import target_of

from .third_party_cuts import apply_cuts, slab, stack
from .third_party_regions import Wire, become, enter, gather, keep_own, place_and_sum, sum_shares, wire_of

if TYPE_CHECKING:
    from colossal_core.plan import Plan

__all__ = ["FUSED_QKV", "SEQUENCE_REGION", "UNEVEN_FEATURES", "Attention", "Degree"]

TENSOR = GroupSpec(("tensor",))


@attrs.frozen(kw_only=True)
class Degree:
    """Options of every strategy here: how many ranks share a layer."""

    degree: int = 2


class _Tensor(AbstractStrategy):
    """What the strategies have in common: the axis, and that the cuts are applied as proposed."""

    def __init__(self, options: Degree) -> None:
        self.options = options

    def apply(self, models: Mapping[str, nn.Module], proposal: Proposal, context: Context) -> None:
        """Cut the tensors, then the modules."""
        apply_cuts(proposal, context)
        self.rewire(models, context)

    def rewire(self, models: Mapping[str, nn.Module], context: Context) -> None:
        """Change modules so that they compute with what is left."""
        raise NotImplementedError


def _record(name: str, target: type) -> StrategySpec:
    """Return the record of one of the strategies."""
    return StrategySpec(
        name=name,
        summary="A strategy of the tests.",
        options=target_of(Degree),
        target=target_of(target),
        axes=(AxisSpec(name="tensor"),),
        phase="shard",
    )


def _place(layout: MeshLayout, rank: int) -> tuple[int, int]:
    """Return the coordinate of a rank along ``tensor``, and the degree of the axis."""
    return layout.coordinates(rank)["tensor"], layout.degree("tensor")


# --- fused qkv ----------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Attention whose queries, keys and values come out of one layer; several queries share a KV head."""

    def __init__(self, width: int, num_heads: int, num_kv_heads: int, head_width: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_width = num_heads, num_kv_heads, head_width
        self.qkv = nn.Linear(width, (num_heads + 2 * num_kv_heads) * head_width)
        self.out = nn.Linear(num_heads * head_width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map ``[batch, time, width]`` to the same shape, with as many heads as the attributes say."""
        counts = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        pieces = self.qkv(hidden).split([count * self.head_width for count in counts], dim=-1)
        q, k, v = (piece.unflatten(-1, (-1, self.head_width)).transpose(1, 2) for piece in pieces)
        shared = self.num_heads // self.num_kv_heads
        k, v = k.repeat_interleave(shared, dim=1), v.repeat_interleave(shared, dim=1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        outputs: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return outputs


class _RowLinear(nn.Linear):
    """A linear layer that has some of its input features; the ranks' shares are summed."""

    wire: Wire

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Sum the shares and add the bias once."""
        return sum_shares(F.linear(features, self.weight), self.wire) + self.bias


class FusedQkvStrategy(_Tensor):
    """Divides the heads of every `Attention`; with more ranks than KV heads, ranks share one."""

    def propose(self, models: Mapping[str, nn.Module], plan: Plan, layout: MeshLayout, rank: int) -> Proposal:
        """Cut the rows of the fused layer by heads, and the columns of the output layer."""
        cuts: dict[Key, tuple[Part, ...]] = {}
        for model, name, attention in _attentions(models):
            for kind in ("weight", "bias"):
                shape = attention.qkv.get_parameter(kind).shape
                cuts[model, f"{name}.qkv.{kind}"] = _head_parts(attention, shape, layout, rank)
            index, degree = _place(layout, rank)
            shape, columns = attention.out.weight.shape, attention.out.in_features // degree
            span = {1: (index * columns, (index + 1) * columns)}
            cuts[model, f"{name}.out.weight"] = (slab(shape, span, layout.without("tensor")),)
        return Proposal(cuts=cuts, groups=(TENSOR,))

    def rewire(self, models: Mapping[str, nn.Module], context: Context) -> None:
        """Tell the layers how many heads are left, and sum at their ends."""
        wire = wire_of(context, "attention", "tensor")
        for _, _, attention in _attentions(models):
            attention.num_heads //= self.options.degree
            attention.num_kv_heads = max(1, attention.num_kv_heads // self.options.degree)
            attention.register_forward_pre_hook(lambda _, args: (enter(args[0], wire), *args[1:]))
            become(attention, "out", _RowLinear, wire=wire)


def _attentions(models: Mapping[str, nn.Module]) -> Iterator[tuple[str, str, Attention]]:
    """Yield every attention with the names of its model and of itself."""
    for model, module in models.items():
        for name, inner in module.named_modules():
            if isinstance(inner, Attention):
                yield model, name, inner


def _head_parts(attention: Attention, shape: torch.Size, layout: MeshLayout, rank: int) -> tuple[Part, ...]:
    """Return the rows of ``[q; k; v]`` that belong to this rank's heads.

    Raises:
        UsageError: The heads do not divide.
    """
    index, degree = _place(layout, rank)
    heads, kv_heads, width = attention.num_heads, attention.num_kv_heads, attention.head_width
    if heads % degree or max(kv_heads, degree) % min(kv_heads, degree):
        raise UsageError(
            f"{heads} heads and {kv_heads} KV heads do not divide among {degree} ranks",
            hint="choose a degree that divides the heads, and divides or is a multiple of the KV heads",
        )
    sharers, num_kv = max(1, degree // kv_heads), max(1, kv_heads // degree)
    blocks = tuple(tuple((i,) for i in range(j, j + sharers)) for j in range(0, degree, sharers))
    shared = GroupSpec(("tensor",), blocks)
    alone = layout.without("tensor")
    q, kv = index * (heads // degree) * width, index // sharers * num_kv * width
    parts = [slab(shape, {0: (q, q + heads // degree * width)}, alone)]
    for first in (heads, heads + kv_heads):
        start = first * width + kv
        span = {0: (start, start + num_kv * width)}
        parts.append(slab(shape, span, layout.product([alone, shared]), shared))
    return stack(parts)


# --- a region that is cut along the sequence ----------------------------------------------------------------


class SequenceRegionStrategy(_Tensor):
    """Normalises a piece of the sequence on each rank: its weights stay whole, their gradients are shares."""

    def propose(self, models: Mapping[str, nn.Module], plan: Plan, layout: MeshLayout, rank: int) -> Proposal:
        """Leave everything whole, and sum the gradients of normalisations over the ranks."""
        cuts = {
            (model, f"{name}.{kind}"): (slab(parameter.shape, {}, layout.everyone(), TENSOR),)
            for model, name, norm in _norms(models)
            for kind, parameter in norm.named_parameters()
        }
        return Proposal(cuts=cuts, groups=(TENSOR,))

    def rewire(self, models: Mapping[str, nn.Module], context: Context) -> None:
        """Keep a piece of the sequence before each normalisation and gather it behind it."""
        wire = wire_of(context, "sequence", "tensor", dim=1)
        for _, _, norm in _norms(models):
            norm.register_forward_pre_hook(lambda _, args: (keep_own(args[0], wire),))
            norm.register_forward_hook(lambda _, _args, outputs: gather(outputs, wire))


def _norms(models: Mapping[str, nn.Module]) -> Iterator[tuple[str, str, nn.LayerNorm]]:
    """Yield every layer normalisation with the names of its model and of itself."""
    for model, module in models.items():
        for name, inner in module.named_modules():
            if isinstance(inner, nn.LayerNorm):
                yield model, name, inner


# --- features that do not divide, with buffers --------------------------------------------------------------


class UnevenFeaturesStrategy(_Tensor):
    """Divides the features of ``model.wide`` and of the batch normalisation behind it, buffers included."""

    def propose(self, models: Mapping[str, nn.Module], plan: Plan, layout: MeshLayout, rank: int) -> Proposal:
        """Cut dim 0 of everything that has one element or row for each feature."""
        cuts: dict[Key, tuple[Part, ...]] = {}
        for model, module in models.items():
            index, degree = _place(layout, rank)
            count = module.get_submodule("norm").get_parameter("weight").shape[0]
            each = -(-count // degree)  # the last ranks have fewer, or none
            span = min(index * each, count), min((index + 1) * each, count)
            for inner in ("wide", "norm"):
                child = module.get_submodule(inner)
                for kind, tensor in (*child.named_parameters(), *child.named_buffers()):
                    if tensor.dim():
                        holders = layout.without("tensor")
                        cuts[model, f"{inner}.{kind}"] = (slab(tensor.shape, {0: span}, holders),)
        return Proposal(cuts=cuts, groups=(TENSOR,))

    def rewire(self, models: Mapping[str, nn.Module], context: Context) -> None:
        """Gather the features behind the normalisation."""
        wire = wire_of(context, "features", "tensor")
        for model, module in models.items():
            entry = context.table[model, "norm.weight"]
            leave = functools.partial(_leave_features, wire, entry.numel, entry.parts[0].box.slices[0])
            module.get_submodule("wide").register_forward_pre_hook(lambda _, args: (enter(args[0], wire),))
            module.get_submodule("norm").register_forward_hook(leave)


def _leave_features(
    wire: Wire, num_features: int, own: slice, _: nn.Module, _args: object, outputs: torch.Tensor
) -> torch.Tensor:
    """Return the features of all ranks; a forward hook once the first three are given."""
    return place_and_sum(outputs, wire, (outputs.shape[0], num_features), (slice(None), own))


FUSED_QKV = _record("fused-qkv", FusedQkvStrategy)
SEQUENCE_REGION = _record("sequence-region", SequenceRegionStrategy)
UNEVEN_FEATURES = _record("uneven-features", UnevenFeaturesStrategy)
