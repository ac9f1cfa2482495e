"""Logits that are cut along the vocabulary and look whole.

The one idea: most of what happens to logits between a head and a loss does not mix classes: casts, caps,
scaling, flattening, dropping the last position. On :class:`SplitLogits` these act on the piece that is here,
and cross entropy is computed of pieces. Anything else sees whole logits, gathered at that moment, so no code
can compute something wrong with a piece; it only pays for the gather. All ranks run the same code, so all of
them gather.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, final

import torch
import torch.nn.functional as F
from attrs import frozen
from torch.utils import _pytree as pytree

from colossal_tensor_parallel.loss import cut_cross_entropy, cut_logsumexp
from colossal_tensor_parallel.wires import join_pieces

if TYPE_CHECKING:
    from colossal_tensor_parallel.wires import Wire

__all__ = ["SplitLogits", "whole"]

_plainly: Any = torch._C.DisableTorchFunctionSubclass  # noqa: SLF001 - no public spelling


@final
class SplitLogits(torch.Tensor):
    """A tensor ``[..., classes]`` of which this rank holds some of the classes.

    Attributes:
        piece: Logits ``[..., this rank's classes]``.
        wire: The ranks that hold the others.
        gathered: The whole, once something needed it.
    """

    piece: torch.Tensor
    wire: Wire
    gathered: torch.Tensor | None

    def __new__(cls, piece: torch.Tensor, wire: Wire, size: int) -> SplitLogits:
        """Make the tensor; it has a shape and no memory."""
        make: Any = torch.Tensor._make_wrapper_subclass  # noqa: SLF001 - torch's documented way
        made: SplitLogits = make(
            cls, (*piece.shape[:-1], size), dtype=piece.dtype, device=piece.device, requires_grad=False
        )
        made.piece, made.wire, made.gathered = piece, wire, None
        return made

    def join(self) -> torch.Tensor:
        """Return the whole logits, the same on all ranks; communicates the first time."""
        if self.gathered is None:
            self.gathered = join_pieces(self.piece, self.wire, _width(self), -1)
        return self.gathered

    def like(self, piece: torch.Tensor) -> SplitLogits:
        """Return other logits that are cut in the same way."""
        return SplitLogits(piece, self.wire, _width(self))

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Compute on the piece where that is right, else on the whole."""
        keywords = dict(kwargs or {})
        if func in _SHAPES:
            with _plainly():
                return func(*args, **keywords)
        handle = _HANDLERS.get(func)
        if handle is not None and isinstance(args[0], SplitLogits):
            found = handle(args[0], _Call(func, args[1:], keywords))
            if found is not NotImplemented:
                return found
        plain_args, plain_keywords = pytree.tree_map(whole, (args, keywords))
        return func(*plain_args, **plain_keywords)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Compute on the whole; reached by code that goes around torch's functions."""
        plain_args, plain_keywords = pytree.tree_map(whole, (args, dict(kwargs or {})))
        return func(*plain_args, **plain_keywords)


def whole(leaf: Any) -> Any:
    """Return what a leaf of a tree is without any cut."""
    return leaf.join() if type(leaf) is SplitLogits else leaf


def _width(logits: SplitLogits) -> int:
    """Return the number of classes of all ranks together."""
    with _plainly():
        return int(logits.shape[-1])


def _shape(logits: SplitLogits) -> tuple[int, ...]:
    """Return the shape of the whole."""
    with _plainly():
        return tuple(logits.shape)


# --- what acts on pieces ------------------------------------------------------------------------------------


@frozen
class _Call:
    """A call of one of torch's functions with cut logits as its first argument.

    Attributes:
        func: The function.
        args: Its other positional arguments.
        kwargs: Its keyword arguments.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def _each(logits: SplitLogits, call: _Call) -> Any:
    """Apply a function of each element by itself, with numbers as its other arguments."""
    others = pytree.tree_leaves((call.args, call.kwargs))
    if any(isinstance(other, torch.Tensor) and other.dim() > 0 for other in others):
        return NotImplemented
    return logits.like(call.func(logits.piece, *call.args, **call.kwargs))


def _cast(logits: SplitLogits, call: _Call) -> Any:
    """Cast or move."""
    if any(isinstance(other, torch.Tensor) for other in (*call.args, *call.kwargs.values())):
        return NotImplemented
    return logits.like(call.func(logits.piece, *call.args, **call.kwargs))


def _of_piece(logits: SplitLogits, call: _Call) -> Any:
    """Say what is said of the piece."""
    return call.func(logits.piece, *call.args, **call.kwargs)


def _shaped(logits: SplitLogits, call: _Call) -> Any:
    """Give another shape that keeps the classes as its last dim."""
    wanted = (
        call.args[0]
        if len(call.args) == 1 and isinstance(call.args[0], (tuple, list, torch.Size))
        else call.args
    )
    if call.kwargs or not wanted or not all(isinstance(size, int) for size in wanted):
        return NotImplemented
    with _plainly():
        shape = tuple(torch.empty(_shape(logits), device="meta").reshape(tuple(wanted)).shape)
    if shape[-1] != _width(logits) or logits.piece.numel() == 0:
        return NotImplemented
    return logits.like(logits.piece.reshape(*shape[:-1], logits.piece.shape[-1]))


def _flat(logits: SplitLogits, call: _Call) -> Any:
    """Flatten dims before the last."""
    first = call.args[0] if call.args else call.kwargs.get("start_dim", 0)
    last = call.args[1] if len(call.args) > 1 else call.kwargs.get("end_dim", -1)
    num_dims = logits.piece.dim()
    if last in {-1, num_dims - 1}:
        return NotImplemented if first not in {-1, num_dims - 1} else logits
    return logits.like(logits.piece.flatten(first, last))


def _picked(logits: SplitLogits, call: _Call) -> Any:
    """Index dims before the last by numbers and slices."""
    index = call.args[0] if isinstance(call.args[0], tuple) else (call.args[0],)
    if not all(isinstance(item, (int, slice)) or item is Ellipsis for item in index):
        return NotImplemented
    num_given = sum(item is not Ellipsis for item in index)
    num_dims = logits.piece.dim()
    if Ellipsis in index:
        at = index.index(Ellipsis)
        index = (*index[:at], *[slice(None)] * (num_dims - num_given), *index[at + 1 :])
    if len(index) > num_dims or (len(index) == num_dims and index[-1] != slice(None)):
        return NotImplemented
    return logits.like(logits.piece[index])


def _cross_entropy(logits: SplitLogits, call: _Call) -> Any:
    """Compute the loss of class numbers from pieces; other forms see the whole."""
    names = ("target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    given = {**dict(zip(names, call.args, strict=False)), **call.kwargs}
    target = given.pop("target", None)
    if not isinstance(target, torch.Tensor) or target.is_floating_point() or target.dim() != 1:
        return NotImplemented
    if logits.piece.dim() != 2 or any(
        given.pop(name, None) is not None for name in ("weight", "size_average", "reduce")
    ):
        return NotImplemented
    return cut_cross_entropy(logits.piece, target, logits.wire, _width(logits), **given)


def _logsumexp(logits: SplitLogits, call: _Call) -> Any:
    """Reduce the classes, as z-loss does."""
    given = {**dict(zip(("dim", "keepdim"), call.args, strict=False)), **call.kwargs}
    dims = given.pop("dim", None)
    keeps = given.pop("keepdim", False)
    if given or dims not in [-1, logits.piece.dim() - 1, (-1,), [-1]]:
        return NotImplemented
    found = cut_logsumexp(logits.piece, logits.wire)
    return found.unsqueeze(-1) if keeps else found


def _getter(name: str) -> Any:
    """Return what torch calls to read an attribute of a tensor."""
    return getattr(torch.Tensor, name).__get__


Handler = Callable[[SplitLogits, _Call], Any]

_SHAPES = {
    _getter("shape"),
    _getter("dtype"),
    _getter("device"),
    _getter("layout"),
    _getter("ndim"),
    _getter("is_cuda"),
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.nelement,
    torch.Tensor.element_size,
    torch.Tensor.is_floating_point,
    torch.Tensor.is_complex,
    torch.Tensor.__len__,
    torch.is_floating_point,
    torch.numel,
}
"""What the shape answers."""

_HANDLERS: Mapping[Any, Handler] = {
    **dict.fromkeys(
        [
            torch.Tensor.__mul__,
            torch.Tensor.__rmul__,
            torch.Tensor.mul,
            torch.mul,
            torch.Tensor.__truediv__,
            torch.Tensor.div,
            torch.div,
            torch.true_divide,
            torch.Tensor.tanh,
            torch.tanh,
            torch.Tensor.neg,
            torch.Tensor.__neg__,
            torch.Tensor.contiguous,
            torch.Tensor.clone,
            torch.Tensor.detach,
        ],
        _each,
    ),
    **dict.fromkeys(
        [torch.Tensor.float, torch.Tensor.double, torch.Tensor.half, torch.Tensor.bfloat16, torch.Tensor.to],
        _cast,
    ),
    **dict.fromkeys(
        [_getter("requires_grad"), _getter("grad_fn"), _getter("is_leaf")],
        _of_piece,
    ),
    torch.Tensor.register_hook: _of_piece,
    torch.Tensor.view: _shaped,
    torch.Tensor.reshape: _shaped,
    torch.reshape: _shaped,
    torch.Tensor.flatten: _flat,
    torch.flatten: _flat,
    torch.Tensor.__getitem__: _picked,
    F.cross_entropy: _cross_entropy,
    torch.logsumexp: _logsumexp,
    torch.Tensor.logsumexp: _logsumexp,
}
"""What acts on pieces; a handler that returns ``NotImplemented`` leaves a call to the whole."""
