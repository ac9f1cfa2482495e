"""Attention modules of torch, which read the weights of their children: units that are cut by heads.

The one idea: ``nn.MultiheadAttention`` keeps its projections as parameters of its own, hands them to one
function, and in evaluation to another that is faster. So there are no layers to put others in the place of,
and the module is replaced as a whole: with this rank's heads it projects what enters, as column layers do,
attends, and calls its last layer, a row layer. What torch's function does with masks is done here as well.

Modules with a forward of their own are not units; what they call is cut as anywhere else.

# Note [The fast path of encoders]
In evaluation without gradients ``nn.TransformerEncoderLayer`` hands all of its weights to one function, and
``nn.TransformerEncoder`` removes padding before. With cut children both are kept from it, so outputs at
places that ``src_key_padding_mask`` excludes are what they are in training, where the fast path has zeros.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, final

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import nn

from colossal_core.errors import CapabilityError, UsageError
from colossal_core.runtime.replacement import Stand
from colossal_tensor_parallel.candidates import UnitCut
from colossal_tensor_parallel.layers import Works, works_in
from colossal_tensor_parallel.products import multiply_entered
from colossal_tensor_parallel.spans import Split, legal_degrees
from colossal_tensor_parallel.tokens import whole_tokens
from colossal_tensor_parallel.tracing import Trace, own_parameters
from colossal_tensor_parallel.wires import add_up, enter, join_pieces

if TYPE_CHECKING:
    from colossal_tensor_parallel.roles import Role
    from colossal_tensor_parallel.wires import Wire

__all__ = ["AttentionChoice", "CutAttention", "choose_attentions", "last_layer"]


# --- which are cut ------------------------------------------------------------------------------------------


@final
@frozen(kw_only=True)
class AttentionChoice:
    """What becomes of one attention module.

    Attributes:
        name: Of the module in the model.
        cut: How it is cut; None when it stays whole.
        reason: Why, for people.
        last: Split of the input features of its last layer.
    """

    name: str
    cut: UnitCut | None = None
    reason: str
    last: Split | None = None


def last_layer(name: str) -> str:
    """Return the name of the layer behind the heads of an attention module."""
    return f"{name}.out_proj".lstrip(".")


def choose_attentions(
    model: nn.Module, trace: Trace | str, roles: Mapping[str, Role], degree: int
) -> Iterator[AttentionChoice]:
    """Yield what becomes of each attention module that runs torch's forward.

    Args:
        model: The serial model, which stays as it is.
        trace: What its forward showed, or why it did not run.
        roles: What the user's plan says; the last layer of a module speaks for the module.
        degree: Number of ranks.

    Raises:
        UsageError: Heads do not divide.
    """
    named = [(name, module) for name, module in model.named_modules() if _is_unit(module)]
    num_owners = Counter(p for module in model.modules() for p in own_parameters(module).values())
    called = {
        type(_parent(model, name)) for name, _ in named if isinstance(trace, Trace) and name in trace.calls
    }
    for name, module in named:
        role = roles.get(last_layer(name))
        reason = None
        if role is not None and role.cut == "whole":
            reason = f"{role.source} says so"
        elif not name:
            reason = "it is the whole model"
        elif any(num_owners[parameter] > 1 for parameter in module.parameters()):
            reason = "another module has its weights, too"
        elif isinstance(trace, str):
            reason = None if role else f"no arguments were found with which it runs ({trace})"
        elif {name, last_layer(name)} & trace.read_outside:
            reason = "another module reads its weights"
        elif name not in trace.calls and type(_parent(model, name)) not in called:
            reason = "the forward did not call it"
        elif module.num_heads == 1:
            reason = "it has one head"
        if reason is None:
            yield _cut(name, module, degree)
        else:
            yield AttentionChoice(name=name, reason=reason)


def _is_unit(module: nn.Module) -> bool:
    """Whether a module is one of torch's attention modules and runs its forward."""
    if not isinstance(module, nn.MultiheadAttention) or "forward" in vars(module):
        return False
    if type(module).forward is not nn.MultiheadAttention.forward:
        return False
    last = module.out_proj
    return "weight" in own_parameters(last) and type(last).forward is nn.Linear.forward


