"""Tensors that are not there: what modules of other stages return, and how their parameters look.

The one idea: user code between modules runs on every stage, also where it works on what another stage
computes. There it gets tensors that have a shape, a dtype and a device and no memory; what is computed from
them is absent too, and costs neither time nor memory. Whoever looks at a value gets an error, so nothing
that a stage does not have can silently become part of a result.

# Note [Shadows]
An absent tensor wraps a tensor on the ``meta`` device, its shadow, on which torch works out the shapes
of results. Writing into an absent tensor changes nothing. Writing an absent tensor into a real one leaves
that one as it is: such a tensor is needed on this stage only where all that it is made of was sent here.

Working a shape out takes torch much longer than adding two small tensors, so the forms of results are kept.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch.utils import _pytree as pytree
from torch.utils._mode_utils import no_dispatch

from colossal_core.errors import CapabilityError

__all__ = ["Absent", "NeedsValuesError", "run_on_shadows"]


MAX_RESULTS = 4096
"""Forms of results that are kept: code between modules computes the same again for each micro-batch."""

_ASKS_MEMORY = {torch.ops.aten.as_strided.default}
"""Operations whose result depends on how large the memory behind a tensor is."""


class NeedsValuesError(CapabilityError):
    """Code looks at a value of a tensor that is not there."""


class _Form(NamedTuple):
    """All that there is to know of a tensor without values."""

    shape: torch.Size
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device


class Absent(torch.Tensor):
    """A tensor without values; see Note [Shadows]."""

    _shadow: torch.Tensor | None
    __torch_function__: Any = torch._C._disabled_torch_function_impl  # noqa: SLF001 - as theirs

    @staticmethod
    def over(shadow: torch.Tensor, device: torch.device) -> Absent:
        """Return the absent tensor with this shadow.

        Args:
            shadow: A tensor on the ``meta`` device.
            device: Where the tensor would be.
        """
        form = _Form(shadow.size(), shadow.stride(), int(shadow.storage_offset()), shadow.dtype, device)
        return Absent._of(form, shadow)

    @staticmethod
    def like(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Absent:
        """Return an absent tensor of a shape."""
        return Absent._of(_dense(tuple(shape), dtype, device))

    @staticmethod
    def _of(form: _Form, shadow: torch.Tensor | None = None) -> Absent:
        """Return an absent tensor of a form."""
        shape, strides, offset, dtype, device = form
        made: Absent = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001 - as above
            Absent, shape, strides=strides, storage_offset=offset, dtype=dtype, device=device
        )
        made._shadow = shadow
        return made

    @property
    def shadow(self) -> torch.Tensor:
        """Its shadow; many never need one."""
        if self._shadow is None:
            self._shadow = _shadow_of(self)
        return self._shadow

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
        kwargs = kwargs or {}
        if _is_pure(func):
            form = _result_of(func, *map(_form_of, args), **{k: _form_of(v) for k, v in kwargs.items()})
            if form is not None:
                return Absent._of(form)
        return run_on_shadows(func, args, kwargs)

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
            shadow = _shadow_of(leaf)
        originals[id(shadow)] = leaf
        return shadow

    lowered_args, lowered_kwargs = pytree.tree_map(lower, (tuple(args), dict(kwargs)))
    try:
        results = func(*lowered_args, **lowered_kwargs)
    except (RuntimeError, NotImplementedError) as err:
        raise _refusal(str(func), str(err).splitlines()[0]) from err
    if torch.Tag.inplace_view in getattr(func, "tags", ()) and isinstance(args[0], Absent):
        _change_form(func, args, kwargs)
    wanted = kwargs.get("device")
    home = wanted if isinstance(wanted, torch.device) else device or torch.device("cpu")

    def lift(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return originals.get(id(leaf)) if id(leaf) in originals else Absent.over(leaf, home)

    return pytree.tree_map(lift, results)


def _change_form(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Give the tensor itself the form that an operation such as ``transpose_`` gave its shadow.

    As torch does for its own wrappers, in ``return_and_correct_aliasing``.
    """
    with no_dispatch():
        before = torch._C._meta_in_tls_dispatch_include()  # noqa: SLF001 - as theirs
        torch._C._set_meta_in_tls_dispatch_include(True)  # noqa: SLF001 - as theirs
        try:
            func(*args, **kwargs)
        finally:
            torch._C._set_meta_in_tls_dispatch_include(before)  # noqa: SLF001 - as theirs


@functools.lru_cache(MAX_RESULTS)
def _dense(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> _Form:
    """Return the form of a contiguous tensor."""
    shadow = torch.empty(shape, dtype=dtype, device="meta")
    return _Form(shadow.size(), shadow.stride(), 0, dtype, device)


def _shadow_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same form on the ``meta`` device."""
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


@functools.cache
def _is_pure(func: Any) -> bool:
    """Whether the form of what an operation returns follows from forms, and it changes nothing."""
    if not isinstance(func, torch._ops.OpOverload) or func in _ASKS_MEMORY:  # noqa: SLF001 - as above
        return False
    schema = func._schema  # noqa: SLF001 - torch has no other place of it
    return not schema.is_mutable and [str(one.type) for one in schema.returns] == ["Tensor"]


def _form_of(value: Any) -> Any:
    """Return an argument with forms in place of tensors, as something that can be looked up."""
    if isinstance(value, torch.Tensor):
        return _Form(value.size(), value.stride(), int(value.storage_offset()), value.dtype, value.device)
    if isinstance(value, (list, tuple)):
        return tuple(_form_of(one) for one in value)
    return value


def _absent_of(value: Any) -> Any:
    """Return what :func:`_form_of` was given, with absent tensors."""
    if isinstance(value, _Form):
        return Absent._of(value)  # noqa: SLF001 - of this module
    return [_absent_of(one) for one in value] if isinstance(value, tuple) else value


@functools.lru_cache(MAX_RESULTS, typed=True)
def _result_of(func: Any, *args: Any, **kwargs: Any) -> _Form | None:
    """Return the form of what a pure operation returns, and None where that takes tensors to know."""
    given = [_absent_of(one) for one in args]
    result = run_on_shadows(func, given, {name: _absent_of(one) for name, one in kwargs.items()})
    if not isinstance(result, Absent) or any(result is one for one in given):
        return None
    found: _Form = _form_of(result)
    return found


def _refusal(call: str, reason: str = "") -> NeedsValuesError:
    """Return the error for an operation that needs values."""
    return NeedsValuesError(
        f"{call} needs the values of a tensor that another pipeline stage computes"
        + (f" ({reason})" if reason else ""),
        hint="move code that looks at values into a module, or keep both modules on one stage with "
        "Pipeline(balance=[...])",
    )
