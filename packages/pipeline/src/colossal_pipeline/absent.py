"""Tensors that are not there: what modules of other stages return, and how their parameters look.

The one idea: user code between modules runs on every stage, also where it works on what another stage
computes. There it gets tensors that have a shape, a dtype and a device and no memory; what is computed from
them is absent too, and costs neither time nor memory. Whoever looks at a value gets an error, so nothing
that a stage does not have can silently become part of a result.

# Note [Shadows]
An absent tensor wraps a tensor on the ``meta`` device, its shadow, on which torch works out the shapes
of results. Writing into an absent tensor changes nothing. Writing an absent tensor into a real one leaves
that one as it is: such a tensor is needed on this stage only where all that it is made of was sent here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch.utils import _pytree as pytree

from colossal_core.errors import CapabilityError

__all__ = ["Absent", "NeedsValuesError", "run_on_shadows"]


class NeedsValuesError(CapabilityError):
    """Code looks at a value of a tensor that is not there."""


class Absent(torch.Tensor):
    """A tensor without values; see Note [Shadows]."""

    shadow: torch.Tensor
    __torch_function__: Any = torch._C._disabled_torch_function_impl  # noqa: SLF001 - as theirs

    @staticmethod
    def over(shadow: torch.Tensor, device: torch.device) -> Absent:
        """Return the absent tensor with this shadow.

        Args:
            shadow: A tensor on the ``meta`` device.
            device: Where the tensor would be.
        """
        made: Absent = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001 - as above
            Absent,
            shadow.size(),
            strides=shadow.stride(),
            storage_offset=shadow.storage_offset(),
            dtype=shadow.dtype,
            device=device,
        )
        made.shadow = shadow
        return made

    @staticmethod
    def like(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Absent:
        """Return an absent tensor of a shape."""
        return Absent.over(torch.empty(tuple(shape), dtype=dtype, device="meta"), device)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares how it is called
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Work out the shape of a result."""
        del types
        return run_on_shadows(func, args, kwargs or {})

    def tolist(self) -> NoReturn:
        """Refuse: there are no values."""
        raise _refusal("tolist")

    def numpy(self, *, force: bool = False) -> NoReturn:
        """Refuse: there are no values."""
        del force
        raise _refusal("numpy")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # theirs has no types
        """Say what it is."""
        return f"<tensor of another pipeline stage, {tuple(self.shape)}, {self.dtype}>"


def run_on_shadows(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operation on shadows, and return absent tensors for its results.

    Args:
        func: The operation.
        args: Its arguments, some of them absent.
        kwargs: Its keyword arguments.

    Raises:
        NeedsValuesError: The operation needs values.
    """
    originals: dict[int, torch.Tensor] = {}
    device: torch.device | None = None

    def lower(leaf: Any) -> Any:
        nonlocal device
        if isinstance(leaf, torch.device):
            return torch.device("meta")
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if isinstance(leaf, Absent):
            device = leaf.device if device is None else device
            shadow = leaf.shadow
        else:
            shadow = torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device="meta")
        originals[id(shadow)] = leaf
        return shadow

    lowered_args, lowered_kwargs = pytree.tree_map(lower, (tuple(args), dict(kwargs)))
    try:
        results = func(*lowered_args, **lowered_kwargs)
    except (RuntimeError, NotImplementedError) as err:
        raise _refusal(str(func), str(err).splitlines()[0]) from err
    wanted = kwargs.get("device")
    home = wanted if isinstance(wanted, torch.device) else device or torch.device("cpu")

    def lift(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return originals.get(id(leaf)) if id(leaf) in originals else Absent.over(leaf, home)

    return pytree.tree_map(lift, results)


def _refusal(call: str, reason: str = "") -> NeedsValuesError:
    """Return the error for an operation that needs values."""
    return NeedsValuesError(
        f"{call} needs the values of a tensor that another pipeline stage computes"
        + (f" ({reason})" if reason else ""),
        hint="move code that looks at values into a module, or keep both modules on one stage with "
        "Pipeline(balance=[...])",
    )