def _parent(model: nn.Module, name: str) -> nn.Module:
    """Return the module around another one."""
    return model.get_submodule(name.rpartition(".")[0])


def _cut(name: str, module: nn.MultiheadAttention, degree: int) -> AttentionChoice:
    """Return how a module is cut.

    Raises:
        UsageError: Its heads do not divide.
    """
    heads, width = module.num_heads, module.embed_dim
    if heads % degree:
        legal = ", ".join(map(str, legal_degrees(heads)))
        raise UsageError(
            f"{heads} heads ({name}.num_heads) of {name!r} do not divide among {degree} ranks; legal degrees "
            f"are {legal}",
            hint="choose one of them, or leave the heads whole with "
            f"TensorParallel(plan={{{last_layer(name)!r}: 'whole', ...}})",
        )
    splits: dict[str, tuple[int, Split]] = {}
    for kind, parameter in own_parameters(module).items():
        dim = parameter.dim() - 1 if kind in {"bias_k", "bias_v"} else 0
        splits[kind] = (dim, Split.whole(parameter.shape[dim], heads, parameter.shape[dim] // width))
    reason = f"attention of torch: {heads} heads of {module.head_dim} features divide"
    cut = UnitCut(name=name, kind="attention", splits=splits, reason=reason)
    return AttentionChoice(name=name, cut=cut, reason=reason, last=Split.whole(width, heads))


# --- what stands in their place -----------------------------------------------------------------------------


@final
class CutAttention(Stand):
    """Attention with some of the heads; the last layer adds up over the ranks.

    What it is given besides the user's state: the features and the first head of this rank, as ``size`` and
    ``first`` of the works.
    """

    num_heads: int
    head_dim: int
    dropout: float
    batch_first: bool
    add_zero_attn: bool
    in_proj_weight: torch.Tensor | None
    q_proj_weight: torch.Tensor
    k_proj_weight: torch.Tensor
    v_proj_weight: torch.Tensor
    in_proj_bias: torch.Tensor | None
    bias_k: torch.Tensor | None
    bias_v: torch.Tensor | None
    out_proj: nn.Module

    def forward(  # noqa: PLR0917 - the signature is torch's
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,  # noqa: FBT001, FBT002
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,  # noqa: FBT001, FBT002
        is_causal: bool = False,  # noqa: FBT001, FBT002
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend; shapes and meaning of all arguments are those of ``nn.MultiheadAttention``.

        Weights, where they are asked for, are summed or gathered over the ranks.

        Raises:
            CapabilityError: What enters is nested.
            UsageError: A mask does not fit, or ``is_causal`` comes without one.
        """
        if any(tensor.is_nested for tensor in (query, key, value)):
            raise CapabilityError(
                "attention that is cut among ranks got a nested tensor",
                hint="pass padded tensors and key_padding_mask",
            )
        if is_causal and attn_mask is None:
            raise UsageError("is_causal=True comes without attn_mask", hint="pass the mask as well")
        works = works_in(self)
        is_batched = query.dim() > 2
        q, k, v = (self._with_batch(found) for found in self._project(works, query, key, value))
        mask = None
        is_hint_enough = is_causal and key_padding_mask is None and not need_weights
        if not is_hint_enough:
            if key_padding_mask is not None and not is_batched:
                key_padding_mask = key_padding_mask.unsqueeze(0)
            mask = self._mask(works, attn_mask, key_padding_mask, (q.shape[0], q.shape[1], k.shape[1]))
        k, v = self._lengthened(k, self.bias_k), self._lengthened(v, self.bias_v)
        if mask is not None:
            mask = F.pad(mask, (0, k.shape[1] - mask.shape[-1]))
        q, k, v = (found.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for found in (q, k, v))
        rate = self.dropout if self.training else 0.0
        if rate and works.dice is not None:
            works.dice.open()
        weights = None
        if need_weights:
            scores = (q * math.sqrt(1.0 / self.head_dim)) @ k.transpose(-2, -1)
            weights = F.dropout(torch.softmax(scores if mask is None else scores + mask, -1), rate)
            mixed = weights @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, mask, rate, is_causal=is_hint_enough)
        outputs = self.out_proj(self._without_batch(mixed.transpose(1, 2).flatten(2), is_batched=is_batched))
        if weights is None:
            return outputs, None
        if average_attn_weights:
            weights = add_up(weights.sum(1) / self.num_heads, works.wire)
        else:
            weights = join_pieces(weights, works.wire, self.num_heads, 1)
        return outputs, weights if is_batched else weights.squeeze(0)

    def _project(self, works: Works, *inputs: torch.Tensor) -> list[torch.Tensor]:
        """Return queries, keys and values of this rank; inputs that are one tensor take one product."""
        width = works.size
        found: list[torch.Tensor] = []
        for _, run in itertools.groupby(range(3), key=lambda index: id(inputs[index])):
            indices = list(run)
            entered = works.entrance.enter(inputs[indices[0]])
            if self.in_proj_weight is None:
                separate = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
                pairs = [(separate[index], _rows(self.in_proj_bias, width, index, 1)) for index in indices]
            else:
                first, count = indices[0], len(indices)
                weight = _rows(self.in_proj_weight, width, first, count)
                assert weight is not None
                pairs = [(weight, _rows(self.in_proj_bias, width, first, count))]
            for matrix, bias in pairs:
                product = multiply_entered(entered, matrix, bias, is_transposed=False)
                found += product.split(width, -1)
        return found

    def _with_batch(self, projected: torch.Tensor) -> torch.Tensor:
        """Return ``[batch, tokens, features]``, whatever the order is outside."""
        if projected.dim() == 2:
            return projected.unsqueeze(0)
        return projected if self.batch_first else projected.transpose(0, 1)

    def _without_batch(self, mixed: torch.Tensor, *, is_batched: bool) -> torch.Tensor:
        """Return ``[batch, tokens, features]`` in the order that is used outside."""
        if not is_batched:
            return mixed.squeeze(0)
        return mixed if self.batch_first else mixed.transpose(0, 1)

    def _lengthened(self, projected: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return keys or values with the tokens that the module adds itself."""
        added = [] if bias is None else [bias.expand(len(projected), 1, -1)]
        if self.add_zero_attn:
            added.append(projected.new_zeros(len(projected), 1, projected.shape[-1]))
        return torch.cat([projected, *added], 1) if added else projected

    def _mask(
        self,
        works: Works,
        mask: torch.Tensor | None,
        padding: torch.Tensor | None,
        sizes: tuple[int, int, int],
    ) -> torch.Tensor | None:
        """Return what is added to the scores ``[batch, this rank's heads, queries, keys]``, or None.

        Raises:
            UsageError: A mask has another shape.
        """
        batch, queries, keys = sizes
        dtype = self.out_proj.get_parameter("weight").dtype
        total: torch.Tensor | None = None
        if mask is not None:
            legal = [(queries, keys), (batch * self.num_heads, queries, keys)]
            total = _added(mask, "attn_mask", legal, dtype, works.wire)
            if total.dim() > 2:
                heads = works.size // self.head_dim
                by_head = total.unflatten(0, (batch, self.num_heads))
                total = by_head.narrow(1, works.first, heads)
            else:
                total = total[None, None]
        if padding is not None:
            added = _added(padding, "key_padding_mask", [(batch, keys)], dtype, works.wire)[:, None, None]
            total = added if total is None else total + added
        return total


def _rows(tensor: torch.Tensor | None, width: int, first: int, count: int) -> torch.Tensor | None:
    """Return some of the blocks of rows that are fused in a tensor; itself when these are all."""
    if tensor is None or len(tensor) == count * width:
        return tensor
    return tensor[first * width : (first + count) * width]


def _added(
    mask: torch.Tensor, name: str, legal: list[tuple[int, ...]], dtype: torch.dtype, wire: Wire
) -> torch.Tensor:
    """Return a mask as something to add to scores; a gradient of it is summed over the ranks.

    Raises:
        UsageError: It has another shape.
    """
    if tuple(mask.shape) not in legal:
        raise UsageError(
            f"{name} has shape {tuple(mask.shape)}, expected {' or '.join(map(str, legal))}",
            hint="masks of heads come with all heads; each rank takes its own",
        )
    whole: torch.Tensor = whole_tokens(mask)
    if whole.dtype == torch.bool:
        return torch.zeros_like(whole, dtype=dtype).masked_fill_(whole, float("-inf"))
    return enter(whole, wire) if whole.requires_grad and torch.is_grad_enabled() else whole
