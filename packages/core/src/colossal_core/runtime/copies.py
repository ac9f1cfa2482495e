"""Refusals of what would copy a part of a model and take it for all of it.

The one idea: where a rank holds boxes of parameters, or has released them, ``state_dict``,
``load_state_dict`` and ``deepcopy`` would work on those and say nothing, so they raise with the line that
does what was meant.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, Protocol

from colossal_core.errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["Handle", "refuse_copies"]


class Handle(Protocol):
    """Something that can be taken away again, as torch's handles of hooks."""

    def remove(self) -> None:
        """Take it away."""


HINT = (
    "booster.save() and booster.load() keep a run, booster.export(model, directory) writes weights that "
    "from_pretrained reads, booster.full_parameters(model) shows them whole, booster.average(model, decay) "
    "follows them"
)


def refuse_copies(model: nn.Module, partial: Collection[torch.Tensor], reason: str) -> list[Handle]:
    """Let copies of a model, and of those of its modules that hold partial tensors, raise.

    Args:
        model: The model.
        partial: Parameters and buffers that are not whole on this rank, or not always.
        reason: Why, after "this rank holds": ``"only parts of it"``.

    Returns:
        Handles that end it.
    """
    handles: list[Handle] = []
    for path, module in model.named_modules():
        if any(tensor in partial for tensor in (*module.parameters(), *module.buffers())):
            name = f"module {path!r}" if path else f"this {type(module).__name__}"
            handles.append(module.register_state_dict_pre_hook(_refusal(f"state_dict() of {name}", reason)))
            handles.append(
                module.register_load_state_dict_pre_hook(_refusal(f"load_state_dict() of {name}", reason))
            )
            if "__deepcopy__" not in module.__dict__:
                module.__dict__["__deepcopy__"] = _refusal(f"a copy of {name}", reason)
                handles.append(_Removal(module))
    return handles


class _Removal:
    """A handle that lets a module be copied again."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def remove(self) -> None:
        """Take the refusal away."""
        self._module.__dict__.pop("__deepcopy__", None)


def _refusal(what: str, reason: str) -> Callable[..., Any]:
    """Return a function that raises whatever it is given."""

    def refuse(*_args: Any, **_kwargs: Any) -> Any:
        raise UsageError(f"{what} would be incomplete: this rank holds {reason}", hint=HINT)

    return refuse
