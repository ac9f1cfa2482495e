"""Activations that are divided along the tokens and look whole.

The one idea: between a row layer and the next column layers most code treats each token by itself:
residuals are added, norms are taken, values are scaled, cast and dropped. On :class:`SplitTokens` these act
on the piece that is here. Code that asks for a shape is told that of the whole, so masks and positions come
out right. Anything else gets the whole, gathered at that moment, so no code can compute something wrong with
a piece; it only pays for the gather. All ranks run the same code, so all of them gather.

Tokens are the dim before the last. Pieces are those of :func:`~.spans.split_evenly`: they may differ by one,
and be empty where there are fewer tokens than ranks. A common value that meets a divided one is divided, too;
a vector that every token reads has a share of its gradient on each rank, which backward sums.

Source: Korthikanti et al., *Reducing Activation Recomputation*, 2022, section 4.2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, final

import torch
import torch.nn.functional as F
from attrs import define, field, frozen
from torch.utils import _pytree as pytree

from colossal_tensor_parallel.draws import Dice
from colossal_tensor_parallel.wires import Wire, divide, enter, join_pieces

__all__ = ["TOKENS", "Lot", "SplitTokens", "divide_tokens", "is_known", "plain", "whole_tokens"]

TOKENS = -2
"""The dim of tokens."""

_plainly: Any = torch._C.DisableTorchFunctionSubclass  # noqa: SLF001 - no public spelling


@final
@define(eq=False)
class Lot:
    """What divided activations of one model have in common.

    Attributes:
        wire: The ranks.
        dice: Draws for values that are divided.
        gathers: Names of functions that wanted the whole and the row layer whose output it was, if it came
            straight from one; None where nobody asks.
    """

    wire: Wire
    dice: Dice
    gathers: list[tuple[str, str]] | None = field(default=None)


@final
class SplitTokens(torch.Tensor):
    """A tensor ``[..., tokens, features]`` of which this rank holds some of the tokens.

    Attributes:
        lot: What it has in common with others of its model.
        num_tokens: Tokens of all ranks together.
        origin: The layer whose output it is, with nothing added; empty otherwise.
    """

    lot: Lot
    num_tokens: int
    origin: str

    @staticmethod
    def of(piece: torch.Tensor, lot: Lot, num_tokens: int, origin: str = "") -> SplitTokens:
        """Return a divided tensor of which this is the piece of this rank; differentiable."""
        with _plainly():
            made = piece.as_subclass(SplitTokens)
        made.lot, made.num_tokens, made.origin = lot, num_tokens, origin
        return made

    def join(self, reason: str = "") -> torch.Tensor:
        """Return the whole, the same on all ranks; communicates.

        Args:
            reason: What needs it.
        """
        if self.lot.gathers is not None:
            self.lot.gathers.append((reason, self.origin))
        return join_pieces(plain(self), self.lot.wire, self.num_tokens, TOKENS)

    def like(self, piece: torch.Tensor, origin: str = "") -> SplitTokens:
        """Return another tensor that is divided in the same way."""
        return SplitTokens.of(piece, self.lot, self.num_tokens, origin)

    def restorer(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return what makes a divided tensor of a piece again, for blocks that are recomputed."""
        lot, num_tokens = self.lot, self.num_tokens
        return lambda piece: SplitTokens.of(piece, lot, num_tokens)

    @property
    def whole_shape(self) -> torch.Size:
        """The shape of the whole."""
        shape = list(_piece_shape(self))
        shape[TOKENS] = self.num_tokens
        return torch.Size(shape)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Print this rank's piece; communicates nothing."""
        del tensor_contents
        return f"SplitTokens({tuple(self.whole_shape)}, here {plain(self)!r})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Compute on the piece where that is right, else on the whole."""
        call = _Call(func, args, dict(kwargs or {}))
        handle = _HANDLERS.get(func)
        if handle is None and getattr(func, "__name__", "") == "__get__":
            handle = _plain_call
        if handle is not None:
            found = handle(call)
            if found is not NotImplemented:
                return found
        name = getattr(func, "__name__", str(func))
        plain_args, plain_kwargs = pytree.tree_map(
            lambda leaf: leaf.join(name) if type(leaf) is SplitTokens else leaf, (args, call.kwargs)
        )
        return func(*plain_args, **plain_kwargs)


def plain(value: torch.Tensor) -> torch.Tensor:
    """Return this rank's piece of a divided tensor, anything else as it is; differentiable."""
    if type(value) is not SplitTokens:
        return value
    with _plainly():
        return value.as_subclass(torch.Tensor)


def is_known(value: torch.Tensor) -> bool:
    """Whether a tensor is one of torch's own; others stand for something, and decide for themselves."""
    return type(value) in {torch.Tensor, torch.nn.Parameter}


