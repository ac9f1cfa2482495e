"""Guards: what ``p.grad`` shows while the gradient is not there to be read.

The one idea: a guard is a tensor without memory that has the shape, dtype and device of the gradient and
refuses everything else. Code that clips, unscales, reduces or inspects a gradient that was not reduced yet
fails at that line, with what to write instead. ``p.grad is None`` still means that the user cleared it, and
zeroing it counts as clearing, too.

# Note [Dispatch]
The refusal sits below torch's Python functions, where every operation arrives: also those of collectives,
which do not ask tensor classes and write past the end of an expanded tensor, and those of loops in C++ such
as a GradScaler's. What needs no numbers passes: shapes, ``.to()`` without a change, ``zeros_like``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from attrs import define, field
from torch import nn
from torch.utils import _pytree as pytree

from colossal_core.errors import UsageError

__all__ = ["GradientGuard"]

_ZERO = {torch.ops.aten.zero_, torch.ops.aten._foreach_zero_}
_FILL = {torch.ops.aten.fill_}
_SAME = {torch.ops.aten.detach, torch.ops.aten.alias}
_SHAPE_ONLY = {
    torch.ops.aten.empty_like,
    torch.ops.aten.full_like,
    torch.ops.aten.new_empty,
    torch.ops.aten.new_full,
    torch.ops.aten.new_ones,
    torch.ops.aten.new_zeros,
    torch.ops.aten.ones_like,
    torch.ops.aten.rand_like,
    torch.ops.aten.randn_like,
    torch.ops.aten.zeros_like,
}


@define(eq=False)
class _Note:
    """What happened to a guard; shared by its aliases, and without a way back to the parameter.

    Attributes:
        name: Name of the parameter.
        is_zeroed: Whether the guard was zeroed.
    """

    name: str
    is_zeroed: bool = False


class _Unreduced(torch.Tensor):
    """The tensor that ``p.grad`` shows; see Note [Dispatch]."""

    note: _Note
    __torch_function__: Any = torch._C._disabled_torch_function_impl  # noqa: SLF001 - as torch's own subclasses

    @staticmethod
    def like(other: torch.Tensor, note: _Note) -> _Unreduced:
        """Return a guard in the form of another tensor."""
        made: _Unreduced = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001 - as above
            _Unreduced, other.shape, dtype=other.dtype, device=other.device, storage_size=0
        )
        made.note = note
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares how it is called
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Pass what needs no numbers, note zeroing, refuse the rest."""
        del types
        kind = func.overloadpacket
        if kind in _SAME and isinstance(args[0], cls):
            return cls.like(args[0], args[0].note)
        if kind in _ZERO or (kind in _FILL and isinstance(args[0], cls) and _is_zero(args[1])):
            for tensor in pytree.tree_leaves(args[0]):
                if isinstance(tensor, cls):
                    tensor.note.is_zeroed = True
                else:
                    tensor.zero_()
            return None if isinstance(args[0], list) else args[0]
        if kind in _SHAPE_ONLY:
            return func(*pytree.tree_map_only(cls, _empty, args), **(kwargs or {}))
        first = next(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, cls))
        raise _refusal(str(func).rpartition(".")[0], first.note)

    def numpy(self, *, force: bool = False) -> NoReturn:
        """Refuse, as every other reading."""
        del force
        raise _refusal("numpy", self.note)

    def tolist(self) -> NoReturn:
        """Refuse, as every other reading."""
        raise _refusal("tolist", self.note)

    def share_memory_(self) -> NoReturn:
        """Refuse: there is no memory."""
        raise _refusal("share_memory_", self.note)

    def __reduce_ex__(self, _: Any) -> NoReturn:
        """Refuse to be pickled."""
        raise _refusal("pickle", self.note)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # theirs has no types
        """Say what it is."""
        return f"<gradient of {self.note.name!r}, not reduced yet, {tuple(self.shape)}, {self.dtype}>"


def _refusal(call: str, note: _Note) -> UsageError:
    """Return the error for a call that needs the gradient."""
    hint = "clip with Booster(max_grad_norm=...) or optimizer.clip_grad_norm_(...)"
    if call.startswith("c10d."):
        hint = "drop this collective: step() averages over the ranks by itself"
    elif "unscale" in call:
        hint = "drop the GradScaler for Booster(precision='fp16'), which scales by itself"
    return UsageError(
        f"{call} needs the gradient of {note.name!r}, which is not reduced over the ranks before "
        "optimizer.step()",
        hint=f"{hint}; read and edit gradients in booster.full_gradients(model), or let "
        "Replicated(reduce='backward') show them after every backward",
    )


def _is_zero(value: object) -> bool:
    """Whether it is the number 0."""
    return not isinstance(value, _Unreduced) and bool(value == 0)


def _empty(guard: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same form, with memory."""
    return torch.empty(guard.shape, dtype=guard.dtype, device=guard.device)


@define(eq=False)
class GradientGuard:
    """The guard of one parameter's gradient.

    Attributes:
        parameter: The Parameter whose ``grad`` it stands in for.
        name: Its name, for messages.
        tensor: The guard itself.
    """

    parameter: nn.Parameter
    name: str
    tensor: torch.Tensor = field(init=False)
    _note: _Note = field(init=False)

    def __attrs_post_init__(self) -> None:
        """Make the guard tensor."""
        self._note = _Note(self.name)
        self.tensor = _Unreduced.like(self.parameter.detach(), self._note)

    def renew(self) -> None:
        """Forget what was zeroed, before the guard is shown again."""
        self._note.is_zeroed = False

    def is_shown_by(self, gradient: torch.Tensor) -> bool:
        """Tell whether a tensor is this guard, or what ``detach`` or ``.data`` made of it."""
        return gradient is self.tensor or (isinstance(gradient, _Unreduced) and gradient.note is self._note)

    def was_zeroed(self) -> bool:
        """Tell whether the user zeroed the gradient in place since the last call."""
        found, self._note.is_zeroed = self._note.is_zeroed, False
        return found