def whole_tokens(leaf: Any) -> Any:
    """Return what a leaf of a tree is when it is not divided."""
    return leaf.join("an output of the model") if type(leaf) is SplitTokens else leaf


def divide_tokens(value: torch.Tensor, lot: Lot) -> SplitTokens:
    """Return a common value as one that is divided."""
    return SplitTokens.of(divide(value, lot.wire, TOKENS), lot, int(value.shape[TOKENS]))


def _piece_shape(value: torch.Tensor) -> torch.Size:
    """Return the shape of what is here."""
    with _plainly():
        return value.shape


# --- what acts on pieces ------------------------------------------------------------------------------------


@frozen
class _Call:
    """A call of one of torch's functions with a divided tensor among its arguments.

    Attributes:
        func: The function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def first(self) -> SplitTokens | None:
        """The first argument, where it is the divided tensor."""
        return self.args[0] if self.args and type(self.args[0]) is SplitTokens else None


def _plain_call(call: _Call) -> Any:
    """Ask the piece what does not depend on the number of tokens."""
    with _plainly():
        return call.func(*call.args, **call.kwargs)


def _shape(call: _Call) -> Any:
    """Say the shape of the whole, or one size of it."""
    assert call.first is not None
    shape = call.first.whole_shape
    dim = call.args[1] if len(call.args) > 1 else call.kwargs.get("dim")
    return shape if dim is None else shape[dim]


def _count(call: _Call) -> Any:
    """Count the elements of the whole."""
    assert call.first is not None
    return call.first.whole_shape.numel()


def _length(call: _Call) -> Any:
    """Say how long the first dim of the whole is."""
    assert call.first is not None
    return call.first.whole_shape[0]


def _gathered(call: _Call) -> Any:
    """Leave an attribute that mixes tokens to the whole."""
    assert call.first is not None
    return call.func(call.first.join("an attribute"), *call.args[1:])


def _each(call: _Call) -> Any:
    """Apply a function of each element by itself, or of elements at the same place."""
    leads = [leaf for leaf in (*call.args, *call.kwargs.values()) if type(leaf) is SplitTokens]
    if "out" in call.kwargs or len({lead.num_tokens for lead in leads}) != 1:
        return NotImplemented
    lead = leads[0]
    found = [_piece_of(leaf, lead) for leaf in call.args]
    keywords = {name: _piece_of(leaf, lead) for name, leaf in call.kwargs.items()}
    if any(leaf is NotImplemented for leaf in (*found, *keywords.values())):
        return NotImplemented
    tensors = [leaf for leaf in (*call.args, *call.kwargs.values()) if isinstance(leaf, torch.Tensor)]
    return lead.like(call.func(*found, **keywords), lead.origin if len(tensors) == 1 else "")


def _piece_of(leaf: Any, lead: SplitTokens) -> Any:
    """Return what an operand of a divided tensor is on this rank."""
    if type(leaf) is SplitTokens:
        return plain(leaf)
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if not is_known(leaf):
        return NotImplemented
    if leaf.dim() >= 2 and leaf.shape[TOKENS] != 1:
        if leaf.shape[TOKENS] != lead.num_tokens:
            return NotImplemented
        return divide(leaf, lead.lot.wire, TOKENS)
    return _read_by_all(leaf, lead.lot)


def _read_by_all(leaf: Any, lot: Lot) -> Any:
    """Return a common operand that every token reads; its gradient is summed over the ranks."""
    if isinstance(leaf, torch.Tensor) and leaf.requires_grad and torch.is_grad_enabled():
        return enter(leaf, lot.wire)
    return leaf


def _in_place(call: _Call) -> Any:
    """Change the piece in place."""
    lead = call.first
    if lead is None:
        return NotImplemented
    others = [_piece_of(leaf, lead) for leaf in call.args[1:]]
    if any(leaf is NotImplemented for leaf in others):
        return NotImplemented
    with _plainly():
        call.func(lead, *others, **call.kwargs)
    lead.origin = ""
    return lead


def _dropped(call: _Call) -> Any:
    """Drop elements of the piece, other ones on each rank."""
    lead = call.first
    if lead is None:
        return NotImplemented
    given = {**dict(zip(("p", "training"), call.args[1:], strict=False)), **call.kwargs}
    drops = given.get("p", 0.5) and given.get("training", given.get("train", True))
    with lead.lot.dice.aside() if drops else nullcontext():
        return lead.like(call.func(plain(lead), *call.args[1:], **call.kwargs), lead.origin)


def _normed(call: _Call) -> Any:
    """Take the norm of each token; its weights are read by all."""
    lead = call.first
    names: tuple[str, ...] = ("normalized_shape", "weight", "bias", "eps")
    if call.func is F.rms_norm:
        names = ("normalized_shape", "weight", "eps")
    given = {**dict(zip(names, call.args[1:], strict=False)), **call.kwargs}
    if lead is None or len(tuple(given["normalized_shape"])) != 1:
        return NotImplemented
    given = {name: _read_by_all(value, lead.lot) for name, value in given.items()}
    return lead.like(call.func(plain(lead), **given))


def _cast(call: _Call) -> Any:
    """Cast, move or copy."""
    lead = call.first
    if lead is None or any(type(leaf) is SplitTokens for leaf in (*call.args[1:], *call.kwargs.values())):
        return NotImplemented
    return lead.like(call.func(plain(lead), *call.args[1:], **call.kwargs), lead.origin)


def _reshaped(call: _Call) -> Any:
    """Give the shape that it has already."""
    lead = call.first
    if lead is None:
        return NotImplemented
    sizes = call.args[1:] or tuple(call.kwargs.values())
    if len(sizes) == 1 and isinstance(sizes[0], (tuple, list, torch.Size)):
        sizes = tuple(sizes[0])
    shape = lead.whole_shape
    if len(sizes) == 1 and isinstance(sizes[0], torch.Tensor):
        sizes = tuple(sizes[0].shape)  # view_as
    is_same = len(sizes) == len(shape) and all(
        isinstance(size, int) and size in {-1, own} for size, own in zip(sizes, shape, strict=True)
    )
    return lead.like(plain(lead), lead.origin) if is_same else NotImplemented


def _picked(call: _Call) -> Any:
    """Index by what picks everything."""
    lead = call.first
    if lead is None:
        return NotImplemented
    index = call.args[1] if isinstance(call.args[1], tuple) else (call.args[1],)
    is_all = len(index) <= len(lead.whole_shape) and all(
        item is Ellipsis or item == slice(None) or item == slice(0, None)
        for item in index
        if item is Ellipsis or isinstance(item, slice)
    )
    is_all = is_all and all(item is Ellipsis or isinstance(item, slice) for item in index)
    return lead.like(plain(lead), lead.origin) if is_all else NotImplemented


Handler = Callable[[_Call], Any]


def _getter(name: str) -> Any:
    """Return what torch calls to read an attribute of a tensor."""
    return getattr(torch.Tensor, name).__get__


def _named(holders: tuple[Any, ...], names: str) -> list[Any]:
    """Return the functions of some names, wherever there are any."""
    return [getattr(holder, name) for name in names.split() for holder in holders if hasattr(holder, name)]


_PAIRS = "add sub mul div true_divide rsub addcmul addcdiv lerp where masked_fill maximum minimum pow"
_OPERATORS = "__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __pow__ __neg__"
_SINGLES = (
    "neg abs exp log sqrt rsqrt square tanh sigmoid relu sin cos clamp clip erf reciprocal nan_to_num "
    "clone contiguous detach positive"
)
_ACTIVATIONS = "gelu silu relu tanh sigmoid elu leaky_relu mish softplus hardtanh relu6 selu hardswish"
_CHANGES = "add_ sub_ mul_ div_ __iadd__ __isub__ __imul__ __itruediv__"
_CASTS = "float double half bfloat16 to type_as cpu cuda"
_FACTS = (
    "dim ndimension is_floating_point is_complex element_size requires_grad_ retain_grad register_hook "
    "is_contiguous data_ptr get_device type register_post_accumulate_grad_hook "
    "new_empty new_zeros new_ones new_full new_tensor"
)

_HANDLERS: Mapping[Any, Handler] = {
    **dict.fromkeys(_named((torch, torch.Tensor), f"{_PAIRS} {_SINGLES}"), _each),
    **dict.fromkeys(_named((torch.Tensor,), _OPERATORS), _each),
    **dict.fromkeys(_named((F,), _ACTIVATIONS), _each),
    **dict.fromkeys(_named((torch.Tensor,), _CHANGES), _in_place),
    **dict.fromkeys(_named((torch.Tensor,), _CASTS), _cast),
    **dict.fromkeys(_named((torch, torch.Tensor), _FACTS), _plain_call),
    **dict.fromkeys([F.dropout, torch.dropout], _dropped),
    **dict.fromkeys([F.layer_norm, F.rms_norm], _normed),
    **dict.fromkeys(_named((torch.Tensor,), "view reshape expand view_as reshape_as expand_as"), _reshaped),
    torch.reshape: _reshaped,
    torch.Tensor.__getitem__: _picked,
    torch.Tensor.size: _shape,
    _getter("shape"): _shape,
    **dict.fromkeys(_named((torch, torch.Tensor), "numel nelement"), _count),
    torch.Tensor.__len__: _length,
    **dict.fromkeys([_getter(name) for name in ("T", "mT", "H", "mH", "real", "imag", "data")], _gathered),
}
"""What acts on pieces; a handler that returns ``NotImplemented`` leaves a call to the whole."""
